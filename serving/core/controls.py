"""ControlNets beside a U-Net (Zhang et al. 2023, section 3.2): what they add to it, for each row of a batch.

A net is a copy of the U-Net's first half that also sees an image. Its results are added to those that the first half
passes on to the second. In a batch, a net runs on the rows that name it. In a recorded pass it runs on all rows, so
that the work does not depend on which name it, and what it adds to the others is multiplied by 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.errors import UsageError
from ..layout.device_tables import to_device
from ..layout.packing import Packing, WholeImages
from .denoiser import of_rows
from .prepared import PreparedRequest

Nets = Mapping[str, Any]
"""ControlNets by name; `controlnet_cond_embedding`, which sees the images, is left to the prepare stage."""
NO_NETS: Nets = {}
Spread = Callable[[Tensor, int], Tensor]
"""Returns the values of all entries at a level of a U-Net, for values (rows,) of their rows."""
AnyPacking = Packing | WholeImages
_NEVER = 0.0, -1.0, 0.0
"""Factor, first and last timestep of a row without a control."""
_SHARED = ("encoder_hidden_states", "added_cond_kwargs")
"""Conditions that nets have in common with their U-Net."""


@dataclass(frozen=True, slots=True, eq=False)
class NetRows:
    """Rows of a batch on which a net runs, as a batch of their own.

    Attributes:
        conditions: conditions of these rows that the net takes.
        embedding: what the net has made of their images, packed as latents.
        scales: (rows,) factor of what the net adds.
        first, last: (rows,) timesteps of the first and last step in which it adds anything; none if first < last.
        packing: their packing.
        rows: (rows,) their numbers in the batch; None if they are all rows.
        entries: their patches, or whole images, in the batch, at each level of the U-Net; empty if they are all rows.
        keys_values: keys and values of their text, for each cross attention of a patched net.
    """

    conditions: dict[str, Any]
    embedding: Tensor
    scales: Tensor
    first: Tensor
    last: Tensor
    packing: AnyPacking
    rows: Tensor | None = None
    entries: tuple[Tensor, ...] = ()
    keys_values: tuple[tuple[Tensor, Tensor], ...] = ()

    def of(self, latents: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and timesteps of these rows, of those of the batch."""
        if self.rows is None:
            return latents, timesteps
        return latents.index_select(0, self.entries[0]), timesteps.index_select(0, self.rows)

    def results(
        self, net: Any, latents: Tensor, timestep: Tensor, timesteps: Tensor, spread: Spread, sizes: Sequence[int]
    ) -> list[Tensor]:
        """Return what a net adds to each entry of the batch: at each of its down blocks' results, and at its middle.

        Args:
            net: the net.
            latents, timestep: its arguments, for these rows.
            timesteps: (rows,) timestep of each of them.
            spread: see `Spread`.
            sizes: number of entries of the batch at each level.
        """
        down, middle = net(latents, timestep, controlnet_cond=self.embedding, return_dict=False, **self.conditions)
        is_on = (timesteps <= self.first) & (timesteps >= self.last)
        factors, found = (self.scales * is_on).to(latents.dtype), []
        for each, level in zip((*down, middle), levels_of(net), strict=True):
            each = each * spread(factors, level)[:, None, None, None]
            found.append(each if self.rows is None else _placed(each, self.entries[level], sizes[level]))
        return found


def _placed(part: Tensor, entries: Tensor, size: int) -> Tensor:
    """Return a tensor of `size` entries with a part at some of them, and zeros elsewhere."""
    whole = part.new_zeros(size, *part.shape[1:])
    if part.is_contiguous(memory_format=torch.channels_last):
        whole = whole.contiguous(memory_format=torch.channels_last)
    return whole.index_copy_(0, entries, part)


def window(timesteps: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """Return the timesteps of the first and last step of a part of the steps, as diffusers counts them; (-1, 0) without
    such a step.

    Raises UsageError: two steps at its edge have the same timestep, as with samplers of second order.
    """
    total = len(timesteps)
    kept = [number for number in range(total) if number / total >= start and (number + 1) / total <= end]
    if not kept:
        return -1.0, 0.0
    for inside, outside in ((kept[0], kept[0] - 1), (kept[-1], kept[-1] + 1)):
        if 0 <= outside < total and timesteps[inside] == timesteps[outside]:
            raise UsageError(
                f"a control from {start:g} to {end:g} of the steps divides one step of this sampler in two; "
                "give another start and end"
            )
    return float(timesteps[kept[0]]), float(timesteps[kept[-1]])


def names_of(requests: Sequence[PreparedRequest]) -> list[str]:
    """Return the names of the nets that a batch needs."""
    return sorted({name for each in requests for name in each.controls})


def net_rows(
    name: str,
    requests: Sequence[PreparedRequest],
    packing: AnyPacking,
    conditions: dict[str, Any],
    *,
    for_all: bool,
    part_of: Callable[[Sequence[int]], AnyPacking],
    entries_of: Callable[[Tensor], tuple[Tensor, ...]],
) -> NetRows:
    """Return the rows of a net in a batch.

    Args:
        name: the net, which a request names.
        requests: the requests of the batch.
        packing: packing of their rows, which may have dummies.
        conditions: conditions of these rows.
        for_all: whether the net runs on all rows, as in recorded passes.
        part_of: returns the packing of some rows.
        entries_of: returns their entries at each level, see `NetRows`.
    """
    owners = [each for each in requests for _ in range(each.num_rows)]
    chosen = [row for row, each in enumerate(owners) if name in each.controls]
    some, rows, entries = owners[chosen[0]].controls[name].embedding, None, ()
    if not for_all and len(chosen) < packing.num_rows:
        rows = to_device(torch.tensor(chosen), some.device)
        owners, packing, entries = [owners[row] for row in chosen], part_of(chosen), entries_of(rows)
        conditions = of_rows(conditions, rows)
    own = [each.controls.get(name) for each in owners]
    images = [
        some.new_zeros(some.shape[1], *each.size) if control is None else control.embedding[0]
        for each, control in zip(owners, own, strict=True)
    ]
    facts = [_NEVER if control is None else (control.scale, control.first, control.last) for control in own]
    # Dummies have no control; padding follows all patches.
    scales, first, last = torch.tensor(facts + [_NEVER] * (packing.num_rows - len(facts)), device=some.device).unbind(1)
    embedding = packing.pack(images)
    if padding := packing.num_patches - len(embedding):
        embedding = F.pad(embedding, (0, 0) * 3 + (0, padding))
    shared = {key: conditions[key] for key in _SHARED if key in conditions}
    return NetRows(shared, embedding, scales, first, last, packing, rows, entries)


def with_residuals(conditions: dict[str, Any], results: Iterable[Sequence[Tensor]]) -> dict[str, Any]:
    """Return conditions of a U-Net with what ControlNets add to it: the results of each, see `NetRows.results`."""
    *down, middle = (sum(parts[1:], start=parts[0]) for parts in zip(*results, strict=True))
    return conditions | {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": middle}


def levels_of(net: Any) -> list[int]:
    """Return the level of each result of a ControlNet: of its first convolution, of each layer and down-sampler of its
    blocks, and of its middle.
    """
    levels = [0]
    for level, block in enumerate(net.down_blocks):
        levels += [level] * len(block.resnets) + [level + 1] * len(block.downsamplers or ())
    return [*levels, len(net.down_blocks) - 1]
