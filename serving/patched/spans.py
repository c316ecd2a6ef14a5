"""Transformer blocks that a masked pass enters and leaves with all tokens, and between computes the active cells only
(InstGenIE figures 5 and 7).

Records hold what the last block of a span has given for the other cells. What stands before and behind spans runs on
all tokens: convolutions and norms of a U-Net. A span is one block where nothing else is recorded, and then keys and
values of all tokens are computed in front of it; or it is all blocks of a stack, where records hold these, too. Where
they hold all that is read, a pass that has begun with all tokens may go on with the active ones to its end, from some
block or layer on: an open span.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
    """From a block to another one of the same stack, or to itself; or an open one, from a block to the model's end.

    Args:
        blocks: by their names in the model; of an open span only the first.
        context: of the model.
        keeps_inputs: whether records have keys and values of attention; otherwise they are computed of all tokens.
        is_open: see above.

    Attributes:
        name: of the last block.
        units: of records that its blocks read (`data.templates.unit_of`).
        first: block.
        is_open: see above.
        outputs: buffer for what the last block has given, which an open span does not need.
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
        """Let whole passes meanwhile put what the last block gives into `outputs`."""

        def keep(block: nn.Module, given: Any, out: Any) -> None:
            cells = self._context.cells
            assert cells is not None, "only passes that are recorded have something to keep"
            self.outputs.keep(_image_of(out).flatten(0, 1), cells, self._context.level.index)

        handle = self._last.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def masked(self, active: ActiveSet) -> Iterator[None]:
        """Let passes over all tokens meanwhile compute the active cells only from the first block to the last, which
        gives all tokens again: those of other cells as `outputs` has them. An open span computes them to the end.
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
        # U-Nets give the tokens by place, SD3 by name.
        tokens: Tensor = given[0] if given else named["hidden_states"]
        if not self._keeps_inputs:
            self._keep_inputs(tokens, named.get("temb"), active)
        context.active = active
        own = tokens.index_select(0, active.tokens(context.level.index))
        return ((own, *given[1:]), named) if given else (given, named | {"hidden_states": own})

    def _keep_inputs(self, tokens: Tensor, timestep: Tensor | None, active: ActiveSet) -> None:
        """Compute keys and values of all tokens."""
        block: Any = self.first
        tables, level = active.tables, self._context.level.index
        if timestep is None:
            keep_keys_values(block.attn1, block.norm1(tokens), tables, level)
            return
        # The norm gives the input of the first attention, then factors, and in SD3.5 the input of a second one.
        found = block.norm1(tokens, emb=timestep)
        keep_keys_values(block.attn, found[0], tables, level)
        if getattr(block, "attn2", None) is not None:
            keep_keys_values(block.attn2, found[5], tables, level)

    def _leave(self, active: ActiveSet, out: Any) -> Any:
        context, own, tables = self._context, _image_of(out), active.tables
        context.active, level = None, context.level.index
        rows = self.outputs.rows(tables, tables.side(level) ** 2)
        everything = own.new_empty(context.level.num_tokens, *own.shape[1:])
        recorded = rows.index_select(0, tables.slot_tokens(level).flatten()).view(everything.shape)
        everything.index_copy_(0, tables.tokens(level).flatten(), recorded)
        everything.index_copy_(0, active.tokens(level), own)
        return (out[0], everything) if isinstance(out, tuple) else everything


class _FromLayer(Span):
    """An open one from a layer of a U-Net; `units` are those up to the next layer."""

    def __init__(self, layer: UNetLayer, units: Sequence[str], context: PatchContext) -> None:
        super().__init__({layer.name: layer.module}, context, keeps_inputs=True, is_open=True)
        self.units, self._bridging = tuple(units), layer.bridging

    @contextmanager
    def masked(self, active: ActiveSet) -> Iterator[None]:
        """See `Span`. What layers in front have handed to those behind is of all tokens, too."""
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
    """The spans of a model, in the order of passes: its stacks for `kv`, its blocks for `outputs`.

    A transformer computes token by token beside its attention: with keys and values, it has no use for anything else.
    Of SD3's, open spans may begin at any block then, as of a U-Net at any layer for `all`; of other models there are
    none.

    Args:
        model: whose passes they are.
        keep: what records hold.
        operators: by their names, in the order of passes, those that read the record for `all`.

    Raises:
        UsageError: the model has no stacks, or for `outputs` other blocks than those of U-Nets and of SD3, whose
            attention to the image reads what their first norm gives.
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
    """Of layers that read the record; what stands in front of the first one, and behind each, is read with it."""
    layers = layers_of(model.model)
    places = [place_of(layer.name) for layer in layers]
    units = [dict[str, None]() for _ in layers]
    for operator in operators:
        units[max(0, bisect_right(places, place_of(operator)) - 1)][unit_of(operator)] = None
    return [_FromLayer(layer, tuple(own), model.context) for layer, own in zip(layers, units, strict=True) if own]


def _is_known(block: nn.Module) -> bool:
    kind, second = type(block).__name__, getattr(block, "attn2", None)
    if kind == "BasicTransformerBlock":
        # The second of two attentions to the image, one behind the other, would read what the first has given.
        return getattr(block, "norm_type", None) == "layer_norm" and isinstance(second, PatchedCrossAttention)
    return kind == _OF_SD3


def _image_of(out: Any) -> Tensor:
    """The image's tokens [tokens, 1, channels] among what a block gives: alone, or behind its text."""
    return out[1] if isinstance(out, tuple) else out
