"""Adapters (LoRA) that are not fused into the weights: each row of a batch has its own, and all rows share the layers.

An adapter adds scale * up(down(x)) to a layer's output for x, where `down` has few outputs (Hu et al., LoRA, section
4.1). All entries of a batch with the same adapter go through it together; nothing is computed for the others.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.adapters import Adapters
from .prepared import PreparedRequest


@dataclass(frozen=True, slots=True)
class LowRank:
    """Change of one layer by one adapter: up(scaling * down(x)), with linear layers or convolutions, without bias."""

    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d
    scaling: float


class Entries(NamedTuple):
    """Position of a batch's rows in the input of a layer.

    Attributes:
        key: key that is equal for inputs of the same form.
        rows: returns the row of each entry.
        are_tokens: whether entries range over all dimensions but the last; otherwise over the first.
    """

    key: Hashable
    rows: Callable[[], Tensor]
    are_tokens: bool


Place = Callable[[Tensor], Entries]


@dataclass(frozen=True, slots=True)
class AdaptedEntries:
    """Entries of a layer's input that have one adapter, with its scale at each of them. `entries` is None if all do."""

    entries: Tensor | None
    scales: Tensor
    are_tokens: bool

    def of(self, x: Tensor) -> Tensor:
        """Return these entries of a layer's input, or of a tensor computed from it."""
        flat = x.flatten(0, -2) if self.are_tokens else x
        return flat if self.entries is None else flat.index_select(0, self.entries)

    def scaled(self, reduced: Tensor, scaling: float) -> Tensor:
        """Return the output of `down` for these entries, multiplied by their scales."""
        factors = (self.scales * scaling).view(-1, *[1] * (reduced.ndim - 1))
        return (reduced * factors).to(reduced.dtype)

    def add(self, out: Tensor, change: Tensor) -> None:
        """Add the output of `up` for these entries to the layer's output, in place."""
        flat = out.view(-1, out.shape[-1]) if self.are_tokens else out
        if self.entries is None:
            flat.add_(change)
        else:
            flat.index_add_(0, self.entries, change)


@dataclass(slots=True, eq=False)
class RowAdapters:
    """Adapters of the rows of a batch.

    Attributes:
        scales: (rows,) scale of each row, by adapter; 0 where a row has it not.
        place: returns the position of rows in the input of a layer. None: along its first dimension.
        for_all: whether all entries go through every adapter, at a scale of 0 where they have it not, so that the work
            does not depend on which rows have which adapter.
    """

    scales: dict[str, Tensor]
    place: Place | None = None
    for_all: bool = False
    _cached_entries: dict[Any, AdaptedEntries] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls, adapters: Sequence[Adapters], device: torch.device, place: Place | None = None, **options: bool
    ) -> Self | None:
        """Return the given adapters of each row, on the device of the model; None if no row has any.

        Options are those of the class.
        """
        if not any(adapters):
            return None
        names = {name for each in adapters for name, scale in each if scale}
        scales = {
            name: torch.tensor([dict(each).get(name, 0.0) for each in adapters], device=device)
            for name in sorted(names)
        }
        return cls(scales, place, **options)

    def of_rows(self, rows: Tensor) -> Self:
        """Return the adapters of some rows, as a batch of their own."""
        scales = {name: own.index_select(0, rows) for name, own in self.scales.items()}
        return type(self)(scales, self.place, self.for_all)

    def entries_with(self, name: str, x: Tensor) -> AdaptedEntries | None:
        """Return the entries of a layer's input that have this adapter; None if no row has it."""
        if name not in self.scales:
            return None
        key, rows, are_tokens = _by_row(x, len(self.scales[name])) if self.place is None else self.place(x)
        if (name, key) not in self._cached_entries:
            scales = self.scales[name].index_select(0, rows())
            some = None
            if not self.for_all:
                entries = scales.nonzero()[:, 0]
                some = None if len(entries) == len(scales) else entries
                scales = scales.index_select(0, entries)
            self._cached_entries[name, key] = AdaptedEntries(some, scales, are_tokens)
        return self._cached_entries[name, key]


def _by_row(x: Tensor, num_rows: int) -> Entries:
    if len(x) != num_rows:
        raise ValueError(f"an adapter's layer is given {tuple(x.shape)}, but the batch has {num_rows} rows")
    return Entries("rows", lambda: torch.arange(num_rows, device=x.device), are_tokens=False)


def adapters_of_rows(requests: Sequence[PreparedRequest]) -> list[Adapters]:
    """Return the adapters of each row of these requests."""
    return [prepared.request.adapters for prepared in requests for _ in range(prepared.num_rows)]


class AdaptedLayers:
    """Layers of one model that adapters change. Outside `on`, their results are bit for bit those without adapters.

    Copies of the model share this object, so only one of them may run at a time; see `of_copy`.
    """

    def __init__(self) -> None:
        self.rows: RowAdapters | None = None

    @contextmanager
    def on(self, rows: RowAdapters | None) -> Iterator[None]:
        """Apply the adapters of these rows to the passes within the context."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the adapted layers of a model, which its copies share; new ones if it has none."""
        found = (adapted for layer in model.modules() if (adapted := adapted_of(layer)) is not None)
        first = next(found, None)
        return cls() if first is None else first.model  # type: ignore[return-value]  there are no subclasses

    @classmethod
    def of_copy(cls, model: nn.Module) -> Self:
        """Give a copy of a model adapted layers of its own, so that it may run between the layers of other copies."""
        own = cls()
        for layer in model.modules():
            if (adapted := adapted_of(layer)) is not None:
                own.adapt(layer, adapted.pairs)
        return own

    def adapt(self, layer: nn.Module, pairs: Mapping[str, LowRank]) -> None:
        """Let the adapters with these names, and no others, change a linear layer or a convolution from now on."""
        for number, hook in list(layer._forward_hooks.items()):
            if isinstance(hook, AdaptedLayer):
                del layer._forward_hooks[number]
        layer.adapted = adapted = AdaptedLayer(self, pairs)  # type: ignore[assignment]  it is no module
        layer.register_forward_hook(adapted)


class AdaptedLayer:
    """Changes of one layer by adapters, which `adapted_of` returns, and the forward hook of its module."""

    def __init__(self, model: AdaptedLayers, pairs: Mapping[str, LowRank]) -> None:
        self.model, self.pairs = model, pairs

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: copies of a model share their weights and adapters."""
        return self

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        self.add(inputs[0], out)

    def add(self, x: Tensor, out: Tensor, down: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        """Add the change by all adapters for input `x` to the layer's output, in place.

        `down` runs an adapter's first layer on a part of `x`; None to call it.
        """
        rows = self.model.rows
        if rows is None:
            return
        for name, pair in self.pairs.items():
            if (adapted := rows.entries_with(name, x)) is not None:
                part = adapted.of(x)
                reduced = pair.down(part) if down is None else down(pair.down, part)
                adapted.add(out, pair.up(adapted.scaled(reduced, pair.scaling)))

    def add_reduced(self, name: str, tokens: Tensor, reduced: Callable[[], Tensor]) -> None:
        """Add the change by one adapter to `tokens` [tokens, channels], in place. `reduced` returns the output of the
        adapter's `down` for all tokens, [tokens, rank]; it is called only if a row has the adapter.
        """
        assert self.model.rows is not None
        pair, adapted = self.pairs[name], self.model.rows.entries_with(name, tokens)
        if adapted is not None:
            adapted.add(
                tokens,
                F.linear(adapted.scaled(adapted.of(reduced()), pair.scaling), pair.up.weight.flatten(1)),
            )


def adapted_of(layer: nn.Module) -> AdaptedLayer | None:
    """Return the changes of a layer by adapters, for code that uses its weights without calling it; None if none."""
    return getattr(layer, "adapted", None)
