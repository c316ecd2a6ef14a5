"""Rank 0's side of the group: it has the batch, hands strips out, takes its own, and puts the predictions together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...data.errors import UsageError
from .context import Pass, Team
from .exchange import RowName
from .group import Communicator, Message
from .options import ParallelOptions
from .strip_model import StripModel
from .strips import Strips


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a call that a team of ranks draws.

    Attributes:
        index: of the rows in the batch.
        members: ranks, in the order of their strips.
        strips: theirs.
    """

    index: tuple[int, ...]
    members: tuple[int, ...]
    strips: Strips


class Ranks:
    """All ranks of a group, of which this process is the first.

    Args:
        end: of rank 0.
        model: of rank 0.
        options: of all ranks.
    """

    def __init__(self, end: Communicator, model: StripModel, options: ParallelOptions) -> None:
        self._end, self._model, self._options = end, model, options
        self._shares = options.shares or (1.0,) * end.size
        if len(self._shares) != end.size:
            raise UsageError(f"--parallel-shares are {len(self._shares)}, but there are {end.size} ranks")
        self._known: set[RowName] = set()
        self._calls: Counter[RowName] = Counter()

    def check(self, height: int) -> None:
        """Raise UsageError where latents of this height are too low to be shared by all ranks."""
        self._parts((), height)

    def learn(self, rows: Sequence[RowName], conditions: Mapping[str, Tensor]) -> None:
        """Tell every rank the conditions of rows, as far as it does not know them: tensors (rows, ...) by name."""
        new = [index for index, row in enumerate(rows) if row not in self._known]
        if not new:
            return
        names = [rows[index] for index in new]
        given = {name: tensor[new] for name, tensor in conditions.items()}
        self._tell_all(Message("learn", {"rows": names}, given))
        self._model.learn(names, given)
        self._known.update(names)

    def keep(self, rows: Sequence[RowName]) -> None:
        """Let every rank forget the conditions of all other rows."""
        if self._known - set(rows):
            self._tell_all(Message("keep", {"rows": list(rows)}))
            self._model.keep(rows)
            self._known &= set(rows)
            self._calls = Counter({row: count for row, count in self._calls.items() if row in self._known})

    def predict(
        self, rows: Sequence[RowName], latents: Tensor, timesteps: Tensor, is_last: Sequence[bool] | None = None
    ) -> Tensor:
        """Predict for rows of one resolution, all of them known.

        Args:
            rows: with guidance, a request's two stand beside each other.
            latents: [rows, channels, height, width].
            timesteps: (rows,).
            is_last: of which no call follows.
        """
        parts = self._parts(rows, latents.shape[2])
        is_exact = self._options.mode == "sync"
        displaced = [not is_exact and self._calls[row] > self._options.warmup for row in rows]
        last = [is_exact or (is_last is not None and is_last[index]) for index in range(len(rows))]
        self._calls.update(rows)
        for part in parts:
            for place, rank in enumerate(part.members):
                if rank != self._end.rank:
                    facts = {
                        "rows": [rows[index] for index in part.index],
                        "members": part.members,
                        "starts": part.strips.starts,
                        "is_displaced": [displaced[index] for index in part.index],
                        "is_last": [last[index] for index in part.index],
                    }
                    own = self._strip(part, place, latents)
                    given = {"latents": own, "timesteps": timesteps[list(part.index)]}
                    self._end.tell(rank, Message("predict", facts, given))
        own = parts[0]
        call = Pass(
            Team(self._end, own.members),
            own.strips,
            tuple(rows[index] for index in own.index),
            tuple(displaced[index] for index in own.index),
            tuple(last[index] for index in own.index),
        )
        predicted = self._model.predict(call, self._strip(own, 0, latents), timesteps[list(own.index)])
        out = predicted.new_empty(len(rows), *predicted.shape[1:2], *latents.shape[2:])
        for part in parts:
            for place, rank in enumerate(part.members):
                start, end = part.strips.starts[place : place + 2]
                if rank != self._end.rank:
                    predicted = self._end.hear(rank).tensors["prediction"]
                out[list(part.index), :, start:end] = predicted
        return out

    def stop(self) -> None:
        """Let the other ranks end."""
        self._tell_all(Message("stop"))

    def _strip(self, part: Part, place: int, latents: Tensor) -> Tensor:
        """The rows of a strip, and those around it that the first layer reads."""
        start, end = part.strips.starts[place : place + 2]
        if self._model.reads_halo and part.strips.count > 1:
            start, end = max(start - 1, 0), end + 1
        return latents[list(part.index), :, start:end].contiguous()

    def _parts(self, rows: Sequence[RowName], height: int) -> list[Part]:
        """Who draws what; rank 0 is in the first part."""
        everyone, everything = tuple(range(self._end.size)), tuple(range(len(rows)))
        conditional = tuple(index for index in everything if rows[index][1])
        teams = [(everything, everyone)]
        if self._options.splits_guidance and self._end.size % 2 == 0 and 2 * len(conditional) == len(rows):
            half = self._end.size // 2
            others = tuple(index for index in everything if not rows[index][1])
            teams = [(others, everyone[:half]), (conditional, everyone[half:])]
        shares = self._shares
        return [
            Part(index, members, Strips.of(height, self._model.unit, [shares[rank] for rank in members]))
            for index, members in teams
        ]

    def _tell_all(self, message: Message) -> None:
        for rank in range(self._end.size):
            if rank != self._end.rank:
                self._end.tell(rank, message)


def follow(end: Communicator, model: StripModel) -> None:
    """What a rank other than 0 does until it is told to stop."""
    while True:
        message = end.hear(0, is_idle=True)
        rows = [(key, row) for key, row in message.facts.get("rows", ())]
        if message.kind == "stop":
            return
        if message.kind == "learn":
            model.learn(rows, message.tensors)
        elif message.kind == "keep":
            model.keep(rows)
        elif message.kind == "predict":
            team = Team(end, tuple(message.facts["members"]))
            call = Pass(
                team,
                Strips(tuple(message.facts["starts"]), model.unit),
                tuple(rows),
                tuple(message.facts["is_displaced"]),
                tuple(message.facts["is_last"]),
            )
            predicted = model.predict(call, message.tensors["latents"], message.tensors["timesteps"])
            end.tell(0, Message("predicted", {}, {"prediction": predicted}))
        else:
            raise UsageError(f"rank 0 asks for {message.kind!r}, which this version does not know")
