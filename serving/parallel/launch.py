"""Starts the ranks of `--parallel N` as processes on this machine, and checks that all of them have the same model."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from ...data.errors import RunError, UsageError
from .group import GroupError
from .options import ParallelOptions
from .processes import ProcessEnd
from .ranks import Ranks
from .strip_model import StripModel
from .worker import RankSettings, facts_of, key_of

_START_S = 300.0
_END_S = 5.0


class ProcessRanks:
    """The ranks of a group: this process, and those that it has started.

    Args:
        model: rank 0's, unmodified.
        command: starts a rank in a process.
        settings: of rank 0; the others have theirs from it. The port is found here.
        options: of all ranks.

    Raises:
        RunError: if a rank does not come up.
        UsageError: if a rank has something else than rank 0, naming both.
    """

    def __init__(
        self,
        model: nn.Module,
        command: Callable[[RankSettings], Sequence[str]],
        settings: RankSettings,
        options: ParallelOptions,
    ) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.processes = [
            # In a session of its own, so that Ctrl-C is rank 0's to handle.
            subprocess.Popen(
                command(replace(settings, rank=rank, port=store.port, parent=os.getpid(), norms=asdict(options.norms))),
                start_new_session=True,
            )
            for rank in range(1, settings.size)
        ]
        try:
            self._meet(store, facts_of(settings.fingerprint, model))
            self.end = ProcessEnd(store, 0, settings.size, settings.timeout_s)
            self.ranks = Ranks(self.end, StripModel(model, options.norms), options)
        except BaseException:
            self._kill()
            raise

    def _meet(self, store: dist.Store, facts: dict[str, object]) -> None:
        """Wait until every rank is ready, and compare what it has."""
        until = time.monotonic() + _START_S
        for rank, process in enumerate(self.processes, 1):
            while not store.check([key_of("ready", rank)]):
                if store.check([key_of("failed", rank)]):
                    raise RunError(f"rank {rank}: {store.get(key_of('failed', rank)).decode()}")
                if process.poll() is not None:
                    raise RunError(f"rank {rank} has ended with code {process.returncode} as it started")
                if time.monotonic() > until:
                    raise RunError(f"rank {rank} is not ready after {_START_S:g} s")
                time.sleep(0.05)
            theirs = json.loads(store.get(key_of("ready", rank)))
            for name, own in facts.items():
                if theirs.get(name) != own:
                    raise UsageError(f"rank {rank} has {name} {theirs.get(name)}, but rank 0 has {own}")

    def close(self) -> None:
        """End the other ranks, and wait for them."""
        with contextlib.suppress(GroupError):  # who has gone needs not be told
            self.ranks.stop()
        until = time.monotonic() + _END_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
