"""N ranks in this process, one of which runs at a time, to try and to test what N devices do."""

import threading

from torch import nn

from .group import GroupError, VirtualEnd, VirtualGroup
from .options import ParallelOptions
from .ranks import Ranks, follow
from .strip_model import StripModel


class VirtualRanks:
    """Ranks as threads that share the weights of one model. The caller holds the baton (`with ranks.end:`) in calls."""

    def __init__(self, model: nn.Module, size: int, options: ParallelOptions) -> None:
        """Start the ranks. Raises as `StripModel`."""
        self._group = VirtualGroup(size)
        self.end = self._group.end(0)
        self.ranks = Ranks(self.end, StripModel(model, options.norms), options)
        self._threads = [
            threading.Thread(
                target=self._run, args=(self._group.end(rank), StripModel(model, options.norms)), daemon=True
            )
            for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, end: VirtualEnd, model: StripModel) -> None:
        with end:
            try:
                follow(end, model)
            except GroupError:
                pass  # Another rank is the cause.
            except BaseException as error:  # noqa: BLE001  told to rank 0, which waits
                self._group.abort(error)

    def close(self) -> None:
        """End all ranks and wait for them."""
        with self.end:
            if self._group.error is None:
                self.ranks.stop()
        for thread in self._threads:
            thread.join()
