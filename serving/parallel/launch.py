"""Starts the ranks of `--parallel N` as processes on this machine, and forms their group, again after a failure."""

import json
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...data.errors import RunError, UsageError
from ...data.run_facts import usable_cores
from ..core.captured import Recorder
from ..core.processes import start_process
from .decoder import SharedDecoder, StripDecoder
from .group import GroupError, RankError, VirtualGroup
from .options import ParallelOptions
from .processes import ProcessEnd
from .ranks import Ranks
from .strip_model import StripModel
from .torchrun import RemoteProcess, TorchRun
from .transport import LOOPBACK
from .worker import GroupKind, RankSettings, end_of, facts_of, key_of

_ENTRY = "patchedserve.serving.models.rank:run"
_START_S = 300.0
_MAX_PER_CORE = 4
_END_S = 5.0
_LOOK_EVERY_S = 0.02

Process = BaseProcess | RemoteProcess
"""A rank other than this one."""


def loopback_store() -> dist.TCPStore:
    """Create a store on a free loopback port. By default, torch listens on all addresses, regardless of the host."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),  # now owned by the store
        )


class Children:
    """Starts ranks as child processes. This process hosts the store where they meet."""

    host = LOOPBACK

    def __init__(self) -> None:
        self._own = loopback_store()
        self.store: dist.Store = self._own

    def start(self, settings: RankSettings) -> BaseProcess:
        """Start a rank."""
        own = replace(settings, port=self._own.port).to_json()
        return start_process(_ENTRY, own, device=settings.device, name=f"psctl-rank-{settings.rank}")


class ProcessRanks:
    """A `RankGroup` of processes: this one, and those that it or torchrun has started.

    Args:
        model: unmodified model of rank 0.
        fingerprint: fingerprint of its files, and of its changes.
        folder: directory of these files.
        options: options of all ranks.
        autoencoder: unmodified autoencoder of rank 0, if all ranks are to decode.
        changes: changes of the model, which the other ranks make, too; as in `RankSettings`.
        recorder: records passes of rank 0; the other ranks then record theirs, too.

    Attributes:
        model: model of rank 0.
        processes: processes of the other remaining ranks, by number.
        losses: descriptions of the lost ranks.

    Raises:
        RunError: if a rank does not start.
        UsageError: if there are too few devices or the wrong number of processes, or if a fact of a rank differs from
            that of rank 0; the message names both.
    """

    def __init__(
        self,
        model: nn.Module,
        fingerprint: str,
        folder: str,
        options: ParallelOptions,
        autoencoder: nn.Module | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        recorder: Recorder | None = None,
    ) -> None:
        self._options, self._number, self.losses = options, 0, list[str]()
        self.decoder = None if autoencoder is None else SharedDecoder(StripDecoder(autoencoder), options.weights)
        self._decoding: ProcessEnd | None = None
        self._launcher = TorchRun.from_environment(options) or Children()
        self._store = self._launcher.store
        facts = facts_of(fingerprint, model)
        # Other machines have their own devices.
        is_here = isinstance(self._launcher, Children)
        devices = devices_of(next(model.parameters()).device, options, is_here=is_here)
        self._settings = settings = RankSettings(
            rank=0,
            model=folder,
            device=devices[0],
            dtype=facts["dtype"],
            threads=max(1, torch.get_num_threads() // options.count),  # all share the processors of the machine
            timeout_s=options.timeout_s,
            host=self._launcher.host,
            backend=options.backend,
            decoder=None if autoencoder is None else str(next(autoencoder.parameters()).dtype).removeprefix("torch."),
            changes=dict(changes),
            is_recorded=recorder is not None,
        )
        self.processes: dict[int, Process] = {
            rank: self._launcher.start(replace(settings, rank=rank, device=devices[rank]))
            for rank in range(1, options.count)
        }
        # Children also end by themselves when rank 0 has ended, but only after a moment.
        self._end_all = weakref.finalize(self, _end, self.processes)
        try:
            self._check_ranks(facts)
            self.model = StripModel(model, recorder=recorder)
            self._form()
        except BaseException:
            self._end_all()
            raise

    def use(self, options: ParallelOptions) -> None:
        """Use other options with the same number of ranks, as in `RankGroup`."""
        self.ranks.retain(())
        self._options = options
        self.ranks = Ranks(self.end, self.model, options, [0, *self.processes])

    def recover(self, error: Exception) -> Exception | None:
        """Form the group again, as in `RankGroup`. A rank that does not answer in time is killed."""
        for end in (self.end, self._decoding):
            if isinstance(end, ProcessEnd):
                end.disconnect()
        self._store.set(key_of("over", self._number), "")
        # No rank computes for longer than this without sending to others; a waiting rank notices within a moment.
        last_sent_s = self.end.last_sent_s if isinstance(self.end, ProcessEnd) else 0.0
        until = max(last_sent_s + self._options.timeout_s, time.monotonic() + _END_S)
        answers = {
            rank: self._wait_for(key_of("left", self._number, rank), process, until)
            for rank, process in self.processes.items()
        }
        causes = [reason for reason in answers.values() if reason]
        lost = [rank for rank, reason in answers.items() if reason is None]
        for rank in lost:
            self.losses.append(f"rank {rank} {_describe_end(self.processes[rank])}: {error}")
            # Printed immediately, in every kind of run: a summary comes late, and a server has none.
            sys.stderr.write(f"Warning: {self.losses[-1]}; its work is done without it\n")
            _end({rank: self.processes.pop(rank)})
        self._number += 1
        self.model.clear()
        try:
            self._form()
        except GroupError as again:
            self.recover(again)
        if causes:
            return RankError(causes[0])
        return None if lost else error

    def close(self) -> None:
        """End the other ranks. Children are killed, as they have nothing to save; torchrun waits for its own."""
        if isinstance(self._launcher, TorchRun):
            with suppress(GroupError):
                self.ranks.stop()
        self._end_all()
        if isinstance(self.end, ProcessEnd):
            self.end.close()

    def _check_ranks(self, facts: dict[str, object]) -> None:
        """Wait until every rank is ready, and compare its facts with those of rank 0."""
        until = time.monotonic() + _START_S
        for rank, process in self.processes.items():
            answer = self._wait_for(key_of("has", rank), process, until)
            if answer is None:
                code = process.exitcode
                what = (
                    f"is not ready after {_START_S:g} s"
                    if code is None
                    else f"has ended with code {code} as it started"
                )
                raise RunError(f"rank {rank} {what}")
            theirs = json.loads(answer)
            if "error" in theirs:
                raise RunError(f"rank {rank}: {theirs['error']}")
            for name, own in facts.items():
                if theirs.get(name) != own:
                    raise UsageError(f"rank {rank} has {name} {theirs.get(name)}, but rank 0 has {own}")

    def _form(self) -> None:
        """Form a group of the remaining ranks."""
        members = [0, *self.processes]
        self._store.set(key_of("group", self._number), json.dumps(members))
        if len(members) == 1:
            self.end = VirtualGroup(1).end(0)
        else:
            self.end = self._end_of("meet", len(members))
            if self.decoder is not None:
                self._decoding = self._end_of("decode", len(members))
        if self.decoder is not None:
            self.decoder.use(self._decoding if len(members) > 1 else None)
        self.ranks = Ranks(self.end, self.model, self._options, members)

    def _end_of(self, what: GroupKind, size: int) -> ProcessEnd:
        """Connect to the other ranks and return rank 0's end of a group."""
        settings = replace(self._settings, timeout_s=self._options.timeout_s)
        return end_of(what, self._number, settings, self._store, 0, size)

    def _wait_for(self, key: str, process: Process, until: float) -> str | None:
        """Return the value that a rank puts in the store; None if its process ends first, or `until` has passed."""
        while not self._store.check([key]):
            if process.exitcode is not None or time.monotonic() > until:
                return None
            # The store's own `wait` writes to stderr when it times out.
            time.sleep(_LOOK_EVERY_S)
        return self._store.get(key).decode()


def devices_of(device: torch.device, options: ParallelOptions, *, is_here: bool = True) -> list[str]:
    """Return the device of every rank.

    Args:
        device: device of rank 0's model.
        options: options of the ranks.
        is_here: whether all ranks are on this machine, where the devices are known.

    Raises:
        UsageError: there are too few devices, the first is not the model's, or NCCL cannot connect them.
    """
    devices = _devices_of(device, options, is_here)
    if options.backend == "nccl":
        different = {(each.type, each.index or 0) for each in map(torch.device, devices)}
        if device.type != "cuda" or (is_here and len(different) < len(devices)):
            raise UsageError(
                f"--parallel-backend nccl takes a GPU of its own for each rank, but they are on {', '.join(devices)}"
            )
        if not dist.is_nccl_available():
            raise UsageError("--parallel-backend is nccl, but this torch has been built without NCCL: try auto")
    return devices


def _devices_of(device: torch.device, options: ParallelOptions, is_here: bool) -> list[str]:
    if (named := options.device_names) is not None:
        first = torch.device(named[0])
        if (first.type, first.index or 0) != (device.type, device.index or 0):
            raise UsageError(f"--parallel-devices begins with {first}, but the model is on {device} (--device)")
        return named
    if not is_here:
        return [str(device)] * options.count
    if device.type == "cpu":
        most = _MAX_PER_CORE * usable_cores()
        if options.count > most:
            raise UsageError(
                f"--parallel {options.ranks} takes a process for each rank, but here at most {most} make sense: try "
                f"--parallel virtual:{options.ranks}"
            )
        return ["cpu"] * options.count
    start, there = device.index or 0, torch.cuda.device_count()
    if start + options.count > there:
        raise UsageError(
            f"--parallel {options.ranks} takes a GPU for each rank, but from {device} on there are {there - start}: "
            "name some more than once (--parallel-devices), or try virtual ranks"
        )
    return [f"cuda:{start + rank}" for rank in range(options.count)]


def _describe_end(process: Process) -> str:
    """Describe what happened to a rank that gave no reason."""
    return "does not answer" if process.exitcode is None else f"has ended with code {process.exitcode}"


def _end(processes: Mapping[int, Process]) -> None:
    for process in processes.values():
        if process.exitcode is None:
            process.kill()
        process.join()
