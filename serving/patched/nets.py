"""ControlNets on packed batches, with the leaves of the patch engine."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.compiled import compile_blocks
from ..core.controls import NetRows, Nets, names_of, net_rows, with_residuals
from ..core.denoiser import copy_modules
from ..core.prepared import PreparedRequest
from ..layout.packing import Packing
from .attention import PatchedCrossAttention
from .context import BatchValues, PatchContext
from .swap import PatchSwap


class PatchedNets:
    """The ControlNets of a patched U-Net, whose context they share.

    Args:
        nets: the nets, left unmodified.
        context: the context.

    Raises:
        UsageError: as `PatchSwap`.
    """

    def __init__(self, nets: Nets, context: PatchContext) -> None:
        self._context = context
        self.models: Nets = {name: copy_modules(net) for name, net in nets.items()}
        for net in self.models.values():
            PatchSwap(net, context)
        self._readers = {
            name: [leaf for leaf in net.modules() if isinstance(leaf, PatchedCrossAttention)]
            for name, net in self.models.items()
        }

    def compile(self, backend: str | Callable[..., Any]) -> int:
        """Compile their blocks, as `compile_blocks`."""
        return sum(compile_blocks(net, backend=backend) for net in self.models.values())

    def rows_of(
        self,
        requests: Sequence[PreparedRequest],
        packing: Packing,
        conditions: dict[str, Any],
        *,
        for_all: bool,
    ) -> dict[str, NetRows]:
        """Return the rows of each net that the requests of a batch name.

        Args:
            requests: the requests, in the order of the packing.
            packing: packing of their rows.
            conditions: conditions of these rows.
            for_all: whether a net runs on all of them, as in recorded passes.
        """

        def entries_of(rows: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch.isin(level.row_index, rows).nonzero()[:, 0] for level in packing.levels)

        found: dict[str, NetRows] = {}
        for name in names_of(requests):
            ways = {"for_all": for_all, "part_of": packing.of_rows, "entries_of": entries_of}
            own = net_rows(name, requests, packing, conditions, **ways)
            text = own.conditions["encoder_hidden_states"]
            found[name] = replace(own, keys_values=tuple(leaf.read(text) for leaf in self._readers[name]))
        return found

    def with_residuals(self, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> dict[str, Any]:
        """Return conditions of a pass of the U-Net with what the nets of its batch add to it."""
        context = self._context
        controls, levels = context.batch_values.controls, context.packing.levels
        if not controls:
            return conditions
        sizes = [level.num_patches for level in levels]
        found = [self._run(name, own, *own.of(patches, timesteps), sizes) for name, own in controls.items()]
        context.level = levels[0]
        return with_residuals(conditions, found)

    def _run(
        self, name: str, own: NetRows, patches: Tensor, timesteps: Tensor, sizes: Sequence[int]
    ) -> Sequence[Tensor]:
        context = self._context
        for leaf, keys_values in zip(self._readers[name], own.keys_values, strict=True):
            leaf.text = keys_values
        packing = own.packing
        assert isinstance(packing, Packing)
        with nullcontext() if own.rows is None else context.switch_batch(packing, BatchValues()):
            levels = context.packing.levels
            context.level = levels[0]

            def spread(values: Tensor, level: int) -> Tensor:
                return values.index_select(0, levels[level].row_index)

            before, context.timesteps = context.timesteps, timesteps
            try:
                return own.results(self.models[name], patches, timesteps[0], timesteps, spread, sizes)
            finally:
                context.timesteps = before
