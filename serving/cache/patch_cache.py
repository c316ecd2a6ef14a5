"""The cache of one model: the patches of the batch, the decision which of them go through a block, and statistics."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...data.errors import UsageError
from ..layout.packing import Packing
from .active import Active
from .cells import CellTables, SlotTable
from .options import CacheOptions
from .patch_batch import CachedRequest, PatchBatch
from .rules import Booleans, PatchView, ReuseRule
from .slots import SlotBuffer
from .stats import CacheStats
from .store import BlockStore

Tokens = tuple[Tensor, ...]
OnComputed = Callable[[int, Tokens, Tokens], None]
"""Called with a block's number, input and output each time the block has run in full."""


@dataclass(frozen=True, slots=True)
class ReuseDecision:
    """Cells that go through a block.

    Attributes:
        kind: `whole` for all cells, `skipped` for none, `rows` for all cells of some requests, `masked` for any other
            set.
        active: these cells, for `rows` and `masked`.
    """

    kind: Literal["whole", "rows", "masked", "skipped"]
    active: Active = None


class PatchCache:
    """Decides about reuse and stores tensors, for all blocks of one patched model. Not thread-safe.

    `unit` is the side of the model's smallest token in latent pixels, `num_levels` its number of levels, and
    `num_blocks` its number of blocks.

    Attributes:
        stats: statistics so far.
        on_computed: called each time a block has run in full; None for no call.
        patch_size: side of a patch in latent pixels.
        max_reuse: value of the options, or else of the rule.
        is_whole: whether all blocks count as one (`WHOLE_MODEL`): a request takes a step whole or not at all.
        has_reused: for each request of the batch, whether the last step has reused any of its patches in any block.
        names, stores: names and stores of the blocks, in the order in which a step runs them.
        uses_masks: for each block, whether some of its patches have ever been computed without the others of their
            request. From then on, its operators keep their inputs.

    Raises:
        UsageError: the patch size of the cache does not suit the model.
    """

    def __init__(self, options: CacheOptions, rule: ReuseRule, *, unit: int, num_levels: int, num_blocks: int) -> None:
        multiple = unit << (num_levels - 1)
        assert options.patch_size is not None, "whoever builds the model says what suits it"
        self.patch_size = options.patch_size
        if self.patch_size % multiple:
            raise UsageError(
                f"the cache's patch size is {self.patch_size}, but this model needs a multiple of {multiple}"
            )
        self.options, self.rule, self.unit, self.num_blocks = options, rule, unit, num_blocks
        self.max_reuse = rule.max_reuse if options.max_reuse is None else options.max_reuse
        full_above = options.resolve_full_above(reuses_whole_steps=rule.is_whole)
        self.is_whole = full_above is None
        self._full_above = full_above or 0.0
        self.stats = CacheStats()
        self.on_computed: OnComputed | None = None
        self.has_reused: Booleans = np.zeros(0, bool)
        self.names: list[str] = []
        self.stores: list[BlockStore] = []
        self._input_buffers: list[list[SlotBuffer]] = []
        self._slots = SlotTable()
        self._previous = BlockStore()
        self.uses_masks: list[bool] = []
        self._has_inputs: list[bool] = []
        """Whether the operators of a block have kept their inputs for all requests, as masks need."""
        self._bytes: list[int] = []
        self._bytes_per_cell: dict[int, tuple[float, float]] = {}
        """Bytes that a block keeps for each cell: in its store, and for masks."""
        self._batch: PatchBatch | None = None
        self._is_first_block = False
        self._step = 0
        self._maker: dict[int, BlockStore] = {}
        """Store that keeps the tensor at an address, from which unchanged inputs of other blocks are recognised."""

    @property
    def tables(self) -> CellTables:
        return self.batch.tables

    @property
    def batch(self) -> PatchBatch:
        assert self._batch is not None, "the cache works between PatchedModel.begin and the next"
        return self._batch

    def check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Raise UsageError if a latent size (height, width) is not a multiple of the cache's patch size."""
        for height, width in sizes:
            if height % self.patch_size or width % self.patch_size:
                raise UsageError(
                    f"latents of {width}x{height} cannot be cut into the cache's patches of {self.patch_size}; "
                    f"use another --cache-patch-size, such as {gcd(height, width, self.patch_size)}, or --cache off"
                )

    def add_block(self, name: str, buffers: list[SlotBuffer]) -> int:
        """Register a block with the buffers of its operators, in the order in which the model runs blocks; return its
        number.
        """
        self.names.append(name)
        self.stores.append(BlockStore(compares=self.rule.needs_change))
        self._input_buffers.append(buffers)
        self.uses_masks.append(False)
        self._has_inputs.append(False)
        self._bytes.append(0)
        return len(self.names) - 1

    @property
    def is_used(self) -> bool:
        """Whether the batch has requests; a batch of rows that is only for measurements has none."""
        return self._batch is not None

    def begin(self, packing: Packing, requests: Sequence[CachedRequest]) -> None:
        """Set the requests of the next steps, in the order of their rows; with none, blocks run uncached."""
        if not requests:
            self._batch = None
            return
        self._batch = PatchBatch(packing, requests, self._slots, self.patch_size, self.unit)
        self.has_reused = np.zeros(len(requests), bool)

    def begin_step(self, steps_done: Sequence[int]) -> None:
        """Start a step, given the number of steps that each request has done. Called before every step."""
        self.batch.start_step(np.asarray(steps_done), self.options.warmup_steps)
        self.has_reused = np.zeros(len(self.batch.request_keys), bool)
        self._is_first_block = True
        self._step += 1
        for store in self.stores:
            if store.tables is not self.tables:
                self._unregister(store)
                store.move_to(self.tables, self.batch.keys)
                self._register(store)

    def decide(self, block: int, inputs: Tokens) -> ReuseDecision:
        """Decide which cells go through a block with these input tokens.

        New cells, cells in first and last steps, and cells that were reused too often are always computed.
        """
        started = time.perf_counter()
        batch, store = self.batch, self.stores[block]
        if self._is_first_block and self.rule.observes:
            self._observe(batch, inputs)
        self._is_first_block = False
        is_known = store.is_known[batch.first_cell]
        must = batch.is_forced | ~is_known
        has_expired = ~must & (store.reuses[batch.first_cell] >= self.max_reuse)
        must |= has_expired
        reuse = np.zeros(batch.num_patches, bool)
        if not must.all():
            reuse = self._apply_rule(block, inputs, must) & ~must
        self.stats.expired += int(has_expired.sum())
        self.stats.refused += int((~must & ~reuse).sum())
        if self.options.mode == "image" and not reuse.all():
            reuse[:] = False
        rows = batch.fill(reuse, self._full_above)
        if rows is None and reuse.any() and not reuse.all():
            self.uses_masks[block] = True
            if not self._has_room(block, for_masks=True):
                self._release_inputs(block)
                rows = batch.fill(reuse, 0.0)
            elif not self._has_inputs[block]:
                # From now on operators keep their inputs, beginning with those of all requests.
                reuse[:] = False
        if not reuse.all() and not self._has_room(block):
            # Tensors kept for other cells are useless: the block is about to be discarded.
            reuse[:] = False
        num_active = batch.num_patches - int(reuse.sum())
        self.stats.count(self.names[block], batch.num_patches, batch.num_patches - num_active)
        if num_active < batch.num_patches:
            self.has_reused |= np.logical_or.reduceat(reuse, batch.request_start)
        is_reused = reuse[batch.patch_of_cell]
        store.check_mask(is_reused)
        store.count(is_reused)
        self.stats.overhead_s += time.perf_counter() - started
        if num_active == batch.num_patches:
            self.stats.whole += 1
            return ReuseDecision("whole")
        if num_active == 0:
            self.stats.skipped_blocks += 1
            return ReuseDecision("skipped")
        if rows is not None:
            self.stats.rows += 1
            return ReuseDecision("rows", rows)
        self.stats.masked += 1
        return ReuseDecision("masked", batch.mask(is_reused))

    def store_outputs(self, block: int, inputs: Tokens, outputs: Tokens, row_outputs: Tokens, active: Active) -> None:
        """Store what a block has computed, if there is room."""
        started = time.perf_counter()
        store = self.stores[block]
        if active is None and self.on_computed is not None:
            self.on_computed(block, inputs, outputs)
        if active is None and not self._has_room(block):
            self._run_uncached(block)
            return
        self._unregister(store)
        store.put(inputs, outputs, row_outputs, active, self._step)
        self._register(store)
        self._update_num_bytes(block)
        most = self.options.memory_mb * 1e6
        if self.num_bytes > most:
            # The size of this block is known only now: drop the inputs kept for masks or, if that is not enough, all.
            self._release_inputs(block)
            if active is None and self.num_bytes > most:
                self._run_uncached(block)
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.num_bytes)
        self.stats.overhead_s += time.perf_counter() - started

    def replace_outputs(self, block: int, outputs: Tokens, row_outputs: Tokens) -> None:
        """Replace the stored outputs of a block by these tensors of the same values, which the next block receives."""
        store = self.stores[block]
        self._unregister(store)
        store.outputs, store.row_outputs = outputs, row_outputs
        self._register(store)

    def keeps_inputs(self, block: int, active: Active) -> bool:
        """Return whether the operators of a block that is about to run for whole requests keep their inputs.

        They do from the first mask on, as long as there is room.
        """
        if self.uses_masks[block]:
            if not self._has_room(block, for_masks=True):
                self._release_inputs(block)
            elif active is None:
                self._has_inputs[block] = True
        return self._has_inputs[block]

    def _has_room(self, block: int, *, for_masks: bool = False) -> bool:
        """Return whether the tensors of a block fit into the memory bound beside those of the other blocks."""
        own, inputs = self._bytes_per_cell.get(block, (0.0, 0.0))
        wanted = (own + inputs * for_masks) * self.tables.num_cells
        return self.num_bytes - self._bytes[block] + wanted <= self.options.memory_mb * 1e6

    def _update_num_bytes(self, block: int) -> None:
        """Update the number of bytes that a block keeps."""
        num_cells, store = self.tables.num_cells, self.stores[block]
        inputs = sum(buffer.bytes_per_cell(num_cells) for buffer in self._input_buffers[block])
        _, before = self._bytes_per_cell.get(block, (0.0, 0.0))
        self._bytes_per_cell[block] = store.num_bytes / num_cells, inputs or before
        self._bytes[block] = store.num_bytes + sum(buffer.num_bytes for buffer in self._input_buffers[block])

    def _release_inputs(self, block: int) -> None:
        self._has_inputs[block] = False
        for buffer in self._input_buffers[block]:
            buffer.clear()
        self._bytes[block] = self.stores[block].num_bytes

    def _run_uncached(self, block: int) -> None:
        name = self.names[block]
        self.stats.uncached[name] = self.stats.uncached.get(name, 0) + 1
        self._clear_block(block)

    def clear(self) -> None:
        """Discard everything, for example after a failure in the middle of a step."""
        for block in range(len(self.stores)):
            self._clear_block(block)
        self._previous.clear()

    def _register(self, store: BlockStore) -> None:
        self._maker |= {tensor.data_ptr(): store for tensor in store.outputs}

    def _unregister(self, store: BlockStore) -> None:
        for tensor in store.outputs:
            self._maker.pop(tensor.data_ptr(), None)

    def _clear_block(self, block: int) -> None:
        self._unregister(self.stores[block])
        self.stores[block].clear()
        self._release_inputs(block)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all blocks keep."""
        return sum(self._bytes)

    def _apply_rule(self, block: int, inputs: Tokens, must: Booleans) -> Booleans:
        """Return the patches that the rule allows to be reused before a block; values for patches in `must` are
        meaningless.
        """
        batch, store, change = self.batch, self.stores[block], None
        if self.rule.needs_change:
            makers = [self._maker.get(tensor.data_ptr()) for tensor in inputs]
            stamps = [None if maker is None else maker.changed_at for maker in makers]
            store.measure_change(inputs, stamps, self._step, ~must[batch.patch_of_cell])
            by_cell = store.change()
            change = torch.maximum(by_cell[batch.first_cell_tensor], by_cell[batch.last_cell_tensor])
        number = self.num_blocks if self.is_whole else block
        known = batch.request, batch.steps_done, batch.num_steps, store.reuses[batch.first_cell], batch.pixels
        return self.rule.may_reuse(PatchView(number, self.num_blocks, change, *known))

    def _observe(self, batch: PatchBatch, inputs: Tokens) -> None:
        """Pass the rule the change of every request's input since the last step."""
        store, tables = self._previous, batch.tables
        store.move_to(tables, batch.keys)
        changes = np.full(len(batch.request_keys), np.inf)
        if store.square is not None:
            store.measure_change(inputs, [None] * len(inputs), self._step, store.is_known)
            sums = torch.stack([store.moved(), store.square]).double().cpu().numpy()
            first = batch.first_cell[batch.request_start]
            sums = np.add.reduceat(sums[:, batch.first_cell] + sums[:, batch.last_cell], batch.request_start, axis=1)
            changes = np.where(store.is_known[first], np.sqrt(sums[0] / sums[1]), np.inf)
        store.put(inputs, (), (), None, self._step)
        self.rule.observe(batch.request_keys, changes, batch.is_forced[batch.request_start])
