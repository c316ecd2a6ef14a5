"""Spans of transformer blocks that a masked pass enters and leaves with all tokens, and within which it computes only
active cells (InstGenIE figures 5 and 7).

Records hold the output of the last block of a span for the other cells. Modules outside spans, such as convolutions and
norms of a U-Net, run on all tokens. If records hold nothing else, a span is one block, and keys and values of all
tokens are computed in front of it. If they hold keys and values, too, a span is all blocks of a stack. If they hold
everything that is read, a pass that has begun with all tokens may continue with the active ones from some block or
layer to its end: an open span.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...data.errors import UsageError
from ...data.templates import Keep, unit_of
from ..cache.active import ActiveSet
from ..cache.slots import TokenSlots
from .attention import PatchedCrossAttention, keep_keys_values
from .context import PatchContext
from .patched_model import PatchedModel
from .unet_layers import UNetLayer, layers_of, place_of

_STACKS, _OF_SD3 = "transformer_blocks", "JointTransformerBlock"


class Span:
    """A range of blocks of one stack; an open span reaches from a block to the end of the model.

    Args:
        blocks: the blocks, by name in the model; for an open span only the first.
        context: context of the model.
        keeps_inputs: whether records hold keys and values of attention; otherwise they are computed for all tokens.
        is_open: whether the span is open.

    Attributes:
        name: name of the last block.
        units: units of records that its blocks read (`data.templates.unit_of`).
        first: the first block.
        is_open: see above.
        outputs: buffer for outputs of the last block; not used by an open span.
    """

    def __init__(
        self, blocks: dict[str, nn.Module], context: PatchContext, *, keeps_inputs: bool, is_open: bool = False
    ) -> None:
        self.units, (*_, self._last) = tuple(blocks), blocks.values()
        self.name, self.first, self.is_open = self.units[-1], blocks[self.units[0]], is_open
        self._context, self._keeps_inputs = context, keeps_inputs
        self.outputs = TokenSlots().buffer

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Store the output of the last block in `outputs` during whole passes, until the context ends."""

        def keep(block: nn.Module, given: Any, out: Any) -> None:
            cells = self._context.cells
            assert cells is not None, "only passes that are recorded have something to keep"
            self.outputs.store(_image_of(out).flatten(0, 1), cells, self._context.level.index)

        handle = self._last.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def masked(self, active: ActiveSet) -> Iterator[None]:
        """Restrict passes over all tokens to the active cells within the span, until the context ends.

        The last block returns all tokens again, with those of other cells from `outputs`. In an open span, passes
        compute only the active cells to the end.
        """
        handles = [
            self.first.register_forward_pre_hook(
                lambda block, given, named: self._enter(active, given, named), with_kwargs=True
            )
        ]
        if not self.is_open:
            handles.append(self._last.register_forward_hook(lambda block, given, out: self._leave(active, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self, active: ActiveSet, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self._context
        # U-Nets pass the tokens by position, SD3 by name.
        tokens: Tensor = given[0] if given else named["hidden_states"]
        if not self._keeps_inputs:
            self._keep_inputs(tokens, named.get("temb"), active)
        context.active = active
        own = active.tokens(context.level.index)
        if context.packing.order == "image":
            own = tokens.index_select(0, own)
        else:
            own = tokens.flatten(0, 1).index_select(0, own).view(len(active), -1, tokens.shape[2])
        return ((own, *given[1:]), named) if given else (given, named | {"hidden_states": own})

    def _keep_inputs(self, tokens: Tensor, timestep: Tensor | None, active: ActiveSet) -> None:
        """Compute and keep keys and values of all tokens."""
        block: Any = self.first
        tables, level = active.tables, self._context.level.index
        if timestep is None:
            keep_keys_values(block.attn1, block.norm1(tokens), tables, level)
            return
        # The norm returns the input of the first attention, then factors, and in SD3.5 the input of a second attention.
        found = block.norm1(tokens, emb=timestep)
        keep_keys_values(block.attn, found[0], tables, level)
        if getattr(block, "attn2", None) is not None:
            keep_keys_values(block.attn2, found[5], tables, level)

    def _leave(self, active: ActiveSet, out: Any) -> Any:
        context, own, tables = self._context, _image_of(out).flatten(0, 1), active.tables
        context.active, level = None, context.level.index
        rows = self.outputs.rows(tables, tables.side(level) ** 2)
        recorded = rows.index_select(0, tables.slot_tokens(level).flatten())
        everything = torch.empty_like(recorded).index_copy_(0, tables.tokens(level).flatten(), recorded)
        everything.index_copy_(0, active.tokens(level), own)
        everything = everything.view(-1, context.level.grain**2, own.shape[1])
        return (out[0], everything) if isinstance(out, tuple) else everything


class _FromLayer(Span):
    """An open span from a layer of a U-Net on; `units` are those up to the next layer."""

    def __init__(self, layer: UNetLayer, units: Sequence[str], context: PatchContext) -> None:
        super().__init__({layer.name: layer.module}, context, keeps_inputs=True, is_open=True)
        self.units, self._bridging = tuple(units), layer.bridging

    @contextmanager
    def masked(self, active: ActiveSet) -> Iterator[None]:
        """Restrict passes as `Span.masked`; residuals from layers before the span are restricted, too."""
        handles = [
            block.register_forward_pre_hook(
                lambda block, given, named: self._narrow(block, active, given, named), with_kwargs=True
            )
            for block in self._bridging
        ]
        try:
            with super().masked(active):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _narrow(
        self, block: nn.Module, active: ActiveSet, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = active.tokens(self._context.level.index)
        residuals = zip(named["res_hidden_states_tuple"], self._bridging[block], strict=True)
        narrowed = tuple(each.index_select(0, own) if is_whole else each for each, is_whole in residuals)
        return given, named | {"res_hidden_states_tuple": narrowed}


def spans_of(model: PatchedModel, keep: Keep, operators: Sequence[str]) -> list[Span]:
    """Return the spans of a model in the order of a pass: its stacks for `kv`, its blocks for `outputs`.

    A transformer computes token by token except in attention, so with keys and values it needs nothing else. With
    these, open spans may begin at any block of SD3; with `all`, they may begin at any layer of a U-Net. Other models
    have no open spans.

    Args:
        model: the model that runs the passes.
        keep: which tensors records hold.
        operators: names of the operators that read the record for `all`, in the order of a pass.

    Raises:
        UsageError: the model has no stacks, or `outputs` is used with blocks other than those of U-Nets and SD3, whose
            attention to the image reads the output of their first norm.
    """
    if keep == "all" and model.is_unet:
        return _layer_spans(model, operators)
    if keep == "all" or (keep == "kv" and not model.is_unet):
        stack = getattr(model.model, _STACKS, None)
        if stack is None or any(type(block).__name__ != _OF_SD3 for block in stack.children()):
            return []
        return [
            Span({f"{_STACKS}.{number}": block}, model.context, keeps_inputs=True, is_open=True)
            for number, block in stack.named_children()
        ]
    found: list[Span] = []
    for name, stack in model.model.named_modules():
        if name.rpartition(".")[2] != _STACKS:
            continue
        blocks = {f"{name}.{number}": block for number, block in stack.named_children()}
        parts = [blocks] if keep == "kv" else [{each: block} for each, block in blocks.items()]
        found += [Span(part, model.context, keeps_inputs=keep == "kv") for part in parts]
        if keep == "outputs" and not all(map(_is_known, blocks.values())):
            found.clear()
            break
    if not found:
        raise UsageError(
            f"--keep {keep} knows the transformer blocks of Stable Diffusion, SDXL and Stable Diffusion 3; this "
            f"{type(model.model).__name__} has others: give --keep all"
        )
    return sorted(found, key=lambda span: place_of(span.name))


def _layer_spans(model: PatchedModel, operators: Sequence[str]) -> list[Span]:
    """Return the spans of layers that read the record.

    Operators before the first layer belong to its span, and operators after a layer to that of the layer.
    """
    layers = layers_of(model.model)
    places = [place_of(layer.name) for layer in layers]
    units = [dict[str, None]() for _ in layers]
    for operator in operators:
        units[max(0, bisect_right(places, place_of(operator)) - 1)][unit_of(operator)] = None
    return [_FromLayer(layer, tuple(own), model.context) for layer, own in zip(layers, units, strict=True) if own]


def _is_known(block: nn.Module) -> bool:
    kind, second = type(block).__name__, getattr(block, "attn2", None)
    if kind == "BasicTransformerBlock":
        # The second of two consecutive attentions to the image would read the output of the first.
        return getattr(block, "norm_type", None) == "layer_norm" and isinstance(second, PatchedCrossAttention)
    return kind == _OF_SD3


def _image_of(out: Any) -> Tensor:
    """Return the image's tokens [tokens, 1, channels] from the output of a block: alone, or after its text."""
    return out[1] if isinstance(out, tuple) else out
