"""What a group of ranks is for whoever steps requests: one that stands again after whatever has befallen it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from .decoder import SharedDecoder
from .options import ParallelOptions
from .ranks import Ranks

Found = TypeVar("Found")


class RankGroup(Protocol):
    """Rank 0's hold on a group.

    Attributes:
        end: held (`with group.end:`) while the ranks are asked for something.
        ranks: those of now.
        losses: which ranks are done without, and why.
        decoder: decodes on all ranks of now; None where that is rank 0's to do.
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
        """Work otherwise from now on, with as many ranks; held (`with group.end:`). Raises GroupError."""
        ...

    def recover(self, error: Exception) -> Exception | None:
        """Form the group anew, of the ranks that are left, after one of them or rank 0 itself has failed.

        Nothing of the ranks' memory is left. Returns what the request is to blame for, such as an error on some rank
        that may come again; None if a rank was lost, and what was asked may be asked again.
        """
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...


def persist(group: RankGroup, ask: Callable[[Ranks], Found]) -> Found:
    """What the ranks give, asked again as often as one of them is lost.

    Raises:
        Exception: what `ask` raises on rank 0.
        RankError: what has failed on another rank; the group stands again in both cases.
    """
    while True:
        try:
            return ask(group.ranks)
        except Exception as error:
            cause = group.recover(error)
            if cause is error:
                raise
            if cause is not None:
                raise cause from error
