"""Puts the cache before the blocks of a diffusers model: the block's own `forward` runs, on all cells, some or none."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ...data.tables.block_facts import BlockFacts
from ..cache.active import Active, ActiveRows, ActiveSet
from ..cache.patch_cache import PatchCache
from ..cache.slots import NormSlots, TokenSlots
from ..core.denoiser import denoiser_of
from .context import PatchContext, to_patches, to_tokens


def install(model: Any, cache: PatchCache, context: PatchContext) -> None:
    """Wrap the blocks of a patched model, whose leaves share a context.

    A U-Net has its down blocks, its middle and its up blocks; SD3 its joint transformer blocks.
    """
    for name, module in blocks_of(model):
        leaves = (getattr(leaf, "slots", None) for leaf in module.modules())
        kept = [slots.buffer for slots in leaves if isinstance(slots, TokenSlots | NormSlots)]
        number = cache.add_block(name, kept)
        wrapper = _CachedTransformerBlock if name.startswith("transformer") else _CachedUNetBlock
        module.forward = wrapper(module, number, cache, context)


def blocks_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and modules of the blocks that can be cached, in the order in which a step runs them."""
    if hasattr(model, "transformer_blocks"):
        yield from ((f"transformer{index}", block) for index, block in enumerate(model.transformer_blocks))
        return
    yield from ((f"down{index}", block) for index, block in enumerate(model.down_blocks))
    if model.mid_block is not None:
        yield "mid", model.mid_block
    yield from ((f"up{index}", block) for index, block in enumerate(model.up_blocks))


def block_facts(pipe: Any, name: str, fingerprint: str, patch_size: int) -> BlockFacts:
    """What a block profile of a pipeline holds for, and a cache predictor must have been trained for."""
    blocks = tuple(block for block, _ in blocks_of(denoiser_of(pipe)))
    return BlockFacts(name, fingerprint, type(pipe.scheduler).__name__, patch_size, blocks)


class _Wrapper:
    """What both kinds of blocks share: the block, its number in the cache, and the run with the context set."""

    forward: Callable[..., Any]

    def __init__(self, block: nn.Module, number: int, cache: PatchCache, context: PatchContext) -> None:
        self.run, self.number, self.cache, self.context = block.forward, number, cache, context

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self.forward if self.cache.is_used else self.run)(*arguments, **named)

    def run_on(self, active: Active, *arguments: Any, **named: Any) -> Any:
        """Run on what is active; where that is whole requests, operators keep what they read, if there is room."""
        context, cache = self.context, self.cache
        if isinstance(active, ActiveSet):
            context.active = active
        elif cache.keeps_inputs(self.number, active):
            context.cells = cache.tables if active is None else active.own
        try:
            with context.only(active) if isinstance(active, ActiveRows) else nullcontext():
                return self.run(*arguments, **named)
        finally:
            context.active = context.cells = None


class _CachedUNetBlock(_Wrapper):
    """A down, middle or up block; what it hands to the other side of the U-Net is cached too."""

    _out_level = 0
    _has_skips = False

    def forward(
        self, hidden_states: Tensor, temb: Tensor, res_hidden_states_tuple: tuple[Tensor, ...] = (), **others: Any
    ) -> Any:
        context, given = self.context, (hidden_states, *res_hidden_states_tuple)
        inputs = tuple(to_tokens(tensor) for tensor in given)
        decision = self.cache.decide(self.number, inputs)
        if (active := decision.active) is not None:
            taken = [
                to_patches(tokens.index_select(0, active.tokens(self._level_of(tokens))), tensor.shape[2])
                for tokens, tensor in zip(inputs, given, strict=True)
            ]
            if res_hidden_states_tuple:
                others["res_hidden_states_tuple"] = tuple(taken[1:])
            out = self.run_on(active, taken[0], temb=temb.index_select(0, active.rows), **others)
            self.cache.keep(self.number, inputs, self._tokens(out), (), active)
        elif decision.kind == "whole":
            if res_hidden_states_tuple:
                others["res_hidden_states_tuple"] = res_hidden_states_tuple
            out = self.run_on(None, hidden_states, temb=temb, **others)
            self._out_level, self._has_skips = context.level.index, isinstance(out, tuple)
            self.cache.keep(self.number, inputs, self._tokens(out), (), None)
            return out
        levels = self.cache.tables.packing.levels
        context.level = levels[self._out_level]
        kept = [
            to_patches(tokens, levels[self._level_of(tokens)].side) for tokens in self.cache.stores[self.number].outputs
        ]
        return (kept[0], tuple(kept[1:])) if self._has_skips else kept[0]

    def _level_of(self, tokens: Tensor) -> int:
        return self.cache.tables.level_of(len(tokens)).index

    @staticmethod
    def _tokens(out: Any) -> tuple[Tensor, ...]:
        """The outputs as tokens; what is handed on twice is one tensor."""
        tensors = (out[0], *out[1]) if isinstance(out, tuple) else (out,)
        made = {id(tensor): to_tokens(tensor) for tensor in tensors}
        return tuple(made[id(tensor)] for tensor in tensors)


class _CachedTransformerBlock(_Wrapper):
    """A joint block of SD3. The text of a row is computed where one of its patches is."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, **others: Any
    ) -> tuple[Tensor | None, Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[2])
        decision = self.cache.decide(self.number, (tokens,))
        if decision.kind == "skipped":
            return self._kept(hidden_states)
        x, text = hidden_states, encoder_hidden_states
        if (active := decision.active) is not None:
            x = tokens.index_select(0, active.tokens(0)).view(-1, *x.shape[1:])
            text, temb = text.index_select(0, active.rows), temb.index_select(0, active.rows)
        text, out = self.run_on(active, hidden_states=x, encoder_hidden_states=text, temb=temb, **others)
        row_outputs = () if text is None else (text,)
        self.cache.keep(self.number, (tokens,), (out.reshape(-1, out.shape[2]),), row_outputs, active)
        return (text, out) if active is None else self._kept(hidden_states)

    def _kept(self, like: Tensor) -> tuple[Tensor | None, Tensor]:
        store = self.cache.stores[self.number]
        return store.row_outputs[0] if store.row_outputs else None, store.outputs[0].view(like.shape)
