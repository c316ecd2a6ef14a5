"""State that the leaves of one rank's model share during a call: the strips, and the exchange with other ranks."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.attention import Rotary
from ..core.captured import Pause, Results
from .exchange import Exchange, ExchangedTensors, RowName
from .group import Communicator
from .options import NormOptions
from .strips import Strips


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that draw the same rows of a batch, in the order of their strips.

    Attributes:
        end: end of this rank.
        members: ranks of the team, this one included.
    """

    end: Communicator
    members: tuple[int, ...]

    @property
    def place(self) -> int:
        """Index of this rank, and of its strip."""
        return self.members.index(self.end.rank)


@dataclass(slots=True)
class Pass:
    """A model call on one strip.

    Attributes:
        team: team of the rank.
        strips: strips of its members.
        rows: rows in the order of the batch.
        is_displaced: for each row, whether it reads what the other ranks had in its previous call.
        is_last: for each row, whether no call follows this one.
        is_alone: whether each strip is treated as a separate image, by the unmodified model.
        text_starts: start of each rank's part of the text stream, then the end; empty if each rank has all of it.
        norms: statistics that GroupNorm uses for displaced rows.
    """

    team: Team
    strips: Strips
    rows: tuple[RowName, ...]
    is_displaced: tuple[bool, ...] = ()
    is_last: tuple[bool, ...] = ()
    is_alone: bool = False
    text_starts: tuple[int, ...] = ()
    norms: NormOptions = field(default_factory=NormOptions)

    def __post_init__(self) -> None:
        self.is_displaced = self.is_displaced or (False,) * len(self.rows)
        self.is_last = self.is_last or (True,) * len(self.rows)

    @property
    def key(self) -> Hashable:
        """What determines, with the shapes of its tensors, which operators run."""
        return self.strips, self.team.place, self.is_displaced, self.is_exact, self.text_starts, self.norms

    @property
    def is_exact(self) -> bool:
        """Whether ranks wait for each other and keep nothing for a next call."""
        return not any(self.is_displaced) and all(self.is_last)

    def to_facts(self) -> dict[str, Any]:
        """Return the call as plain values, from which `from_facts` restores it on another rank."""
        names = ("rows", "is_displaced", "is_last", "is_alone", "text_starts")
        shared = {name: getattr(self, name) for name in names}
        return {
            **shared,
            "members": self.team.members,
            "starts": self.strips.starts,
            "norms": asdict(self.norms),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], end: Communicator, unit: int) -> "Pass":
        """Restore a call from `to_facts`, for the rank of `end`."""
        return cls(
            Team(end, tuple(facts["members"])),
            Strips(tuple(facts["starts"]), unit),
            tuple((key, row) for key, row in facts["rows"]),
            tuple(facts["is_displaced"]),
            tuple(facts["is_last"]),
            facts["is_alone"],
            tuple(facts["text_starts"]),
            NormOptions(**facts["norms"]),
        )


Kept = TypeVar("Kept")
Turns = tuple[Rotary | None, Rotary | None]
"""Rotary angles of a rank's text tokens and of its image tokens, of all rows; None where there are none."""


@dataclass(slots=True)
class CallText:
    """Text of the rows of a call, as far as the leaves of a transformer need it, and what depends only on the rows.

    Attributes:
        length: number of tokens, of which a rank may have a part only; 0 in a U-Net.
        mask: valid tokens of each row, (rows, length); None if all are.
        bias: bias of the scores of text keys, (rows, length); None for none.
        biased: share of the bias for the queries of this rank's text tokens, (rows, own length); None for all of it.
        values: values that depend on the text and the strips, see `StripContext.kept`.
    """

    length: int = 0
    mask: Tensor | None = None
    bias: Tensor | None = None
    biased: Tensor | None = None
    values: dict[Hashable, Any] = field(default_factory=dict)


class StripContext:
    """State that the leaves of one rank's model share during a call. Not thread-safe.

    Where a pass is recorded, each exchange interrupts the recording. While it is recorded and replayed for the first
    time, the tensors are those that were exchanged in the same pass before: the other ranks need not take part, so that
    each rank records on its own.

    Attributes:
        turns: angles of the tokens of the present stream.
        bias: bias of the scores of its text keys, (rows, keys); None for none.
    """

    def __init__(self) -> None:
        self.exchange = Exchange()
        self._pass: Pass | None = None
        self._latents: Tensor | None = None
        self._text: CallText | None = None
        self._pause: Pause | None = None
        # Tensors exchanged in a pass that is recorded next; those that are exchanged no more.
        self._collected: list[Results] | None = None
        self._known: deque[Results] = deque()
        self.turns: Turns = (None, None)
        self.bias: Tensor | None = None

    @property
    def now(self) -> Pass:
        """The current call."""
        assert self._pass is not None, "a model of strips runs inside StripModel only"
        return self._pass

    @property
    def latents(self) -> Tensor:
        """Latents of the strip."""
        assert self._latents is not None
        return self._latents

    @property
    def text(self) -> CallText:
        """Text of the rows."""
        assert self._text is not None
        return self._text

    def begin(self, call: Pass) -> None:
        """Start a call."""
        self._pass, self._collected = call, None
        self._known.clear()

    def begin_pass(
        self, latents: Tensor, text: CallText, pause: Pause | None = None, *, collects: bool = False
    ) -> None:
        """Start to run the model, once for a call and once more where the pass is recorded.

        Args:
            latents: those of the strip.
            text: text of the rows.
            pause: interrupts the recording of this pass.
            collects: whether the pass is recorded after this run.
        """
        self._latents, self._text, self._pause = latents, text, pause
        if pause is not None and self._collected is not None:
            self._known.extend([*self._collected, *self._collected])
        self._collected = [] if collects else None
        self.turns, self.bias = (None, None), text.bias

    def own_tokens(self, factor: int) -> int:
        """Return the number of tokens of this rank's strip, each of which represents a square of this side."""
        return self.heights(factor)[self.place] * -(-self.latents.shape[3] // factor)

    @property
    def place(self) -> int:
        """Index of this rank's strip."""
        return self.now.team.place

    def kept(self, name: str, make: Callable[[], Kept], of: Hashable = None) -> Kept:
        """Return a value that depends on the rows' text, on the strips and on `of` only, made at first use."""
        key = name, of, self.now.strips.starts, self.place, self.latents.shape[3]
        values = self.text.values
        if key not in values:
            values[key] = make()
        return values[key]

    def heights(self, factor: int) -> tuple[int, ...]:
        """Return the number of rows of every strip where images are smaller by a factor."""
        return self.now.strips.heights(factor)

    def gather(
        self, key: Hashable, own: Tensor, shapes: Sequence[Sequence[int]], *, at_once: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Return the tensors of all ranks of the team in the order of strips, and this rank's tensor from the same
        calls as those of the others.

        Args:
            key: key of the leaf.
            own: tensor of this rank.
            shapes: shape of each rank's tensor.
            at_once: whether displaced rows, too, wait for the others.
        """
        team, place = self.now.team, self.place
        others = {rank: index for index, rank in enumerate(team.members) if index != place}
        sends, awaited = dict.fromkeys(others, own), {rank: shapes[index] for rank, index in others.items()}
        swapped = self._swap(key, own, sends, awaited, at_once=at_once)
        found = [own if index == place else swapped.others[rank] for index, rank in enumerate(team.members)]
        return found, swapped.before

    def halos(self, key: Hashable, x: Tensor, *, with_lower: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the row above and the row below a strip [rows, channels, height, width].

        A row beyond the image is None. Without `with_lower`, the row below is None and nothing is sent to the rank
        above.
        """
        team, place = self.now.team, self.place
        members, shape = team.members, (*x.shape[:2], 1, x.shape[3])
        above = members[place - 1] if place > 0 else None
        below = members[place + 1] if place + 1 < len(members) else None
        sends, shapes = {}, {}
        if above is not None:
            shapes[above] = shape
            if with_lower:
                sends[above] = x[:, :, :1]
        if below is not None:
            sends[below] = x[:, :, -1:]
            if with_lower:
                shapes[below] = shape
        # `before` is not used here, so the rank's own tensor is empty.
        others = self._swap(key, x[:, :0, :0, :0], sends, shapes).others
        # None is no rank's number, so `get` returns None for it.
        return others.get(above), others.get(below)  # type: ignore[arg-type]

    def gather_with_halos(
        self, key: Hashable, own: Tensor, x: Tensor
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Run `gather` of a tensor of the same shape on all ranks and `halos` of `x` in one swap, in an exact call."""
        team, place = self.now.team, self.place
        edges = {place - 1: x[:, :, :1], place + 1: x[:, :, -1:]}
        common = _bytes(own)
        given = {
            rank: torch.cat([common, _bytes(_channels_last(edges[index]))], 1) if index in edges else common
            for index, rank in enumerate(team.members)
            if index != place
        }
        found = self._swap(key, common, given, {rank: each.shape for rank, each in given.items()}).others
        parts, halos = list[Tensor](), dict[int, Tensor]()
        for index, rank in enumerate(team.members):
            if index == place:
                parts.append(own)
                continue
            shared, edge = found[rank].split([common.shape[1], given[rank].shape[1] - common.shape[1]], 1)
            parts.append(shared.contiguous().view(own.dtype).view(own.shape))
            if index in edges:
                row = edge.contiguous().view(x.dtype).view(x.shape[0], 1, x.shape[3], x.shape[1])
                halos[index - place] = row.permute(0, 3, 1, 2)
        return parts, halos.get(-1), halos.get(1)

    def _swap(
        self,
        key: Hashable,
        own: Tensor,
        sends: dict[int, Tensor],
        shapes: dict[int, Sequence[int]],
        *,
        at_once: bool = False,
    ) -> ExchangedTensors:
        is_recorded, keeps = self._pause is not None, not (at_once or self.now.is_exact)
        tensors = list({id(each): each for each in (own, *sends.values())}.values())
        places = [next(place for place, each in enumerate(tensors) if each is sent) for sent in sends.values()]

        def run(*given: Tensor) -> Results:
            """Exchange the tensors of the call that is now current; return those of others, and `before` if it may
            differ from `own`.
            """
            if self._known:
                return self._known.popleft()
            if keeps and is_recorded:
                # Other parts of the pass use their memory before these are sent or read.
                given = tuple(each.clone() for each in given)
            now = self.now
            found = self.exchange.swap(
                now.team.end,
                now.rows,
                now.is_displaced if keeps else (False,) * len(now.rows),
                now.is_last if keeps else (True,) * len(now.rows),
                key,
                given[0],
                {rank: given[place] for rank, place in zip(sends, places, strict=True)},
                shapes,
            )
            results = tuple(found.others[rank] for rank in shapes)
            return (*results, found.before) if keeps else results

        results = run(*tensors) if self._pause is None else self._pause(run, tensors)
        if self._collected is not None:
            self._collected.append(results)
        return ExchangedTensors(dict(zip(shapes, results, strict=False)), results[-1] if keeps else own)


def _channels_last(x: Tensor) -> Tensor:
    """Permute [rows, channels, height, width] to [rows, height, width, channels], the memory order of channels-last."""
    return x.permute(0, 2, 3, 1)


def _bytes(tensor: Tensor) -> Tensor:
    """View [rows, ...] as bytes [rows, bytes of a row]."""
    return tensor.flatten(1).contiguous().view(torch.uint8)
