"""Rank 0's side of the group: it holds the batch, distributes strips, computes its own and joins the predictions."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.adapters import Adapters
from ...data.errors import UsageError
from .choice import measure_link, swap_often
from .context import Pass, Team
from .cost import Call
from .exchange import RowName
from .group import Communicator, Message
from .latency_model import Link
from .options import ParallelOptions
from .plan import shared_out
from .strip_model import StripModel
from .strips import Strips
from .whole import stacked, unstacked

_LINK_BYTES = 16 << 20
_MAX_TEXT = 1.1
"""Largest ratio of the tokens that all ranks compute with whole texts to those without repetition, at which each rank
gets the whole text (`auto`).
"""


@dataclass(frozen=True, slots=True)
class TeamRows:
    """Rows of a call that a team of ranks draws.

    Attributes:
        index: indices of the rows in the batch.
        members: ranks, in the order of their strips.
        strips: strips of the members.
        axis: axis of the latents that is cut: 2, or 3 for strips of columns.
    """

    index: tuple[int, ...]
    members: tuple[int, ...]
    strips: Strips
    axis: int = 2

    def strip_of(self, place: int, latents: Tensor, halo: int) -> Tensor:
        """Return a strip of these rows, with `halo` rows or columns around it."""
        start, end = self.strips.starts[place : place + 2]
        start = max(start - halo, 0)
        length = min(end + halo, latents.shape[self.axis]) - start
        return latents[list(self.index)].narrow(self.axis, start, length).contiguous()


class Ranks:
    """All ranks of a group, of which this process is the first.

    Args:
        end: end of rank 0.
        model: model of rank 0.
        options: options of all ranks; mode `auto` counts as `sync`.
        names: numbers of the ranks in the options; None for all of them.
    """

    def __init__(
        self, end: Communicator, model: StripModel, options: ParallelOptions, names: Sequence[int] | None = None
    ) -> None:
        self._end, self._model, self._options = end, model, options
        self._shares = [options.weights[name] for name in (range(options.count) if names is None else names)]
        assert len(self._shares) == end.size
        self._known: set[RowName] = set()
        self._calls: Counter[RowName] = Counter()
        self._slots: dict[RowName, tuple[tuple[int, ...], int]] = {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._end.size

    @property
    def recording_failure(self) -> str | None:
        """Why rank 0 could not record a pass the last time this failed; None if it did not."""
        return self._model.recording_failure

    @property
    def mode(self) -> str:
        """Mode of the calls."""
        return "sync" if self._options.mode == "auto" else self._options.mode

    @property
    def latent_factor(self) -> int:
        """Pixels on a side of one latent."""
        return self._model.latent_factor

    @property
    def speeds(self) -> Sequence[float]:
        """Speed of every rank, in proportion to its share of strips; 1 on average."""
        mean = sum(self._shares) / len(self._shares)
        return [share / mean for share in self._shares]

    def draws_whole(self, height: int, width: int) -> bool:
        """Return whether images with latents of this size are below the given number of pixels for strips."""
        return self.latent_factor**2 * height * width < self._options.min_pixels

    def count_for(self, height: int, width: int) -> int:
        """Return the number of ranks that share an image with latents of this size. Raises UsageError if the image is
        too low for all ranks and the options do not allow fewer.
        """
        least = min(height, width) if self.mode == "naive" else height
        units = -(-least // self._model.unit)
        if units < self.size and not (self._options.may_use_fewer or self._options.divides_by_time):
            Strips.of(least, self._model.unit, self._shares)
        return min(self.size, units)

    def splits_guidance(self, height: int, width: int) -> bool:
        """Return whether two halves of the ranks draw guided requests of this size."""
        return self._options.splits_guidance(self.count_for(height, width))

    def measure_link(self, device: torch.device) -> Link:
        """Measure the link between ranks on this device, which share nothing else."""
        large = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)
        return measure_link(self._end, self._model.num_exchanges, large, Link().displaced_share)

    def received_bytes(self, height: int, width: int, num_rows: int) -> int:
        """Return the most bytes that a rank receives in a call with `num_rows` rows of latents of this size."""
        call = Call(height, width, self._model.text_length, num_rows)
        return self._model.cost.max_received(call, self.size).num_bytes(self._model.element_size)

    def learn(
        self, rows: Sequence[RowName], conditions: Mapping[str, Tensor], adapters: Sequence[Adapters] | None = None
    ) -> None:
        """Send every rank what it does not know yet of these rows.

        Args:
            rows: names of the rows.
            conditions: tensors (rows, ...) by name.
            adapters: adapters of each row; None if no row has any.
        """
        new = [index for index, row in enumerate(rows) if row not in self._known]
        if not new:
            return
        names = [rows[index] for index in new]
        given = {name: tensor[new] for name, tensor in conditions.items()}
        own = [() if adapters is None else adapters[index] for index in new]
        self._broadcast(Message("learn", {"rows": names, "adapters": own}, given))
        self._model.learn(names, given, own)
        self._known.update(names)

    def retain(self, rows: Sequence[RowName]) -> None:
        """Let every rank discard the conditions of all other rows."""
        if self._known - set(rows):
            self._broadcast(Message("keep", {"rows": list(rows)}))
            self._model.retain(rows)
            self._known &= set(rows)
            self._calls = Counter({row: count for row, count in self._calls.items() if row in self._known})
            self._slots = {row: held for row, held in self._slots.items() if row in self._known}

    def predict(
        self, rows: Sequence[RowName], latents: Tensor, timesteps: Tensor, ending: Collection[RowName] = ()
    ) -> Tensor:
        """Predict for rows of one resolution, whose conditions are known.

        Args:
            rows: names of the rows; with guidance, the two rows of a request are adjacent.
            latents: [rows, channels, height, width].
            timesteps: (rows,).
            ending: rows for which no call follows.
        """
        predicted: dict[int, Tensor] = {}
        for parts in self._rounds(rows, *latents.shape[2:]):
            passes = [self._pass_of(part, rows, latents, ending) for part in parts]
            for part, found in zip(parts, self._predict_together(parts, passes, latents, timesteps), strict=True):
                predicted |= dict(zip(part.index, found, strict=True))
        self._calls.update(rows)
        return torch.stack([predicted[index] for index in range(len(rows))])

    def draw_alone(self, rows: Sequence[RowName], images: Sequence[Tensor], timesteps: Tensor) -> list[Tensor]:
        """Predict like `draw`, on this rank alone."""
        return self._model.draw(rows, images, timesteps)

    def draw(self, rows: Sequence[RowName], images: Sequence[Tensor], timesteps: Tensor) -> list[Tensor]:
        """Predict for rows of any resolution, whose conditions are known, each of which one rank draws whole.

        Args:
            rows: names of the rows.
            images: latents [channels, height, width] of each row, sorted by size.
            timesteps: (rows,).
        """
        cost, length = self._model.cost, self._model.text_length
        macs = [cost.macs(Call(image.shape[1], image.shape[2], length, rows=1)) for image in images]
        chosen = shared_out(macs, self._shares)
        shares = {rank: [index for index, each in enumerate(chosen) if each == rank] for rank in set(chosen)}
        for rank in shares.keys() - {self._end.rank}:
            own = shares[rank]
            given = stacked([images[index] for index in own]) | {"timesteps": timesteps[own]}
            self._end.send(rank, Message("draw", {"rows": [rows[index] for index in own]}, given))
        found: dict[int, Tensor] = {}
        for rank, own in sorted(shares.items()):  # this one first
            if rank == self._end.rank:
                drawn = self._model.draw(
                    [rows[index] for index in own], [images[index] for index in own], timesteps[own]
                )
            else:
                drawn = unstacked(self._end.receive(rank).tensors)
            found |= dict(zip(own, drawn, strict=True))
        self._calls.update(rows)
        return [found[index] for index in range(len(rows))]

    def stop(self) -> None:
        """Send "stop" to the other ranks, which then end."""
        self._broadcast(Message("stop"))

    def _predict_together(
        self, parts: Sequence[TeamRows], passes: Sequence[Pass], latents: Tensor, timesteps: Tensor
    ) -> list[Tensor]:
        """Return the predictions of teams that work at the same time; rank 0 is in the first team."""
        halo = 1 if self._model.reads_halo and self.mode != "naive" else 0
        for part, call in zip(parts, passes, strict=True):
            for place, rank in enumerate(part.members):
                if rank != self._end.rank:
                    given = {"latents": part.strip_of(place, latents, halo), "timesteps": timesteps[list(part.index)]}
                    self._end.send(rank, Message("predict", call.to_facts(), given))
        own = self._model.predict(passes[0], parts[0].strip_of(0, latents, halo), timesteps[list(parts[0].index)])
        return [
            torch.cat(
                [
                    own if rank == self._end.rank else self._end.receive(rank).tensors["prediction"]
                    for rank in part.members
                ],
                part.axis,
            )
            for part in parts
        ]

    def _pass_of(self, part: TeamRows, rows: Sequence[RowName], latents: Tensor, ending: Collection[RowName]) -> Pass:
        """Return the call that the ranks of a part make."""
        own = tuple(rows[index] for index in part.index)
        # A row that gets slots in this call has nothing to read from them yet.
        displaced = tuple(row in self._slots and self._calls[row] > self._options.warmup for row in own)
        keeps = [self._has_slots(row, part, latents) and row not in ending for row in own]
        return Pass(
            Team(self._end, part.members),
            part.strips,
            own,
            displaced,
            tuple(not each for each in keeps),
            is_alone=self.mode == "naive",
            text_starts=self._text_starts(part, own, latents.shape[3]),
            norms=self._options.norms,
        )

    def _rounds(self, rows: Sequence[RowName], height: int, width: int) -> list[list[TeamRows]]:
        """Divide the rows into parts, which are drawn in turns; rank 0 is in the first part of each turn."""
        count, everything = self.count_for(height, width), tuple(range(len(rows)))
        everyone, shares = tuple(range(count)), self._shares
        if self.mode == "naive" and count > 1:
            sides = [tuple(each for each in everything if self._calls[rows[each]] % 2 == odd) for odd in (0, 1)]
            return [
                [TeamRows(index, everyone, Strips.of(length, self._model.unit, shares[:count]), axis)]
                for index, length, axis in zip(sides, (height, width), (2, 3), strict=True)
                if index
            ]
        conditional = tuple(index for index in everything if rows[index][1])
        teams = [(everything, everyone)]
        if self._options.splits_guidance(count) and 2 * len(conditional) == len(rows):
            others = tuple(index for index in everything if not rows[index][1])
            teams = [(others, everyone[: count // 2]), (conditional, everyone[count // 2 :])]
        return [
            [
                TeamRows(index, members, Strips.of(height, self._model.unit, [shares[rank] for rank in members]))
                for index, members in teams
            ]
        ]

    def _has_slots(self, row: RowName, part: TeamRows, latents: Tensor) -> bool:
        """Return whether the ranks keep slots for the next call of a row: only in displaced mode, and within their
        memory limit.
        """
        if self.mode != "displaced" or part.strips.count == 1:
            return False
        if row not in self._slots:
            needed = self._model.slot_bytes(*latents.shape[2:])
            held = [sum(size for members, size in self._slots.values() if rank in members) for rank in part.members]
            if max(held) + needed > self._options.memory_mb << 20:
                return False
            self._slots[row] = part.members, needed
        return True

    def _text_starts(self, part: TeamRows, rows: Sequence[RowName], width: int) -> tuple[int, ...]:
        """Return the start of each rank's part of the text stream, then the end; empty if each computes all of it."""
        count, length = part.strips.count, self._model.text_length_of(rows)
        if self._options.text == "replicate" or self.mode == "naive" or not 1 < count <= length:
            return ()
        # What a displaced row reads must have the shape of its previous call.
        if not self._model.splits_text or (self._model.has_masked_text and self.mode == "displaced"):
            return ()
        tokens = self._model.tokens(part.strips.starts[-1], width)
        if self._options.text == "auto" and tokens + count * length <= _MAX_TEXT * (tokens + length):
            return ()
        return Strips.of(length, 1, (1.0,) * count).starts

    def _broadcast(self, message: Message) -> None:
        for rank in range(self._end.size):
            if rank != self._end.rank:
                self._end.send(rank, message)


def follow(end: Communicator, model: StripModel) -> None:
    """Carry out rank 0's messages until it sends "stop", on a rank other than 0."""
    while True:
        message = end.receive(0, is_idle=True)
        rows = [(key, row) for key, row in message.facts.get("rows", ())]
        if message.kind == "stop":
            return
        if message.kind == "learn":
            adapters = [tuple((name, scale) for name, scale in each) for each in message.facts["adapters"]]
            model.learn(rows, message.tensors, adapters)
        elif message.kind == "swap":
            swap_often(end, 0, message.tensors["tensor"])
        elif message.kind == "keep":
            model.retain(rows)
        elif message.kind == "draw":
            tensors = dict(message.tensors)
            timesteps = tensors.pop("timesteps")
            end.send(0, Message("drawn", {}, stacked(model.draw(rows, unstacked(tensors), timesteps))))
        elif message.kind == "predict":
            call = Pass.from_facts(message.facts, end, model.unit)
            predicted = model.predict(call, message.tensors["latents"], message.tensors["timesteps"])
            end.send(0, Message("predicted", {}, {"prediction": predicted}))
        else:
            raise UsageError(f"rank 0 asks for {message.kind!r}, which this version does not know")
