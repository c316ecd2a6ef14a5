"""A rank in its own process: it loads the denoising model, joins the others, and follows rank 0 until it ends."""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from ... import __version__
from ..core.cuda_graphs import CudaRecorder
from .decoder import StripDecoder, follow_decoding
from .group import GroupError
from .nccl import Nccl
from .options import Backend
from .processes import UNLIMITED_WAIT, ProcessEnd
from .ranks import follow
from .strip_model import StripModel
from .transport import LOOPBACK, connect_ranks

GroupKind = Literal["meet", "decode"]
"""Purpose of a group: to call the model (`meet`) or, concurrently, to decode images (`decode`)."""

_LOOK_EVERY_S = 0.2
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class RankModels:
    """Parts of a model that a rank holds.

    Attributes:
        fingerprint: fingerprint of the model's files, and of its changes.
        denoiser: denoising model, on the rank's device.
        autoencoder: autoencoder on the same device, if the rank is to decode.
    """

    fingerprint: str
    denoiser: nn.Module
    autoencoder: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings that a rank receives when it starts.

    Attributes:
        rank: number of the rank.
        model: directory of the model.
        device, dtype: device and data type of the model.
        threads: number of threads that the rank computes with.
        timeout_s: longest time that ranks may keep each other waiting in a call.
        port: port of the store on this machine where the ranks meet.
        host: address of this machine for other ranks.
        backend: transport, as in `ParallelOptions`.
        decoder: data type of the autoencoder, if the rank is to decode.
        changes: changes of the model before it is served, as values of `ModelOptions` by name.
        is_recorded: whether passes are recorded as CUDA graphs.
    """

    rank: int
    model: str
    device: str
    dtype: str
    threads: int
    timeout_s: float
    port: int = 0
    host: str = LOOPBACK
    backend: Backend = "auto"
    decoder: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    is_recorded: bool = False

    def to_json(self) -> str:
        """Return the settings as JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        """Parse the settings from the JSON of `to_json`."""
        return cls(**json.loads(text))


def facts_of(fingerprint: str, model: nn.Module) -> dict[str, Any]:
    """Return the facts that must be the same on all ranks."""
    parameter = next(model.parameters())
    return {
        "psctl": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "model": fingerprint,
        "class": type(model).__name__,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
    }


def key_of(what: str, *of: int) -> str:
    """Return a key of the store.

    Keys: `has/RANK` holds the facts of a rank that is ready, or its error; `group/NUMBER` holds the members of a group;
    `over/NUMBER` marks a group that has ended; `left/NUMBER/RANK` is set when a rank has left the group: to its error,
    or empty if another rank is the cause.
    """
    return "/".join([what, *map(str, of)])


def end_of(what: GroupKind, number: int, settings: RankSettings, store: dist.Store, rank: int, size: int) -> ProcessEnd:
    """Connect to the other ranks of a group and return this rank's end.

    Args:
        what: purpose of the group.
        number: number of the group.
        settings: settings of the rank.
        store: store through which the ranks find each other.
        rank, size: rank in the group, and size of the group.

    Raises:
        GroupError: a rank does not connect.
    """
    own, timeout = dist.PrefixStore(key_of(what, number), store), timedelta(seconds=settings.timeout_s)
    transport = connect_ranks(own, rank, size, timeout, settings.host, settings.backend)
    nccl = None
    # Decoding runs concurrently with the model's calls, and two NCCL groups that do not take turns may deadlock.
    if settings.backend == "nccl" and what == "meet":
        device = torch.device("cuda", torch.device(settings.device).index or 0)
        nccl = Nccl(dist.PrefixStore("nccl", own), rank, size, timeout, device, transport.check_peer)
    # Only rank 0 has other work between calls.
    threads = settings.threads if settings.rank == 0 else None
    return ProcessEnd(transport, rank, size, settings.timeout_s, settings.device, threads, nccl)


def serve_rank(
    settings: RankSettings,
    load: Callable[[], RankModels],
    should_run: Callable[[], bool],
    connect: Callable[[], dist.Store] | None = None,
) -> int:
    """Run a rank until it ends; return the exit code.

    Args:
        settings: settings of the rank.
        load: loads the parts of the model that the rank needs.
        should_run: returns whether the process that this one depends on is alive; if not, this process ends.
        connect: opens connections to the store where the ranks meet; None for the store of rank 0.
    """
    connect = connect or (lambda: _store_of(settings))
    watch = _Watch(should_run, connect)
    torch.set_num_threads(settings.threads)
    store = connect()
    try:
        models = load()
        recorder = CudaRecorder(next(models.denoiser.parameters()).device) if settings.is_recorded else None
        ours = StripModel(models.denoiser, recorder=recorder)
        decoder = None if models.autoencoder is None else StripDecoder(models.autoencoder)
    except Exception as error:  # noqa: BLE001  sent to rank 0, which reports it to the user
        store.set(key_of("has", settings.rank), json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    store.set(key_of("has", settings.rank), json.dumps(facts_of(models.fingerprint, models.denoiser)))
    try:
        _serve_groups(settings, store, ours, decoder, watch)
    except dist.DistError:
        return 1  # The store has ended with rank 0.
    watch.end()
    return 0


def _serve_groups(
    settings: RankSettings, store: dist.Store, model: StripModel, decoder: StripDecoder | None, watch: "_Watch"
) -> None:
    """Run a rank in one group after the other, until rank 0 sends "stop"."""
    number = 0
    while settings.rank in (members := _members_of(store, number)):
        reason, beside = "", None
        try:
            rank, size = members.index(settings.rank), len(members)
            ends = [end_of("meet", number, settings, store, rank, size)]
            if decoder is not None:
                ends.append(end_of("decode", number, settings, store, rank, size))
                beside = threading.Thread(target=_decode_concurrently, args=(ends[1], decoder), daemon=True)
                beside.start()
            watch.follow(number, ends)
            follow(ends[0], model)
        except GroupError:
            pass  # Rank 0 gets it as well.
        except Exception as error:  # noqa: BLE001  sent to rank 0, which fails the request
            reason = f"rank {settings.rank}: {type(error).__name__}: {error}"
        else:
            ends[0].close()
            if beside is not None:
                ends[1].disconnect()
                beside.join(_END_S)
            return
        watch.disconnect_from(number)
        model.clear()
        store.set(key_of("left", number, settings.rank), reason)
        number += 1


def _decode_concurrently(end: ProcessEnd, decoder: StripDecoder) -> None:
    """Decode while the group lasts. A failure ends the group's decoding: rank 0 reports it and decodes alone."""
    try:
        follow_decoding(end, decoder)
    except GroupError:
        pass
    except Exception as error:  # noqa: BLE001  shown to the user; serving continues without this
        sys.stderr.write(f"Warning: rank {end.rank} cannot decode: {type(error).__name__}: {error}\n")
    finally:
        end.disconnect()


def _store_of(settings: RankSettings) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, settings.port, is_master=False, timeout=timedelta(seconds=60))


def _members_of(store: dist.Store, number: int) -> list[int]:
    """Wait until rank 0 has chosen the ranks of a group, and return them in order."""
    # Without rank 0 the watch ends this process.
    store.wait([key_of("group", number)], UNLIMITED_WAIT)
    return json.loads(store.get(key_of("group", number)))


class _Watch:
    """Ends this process when rank 0's has ended, and disconnects from a group that rank 0 has marked as over."""

    def __init__(self, should_run: Callable[[], bool], connect: Callable[[], dist.Store]) -> None:
        self._should_run, self._connect = should_run, connect
        self._lock = threading.Lock()
        self._now: tuple[int, Sequence[ProcessEnd]] | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch_group, daemon=True)
        self._thread.start()

    def follow(self, number: int, ends: Sequence[ProcessEnd]) -> None:
        """Watch a group."""
        with self._lock:
            self._now = number, ends

    def disconnect_from(self, number: int) -> None:
        """Disconnect from a group, if this process is still in it."""
        with self._lock:
            if self._now is not None and self._now[0] == number:
                for end in self._now[1]:
                    end.disconnect()
                self._now = None

    def end(self) -> None:
        """Stop the watch. At exit, the interpreter would kill the thread inside a call of torch and abort."""
        self._is_over.set()
        self._thread.join()

    def _watch_group(self) -> None:
        try:
            store = self._connect()
            while self._should_run():
                now = self._now
                if now is not None and store.check([key_of("over", now[0])]):
                    self.disconnect_from(now[0])
                if self._is_over.wait(_LOOK_EVERY_S):
                    return
        finally:
            if not self._is_over.is_set():  # rank 0 has ended, maybe with its store
                os._exit(1)
