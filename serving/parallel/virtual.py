"""N ranks in this process, of which one runs at a time, to try out and test the behaviour of N devices."""

import threading
from collections.abc import Callable
from functools import partial

from torch import nn

from ..core.captured import Recorder
from .decoder import SharedDecoder, StripDecoder, follow_decoding
from .group import GroupError, RankError, VirtualEnd, VirtualGroup
from .options import ParallelOptions
from .ranks import Ranks, follow
from .strip_model import StripModel


class VirtualRanks:
    """A `RankGroup` of threads that share the weights of one model.

    The caller holds the baton (`with ranks.end:`) during calls. `recorder` records the passes of all ranks. Raises the
    errors of `StripModel`.
    """

    losses: tuple[()] = ()

    def __init__(
        self,
        model: nn.Module,
        options: ParallelOptions,
        autoencoder: nn.Module | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._options = options
        first = StripModel(model, recorder=recorder)
        others = (StripModel(model, like=first, recorder=recorder) for _ in range(options.count - 1))
        self._models = [first, *others]
        self._decoders = [] if autoencoder is None else [StripDecoder(autoencoder) for _ in range(options.count)]
        self.decoder = SharedDecoder(self._decoders[0], options.weights) if self._decoders else None
        self._decoding: VirtualGroup | None = None
        self._threads: list[threading.Thread] = []
        self._form(VirtualGroup(options.count))

    def _form(self, group: VirtualGroup) -> None:
        """Start the ranks of a group."""
        self._group, self.end = group, group.end(0)
        self.ranks = Ranks(self.end, self._models[0], self._options)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for rank in range(1, group.size):
            self._start(group, rank, partial(follow, model=self._models[rank]))
        if self.decoder is not None:
            self._end_decoding()
            self._decoding = decoding = VirtualGroup(group.size)
            for rank in range(1, group.size):
                self._start(decoding, rank, partial(follow_decoding, decoder=self._decoders[rank]))
            self.decoder.use(decoding.end(0))

    def _end_decoding(self) -> None:
        if self._decoding is not None:
            with self._decoding.end(0):
                self._decoding.abort(GroupError("the ranks part"))

    def _start(self, group: VirtualGroup, rank: int, what: Callable[[VirtualEnd], None]) -> None:
        thread = threading.Thread(target=self._run, args=(group, group.end(rank), what), daemon=True)
        self._threads.append(thread)
        thread.start()

    @staticmethod
    def _run(group: VirtualGroup, end: VirtualEnd, what: Callable[[VirtualEnd], None]) -> None:
        with end:
            try:
                what(end)
            except GroupError:
                pass  # Another rank is the cause.
            except BaseException as error:  # noqa: BLE001  passed to rank 0, which waits
                group.abort(RankError(f"rank {end.rank}: {type(error).__name__}: {error}"))

    def use(self, options: ParallelOptions) -> None:
        """Use other options with the same number of ranks, as in `RankGroup`."""
        self.ranks.retain(())
        self._options = options
        self.ranks = Ranks(self.end, self._models[0], options)

    def recover(self, error: Exception) -> Exception | None:
        """Form the group again, as in `RankGroup`. The caller holds the baton and keeps it."""
        cause = self._group.error
        if cause is None:
            self._group.abort(error)
        for model in self._models:
            model.clear()
        self._form(VirtualGroup(self._group.size, self._group.news))
        return cause if isinstance(cause, RankError) else error

    def close(self) -> None:
        """End all ranks and wait for them."""
        with self.end:
            if self._group.error is None:
                self.ranks.stop()
        self._end_decoding()
        for thread in self._threads:
            thread.join()
