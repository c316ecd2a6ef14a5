"""Interface of a group of ranks that recovers from failures, and repetition of work after a lost rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from .decoder import SharedDecoder
from .options import ParallelOptions
from .ranks import Ranks

Result = TypeVar("Result")


class RankGroup(Protocol):
    """Rank 0's handle on a group.

    Attributes:
        end: rank 0's end, held (`with group.end:`) during requests to the ranks.
        ranks: current ranks.
        losses: descriptions of the lost ranks and of the reasons.
        decoder: decodes on all current ranks; None if rank 0 decodes alone.
    """

    @property
    def end(self) -> AbstractContextManager[Any, None]: ...

    @property
    def ranks(self) -> Ranks: ...

    @property
    def losses(self) -> Sequence[str]: ...

    @property
    def decoder(self) -> SharedDecoder | None: ...

    def use(self, options: ParallelOptions) -> None:
        """Use other options with the same number of ranks. The caller holds `end`. Raises GroupError."""
        ...

    def recover(self, error: Exception) -> Exception | None:
        """Form the group again of the remaining ranks, after one of them or rank 0 itself has failed.

        The ranks' memory is cleared. Returns the error that the request has caused, such as an error on some rank that
        may recur; None if a rank was lost, so that the work can be repeated.
        """
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...


def call_with_recovery(group: RankGroup, call: Callable[[Ranks], Result]) -> Result:
    """Return the result of `call`, which is called again each time a rank is lost.

    Raises:
        Exception: an error that `call` raised on rank 0.
        RankError: an error on another rank. In both cases the group has recovered.
    """
    while True:
        try:
            return call(group.ranks)
        except Exception as error:
            cause = group.recover(error)
            if cause is error:
                raise
            if cause is not None:
                raise cause from error
