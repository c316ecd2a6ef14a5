"""Ranks that torchrun has started: all run the same command, and all but the first follow rank 0.

torchrun ends all of them when one fails, so here a group never continues without one of its ranks.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ...data.errors import UsageError
from .options import ParallelOptions
from .processes import UNLIMITED_WAIT
from .transport import LOOPBACK
from .worker import RankModels, RankSettings, serve_rank


class TorchRun:
    """This process's settings from torchrun, and the store where torchrun's processes meet.

    Attributes:
        rank: rank among all processes.
        host: address at which the other ranks reach this one.
        store: connection to torchrun's store.
    """

    def __init__(self, options: ParallelOptions) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.rank, self._size, self._local_rank, local_size = (int(os.environ[name]) for name in names)
        self.host = LOOPBACK if local_size == self._size else socket.gethostname()
        self._options, self.store = options, connect()

    @classmethod
    def from_environment(cls, options: ParallelOptions) -> "TorchRun | None":
        """Read the environment; None if torchrun has not started this process or no rank processes are requested."""
        if options.is_virtual or not options.is_on or "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        return cls(options)

    def start(self, settings: RankSettings) -> "RemoteProcess":
        """Send a rank its settings, as rank 0. Raises UsageError if the number of processes is not that of ranks."""
        if self._size != self._options.count:
            raise UsageError(f"torchrun has started {self._size} processes, but --parallel is {self._options.ranks}")
        self.store.set(_key_of(settings.rank), settings.to_json())
        return RemoteProcess()

    def follow(self, load: Callable[[RankSettings], RankModels]) -> int:
        """Follow rank 0 until it ends, as another rank; return the exit code."""
        # Without rank 0, torchrun ends this process.
        self.store.wait([_key_of(self.rank)], UNLIMITED_WAIT)
        settings = RankSettings.from_json(self.store.get(_key_of(self.rank)).decode())
        own = replace(settings, host=self.host)
        if settings.device.startswith("cuda") and self._options.devices is None:
            own = replace(own, device=f"cuda:{self._local_rank}")
        starter = os.getppid()
        return serve_rank(own, lambda: load(own), lambda: os.getppid() == starter, connect)


def connect() -> dist.Store:
    """Connect to torchrun's store, with a prefix that hides what a run before a restart has left."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    return dist.PrefixStore(f"psctl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _key_of(rank: int) -> str:
    return f"settings/{rank}"


class RemoteProcess:
    """A process that torchrun manages, with the part of `multiprocessing.Process` that a rank needs.

    Attributes:
        exitcode: None, as it is not known.
    """

    exitcode: int | None = None

    def kill(self) -> None:
        """Do nothing: torchrun ends the process."""

    def join(self) -> None:
        """Do nothing: torchrun waits for the process."""
