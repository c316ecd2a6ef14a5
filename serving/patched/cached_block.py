"""Installs the cache in front of the blocks of a diffusers model, whose own `forward` runs on all, some or no cells."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...data.tables.block_facts import BlockFacts
from ..cache.active import Active, ActiveRows, ActiveSet
from ..cache.options import default_patch_size
from ..cache.patch_cache import PatchCache
from ..cache.slots import NormSlots, TokenSlots
from ..core.denoiser import denoiser_of
from ..families import transformer_of
from ..families.table import entry_of, token_side
from .attention import PatchedJointAttention
from .context import PatchContext
from .row_leaves import RowsAndZeroToPatches
from .tokens import to_patches, to_tokens


def install(model: Any, cache: PatchCache, context: PatchContext) -> None:
    """Wrap the blocks of a patched model, whose leaves share a context.

    The blocks of a U-Net are its down blocks, its middle block and its up blocks; those of a transformer are the blocks
    of all its lists.
    """
    wrapper = _CachedUNetBlock if transformer_of(model) is None else _CachedTransformerBlock
    for name, module in blocks_of(model):
        leaves = (getattr(leaf, "slots", None) for leaf in module.modules())
        kept = [slots.buffer for slots in leaves if isinstance(slots, TokenSlots | NormSlots)]
        number = cache.add_block(name, kept)
        module.forward = wrapper(module, number, cache, context)


def blocks_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and modules of the blocks that can be cached, in the order in which a step runs them."""
    transformer = transformer_of(model)
    if transformer is not None:
        for prefix, blocks in zip(("transformer", "single"), transformer.lists, strict=False):
            own = (block for block in getattr(model, blocks.name) if type(block).__name__ == blocks.kind)
            yield from ((f"{prefix}{index}", block) for index, block in enumerate(own))
        return
    yield from ((f"down{index}", block) for index, block in enumerate(model.down_blocks))
    if model.mid_block is not None:
        yield "mid", model.mid_block
    yield from ((f"up{index}", block) for index, block in enumerate(model.up_blocks))


def block_facts(pipe: Any, name: str, fingerprint: str, patch_size: int | None) -> BlockFacts:
    """Return the conditions under which a block profile of a pipeline is valid; a cache predictor must match them.

    Without a patch size, the default of the model is used.
    """
    denoiser = denoiser_of(pipe)
    blocks = tuple(block for block, _ in blocks_of(denoiser))
    if patch_size is None:
        config = denoiser.config
        is_unet = transformer_of(denoiser) is None
        unit = 1 if is_unet else token_side(entry_of(type(denoiser).__name__), config)
        num_levels = len(config.block_out_channels) if is_unet else 1
        # 128 is the default of the pipelines for a model without a sample size.
        patch_size = default_patch_size(config.get("sample_size") or 128, num_levels, unit)
    return BlockFacts(name, fingerprint, type(pipe.scheduler).__name__, patch_size, blocks)


class _Wrapper:
    """Common base of both kinds of blocks: the block, its number in the cache, and its run with the context set."""

    forward: Callable[..., Any]

    def __init__(self, block: nn.Module, number: int, cache: PatchCache, context: PatchContext) -> None:
        self.run, self.number, self.cache, self.context = block.forward, number, cache, context

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self.forward if self.cache.is_used else self.run)(*arguments, **named)

    def run_on(self, active: Active, *arguments: Any, **named: Any) -> Any:
        """Run on the active cells or rows; for whole requests, operators keep their inputs if there is room."""
        context, cache = self.context, self.cache
        if isinstance(active, ActiveSet):
            context.active = active
        elif cache.keeps_inputs(self.number, active):
            context.cells = cache.tables if active is None else active.own
        try:
            with context.restricted_to(active) if isinstance(active, ActiveRows) else nullcontext():
                return self.run(*arguments, **named)
        finally:
            context.active = context.cells = None


class _CachedUNetBlock(_Wrapper):
    """A down, middle or up block; the residuals that it passes to the up blocks are cached, too."""

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
            self.cache.store_outputs(self.number, inputs, self._tokens(out), (), active)
        elif decision.kind == "whole":
            if res_hidden_states_tuple:
                others["res_hidden_states_tuple"] = res_hidden_states_tuple
            out = self.run_on(None, hidden_states, temb=temb, **others)
            self._out_level, self._has_skips = context.level.index, isinstance(out, tuple)
            self.cache.store_outputs(self.number, inputs, self._tokens(out), (), None)
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
        """Return the outputs as tokens; an output that occurs twice stays one tensor."""
        tensors = (out[0], *out[1]) if isinstance(out, tuple) else (out,)
        made = {id(tensor): to_tokens(tensor) for tensor in tensors}
        return tuple(made[id(tensor)] for tensor in tensors)


class _CachedTransformerBlock(_Wrapper):
    """A block of a transformer.

    The text of a row, be it separate or ahead of the image in one stream, is computed if one of its patches is.
    """

    def __init__(self, block: nn.Module, number: int, cache: PatchCache, context: PatchContext) -> None:
        super().__init__(block, number, cache, context)
        self._signature = signature(block.forward)
        self._has_text_beside = any(isinstance(leaf, PatchedJointAttention) for leaf in block.modules())
        self._gives_both = self._has_text_beside
        self._is_modulated_twice = any(isinstance(leaf, RowsAndZeroToPatches) for leaf in block.modules())

    def forward(self, *arguments: Any, **named: Any) -> Any:
        cache, given = self.cache, self._signature.bind(*arguments, **named).arguments
        tokens, length = self._image_of(_hidden_states(given)), self._text_length(given)
        store = cache.stores[self.number]
        store.fit_text(length)
        decision = cache.decide(self.number, (tokens,))
        if decision.kind == "skipped":
            return self._cached_output(given)
        active = decision.active
        if active is None:
            out = self.run_on(None, **given)
        else:
            with self._stream_of(active, length):
                out = self.run_on(active, **self._part_of(given, active))
        self._gives_both = isinstance(out, tuple)
        image, texts = self._parted(out, length, self.context.packing.num_rows if active is None else len(active.rows))
        cache.store_outputs(self.number, (tokens,), (image,), texts, active)
        return out if active is None else self._cached_output(given)

    @contextmanager
    def _stream_of(self, active: ActiveSet | ActiveRows, length: int) -> Iterator[None]:
        """Restrict the rows of stream tokens to the active cells or rows, until the context ends."""
        context = self.context
        before, context.stream_rows = context.stream_rows, active.stream(length).rows
        try:
            yield
        finally:
            context.stream_rows = before

    def _image_of(self, hidden_states: Tensor) -> Tensor:
        """Return the image tokens [tokens, channels] of [P, tokens, channels], or of a stream [tokens, 1, channels]."""
        tokens = hidden_states.flatten(0, 1)
        return tokens[len(tokens) - self.context.num_tokens :]

    def _text_length(self, given: dict[str, Any]) -> int:
        """Return the number of text tokens of a row."""
        if self._has_text_beside:
            return given["encoder_hidden_states"].shape[1]
        return (_hidden_states(given).shape[:2].numel() - self.context.num_tokens) // self.context.packing.num_rows

    def _part_of(self, given: dict[str, Any], active: ActiveSet | ActiveRows) -> dict[str, Any]:
        """Restrict the block's arguments to the active cells or rows.

        An argument has an entry for each row, or for each patch or token like `hidden_states`; angles have one for each
        token. If there are as many rows as patches or tokens, both indices are the same.
        """
        num_rows = self.context.packing.num_rows
        num_entries, tokens_of_entry = _hidden_states(given).shape[:2]
        places = active.stream(0 if self._has_text_beside else self._text_length(given)).places
        entries = places[::tokens_of_entry] // tokens_of_entry

        def part(name: str, value: Any) -> Any:
            if name == "temb" and self._is_modulated_twice:
                return value.unflatten(0, (2, num_rows)).index_select(1, active.rows).flatten(0, 1)
            if isinstance(value, tuple):
                length = (len(value[0]) - self.context.num_tokens) // num_rows
                return tuple(angles.index_select(0, active.stream(length).places) for angles in value)
            if not isinstance(value, Tensor) or len(value) == 1:  # a single entry applies to all
                return value
            if len(value) == num_entries:
                return value.index_select(0, entries)
            assert len(value) == num_rows, "blocks are given something for each row, patch or token"
            return value.index_select(0, active.rows)

        return {name: part(name, value) for name, value in given.items()}

    def _parted(self, out: Any, length: int, num_rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split a block's output into image tokens [tokens, channels] and texts [rows, length, channels], if any."""
        text, image = out if self._gives_both else (None, out)
        tokens = image.flatten(0, 1)
        if not self._has_text_beside and length:
            text, tokens = tokens[: num_rows * length].view(num_rows, length, -1), tokens[num_rows * length :]
        return tokens, () if text is None or not length else (text,)

    def _cached_output(self, given: dict[str, Any]) -> Any:
        """Return the block's output as kept in the cache."""
        store, like = self.cache.stores[self.number], _hidden_states(given)
        texts, image = store.row_outputs, store.outputs[0]
        if self._has_text_beside:
            return texts[0] if texts else None, image.view(like.shape)
        stream = (torch.cat([texts[0].flatten(0, 1), image]) if texts else image).view(like.shape)
        out = (given["encoder_hidden_states"], stream) if self._gives_both else stream
        if texts:
            image, texts = self._parted(out, texts[0].shape[1], len(texts[0]))
            self.cache.replace_outputs(self.number, (image,), texts)
        return out


def _hidden_states(given: dict[str, Any]) -> Tensor:
    """Return the hidden states of a block, which are its first argument, whatever its name."""
    return next(iter(given.values()))
