"""Adapters (LoRA) that are not fused into the weights: each row of a batch has its own, beside the layers all share.

An adapter adds scale * up(down(x)) to what a layer makes of x, where `down` has few outputs (Hu et al., LoRA, section
4.1). All entries of a batch that have one adapter go through it together; nothing is computed for the others.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.adapters import Adapters
from .prepared import PreparedRequest


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one adapter adds to one layer: up(scaling * down(x)), of linear layers or of convolutions without bias."""

    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d
    scaling: float


class Entries(NamedTuple):
    """Where rows are in the input of a layer.

    Attributes:
        key: the same for inputs of the same form.
        rows: says the row of each entry.
        are_tokens: whether entries are those of all dimensions but the last; else those of the first.
    """

    key: Hashable
    rows: Callable[[], Tensor]
    are_tokens: bool


Place = Callable[[Tensor], Entries]


@dataclass(frozen=True, slots=True)
class Part:
    """The entries of a layer's input that have one adapter, and its scale at each of them; no entries: all have it."""

    entries: Tensor | None
    scales: Tensor
    are_tokens: bool

    def of(self, x: Tensor) -> Tensor:
        """Of a layer's input, or of what was made of it, these entries."""
        flat = x.flatten(0, -2) if self.are_tokens else x
        return flat if self.entries is None else flat.index_select(0, self.entries)

    def scaled(self, reduced: Tensor, scaling: float) -> Tensor:
        """What `down` gives of them, with their scales."""
        factors = (self.scales * scaling).view(-1, *[1] * (reduced.ndim - 1))
        return (reduced * factors).to(reduced.dtype)

    def add(self, out: Tensor, change: Tensor) -> None:
        """Add what `up` gives of them to the layer's output, in place."""
        flat = out.view(-1, out.shape[-1]) if self.are_tokens else out
        if self.entries is None:
            flat.add_(change)
        else:
            flat.index_add_(0, self.entries, change)


class RowAdapters:
    """Which rows of a batch have which adapters.

    Args:
        adapters: of each row.
        device: of the model.
        place: says where rows are in the input of a layer. None: along its first dimension.
    """

    def __init__(self, adapters: Sequence[Adapters], device: torch.device, place: Place | None = None) -> None:
        self._place = place or self._by_row
        self._rows = torch.arange(len(adapters), device=device)
        self._scales = {
            name: torch.tensor([dict(each).get(name, 0.0) for each in adapters], device=device)
            for name in {name for each in adapters for name, scale in each if scale}
        }
        self._kept: dict[Any, Part] = {}

    def _by_row(self, x: Tensor) -> Entries:
        if len(x) != len(self._rows):
            raise ValueError(f"an adapter's layer is given {tuple(x.shape)}, but the batch has {len(self._rows)} rows")
        return Entries("rows", lambda: self._rows, are_tokens=False)

    def part(self, name: str, x: Tensor) -> Part | None:
        """The entries of a layer's input that have this adapter; None if no row has it."""
        if name not in self._scales:
            return None
        key, rows, are_tokens = self._place(x)
        if (name, key) not in self._kept:
            scales = self._scales[name].index_select(0, rows())
            entries = scales.nonzero()[:, 0]
            some = None if len(entries) == len(scales) else entries
            self._kept[name, key] = Part(some, scales.index_select(0, entries), are_tokens)
        return self._kept[name, key]


def adapters_of(
    requests: Sequence[PreparedRequest], device: torch.device, place: Place | None = None
) -> RowAdapters | None:
    """What the rows of these requests have; None where none has an adapter."""
    rows = [prepared.request.adapters for prepared in requests for _ in range(prepared.num_rows)]
    return RowAdapters(rows, device, place) if any(rows) else None


class AdaptedLayers:
    """The layers of one model that adapters change. Without `on`, they are as without adapters, to the bit.

    Copies of the model share it, so one of them may run at a time.
    """

    def __init__(self) -> None:
        self.rows: RowAdapters | None = None

    @contextmanager
    def on(self, rows: RowAdapters | None) -> Iterator[None]:
        """Let the rows of the passes within have their adapters."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    def adapt(self, layer: nn.Module, pairs: Mapping[str, LowRank]) -> None:
        """Let adapters change a linear layer or a convolution from now on: those of these names."""
        layer.adapted = adapted = AdaptedLayer(self, pairs)  # type: ignore[assignment]  it is no module
        layer.register_forward_hook(adapted)


class AdaptedLayer:
    """What adapters change of one layer, as `adapted_of` finds it, and the hook of its module's calls."""

    def __init__(self, model: AdaptedLayers, pairs: Mapping[str, LowRank]) -> None:
        self.model, self.pairs = model, pairs

    def __deepcopy__(self, memo: object) -> Self:
        """Copies of a model share their weights, and these."""
        return self

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        self.add(inputs[0], out)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add what adapters say of the input to the layer's output, in place."""
        rows = self.model.rows
        if rows is None:
            return
        for name, pair in self.pairs.items():
            if (part := rows.part(name, x)) is not None:
                part.add(out, pair.up(part.scaled(pair.down(part.of(x)), pair.scaling)))

    def add_reduced(self, name: str, tokens: Tensor, reduced: Callable[[], Tensor]) -> None:
        """The same of one adapter, with what its `down` gives of all tokens [tokens, rank], which is asked for only if
        a row has the adapter; `tokens` are [tokens, channels].
        """
        assert self.model.rows is not None
        pair, part = self.pairs[name], self.model.rows.part(name, tokens)
        if part is not None:
            part.add(tokens, F.linear(part.scaled(part.of(reduced()), pair.scaling), pair.up.weight.flatten(1)))


def adapted_of(layer: nn.Module) -> AdaptedLayer | None:
    """What adapters change of a layer, for who computes with its weights without calling it."""
    return getattr(layer, "adapted", None)
