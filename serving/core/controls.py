"""ControlNets beside a U-Net (Zhang et al. 2023, section 3.2): what they add to it, for each row of a batch.

A net is a copy of the U-Net's first half that also sees an image. Its results are added to those that the first half
passes on to the second. In a batch, a net runs once for all rows if one of them names it; what it adds to the others is
multiplied by 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.errors import UsageError
from ..layout.packing import Packing, WholeImages
from .prepared import PreparedRequest

Nets = Mapping[str, Any]
"""ControlNets by name; `controlnet_cond_embedding`, which sees the images, is left to the prepare stage."""
NO_NETS: Nets = {}
ControlRows = dict[str, dict[str, Tensor]]
"""For each net that a batch needs: `embedding` of the images, packed as latents; `scales`, `first` and `last`, (rows,):
the factor of each row, and the timesteps between which it holds, first >= last.
"""
_SHARED = ("encoder_hidden_states", "added_cond_kwargs")
"""Conditions that nets have in common with their U-Net."""


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


def control_rows(
    requests: Sequence[PreparedRequest], packing: Packing | WholeImages, dtype: torch.dtype
) -> ControlRows:
    """Return the controls of the rows of a batch; empty if no request has any."""
    found: ControlRows = {}
    for name in sorted({name for each in requests for name in each.controls}):
        some = next(each.controls[name].embedding for each in requests if name in each.controls)
        images, facts = [], []
        for each in requests:
            own = each.controls.get(name)
            image = some.new_zeros(some.shape[1], *each.size) if own is None else own.embedding[0]
            images += [image] * each.num_rows
            facts += [(0.0, -1.0, 0.0) if own is None else (own.scale, own.first, own.last)] * each.num_rows
        # Dummies have no control; padding follows all patches.
        facts += [(0.0, -1.0, 0.0)] * (packing.num_rows - len(facts))
        embedding = packing.pack(images).to(dtype)
        padding = packing.num_patches - len(embedding)
        scales, first, last = torch.tensor(facts, device=some.device).unbind(1)
        found[name] = {
            "embedding": F.pad(embedding, (0, 0) * 3 + (0, padding)) if padding else embedding,
            "scales": scales,
            "first": first,
            "last": last,
        }
    return found


def with_residuals(
    nets: Nets,
    latents: Tensor,
    timestep: Tensor,
    conditions: dict[str, Any],
    controls: ControlRows,
    *,
    timesteps: Tensor,
    spread: Callable[[Tensor, int], Tensor],
    begin: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return conditions of a U-Net with what ControlNets add to it.

    Args:
        nets: the nets.
        latents, timestep, conditions: arguments of the U-Net.
        controls: what the nets see.
        timesteps: (rows,) timestep of each row.
        spread: returns the values of all entries of tensors at a level of the U-Net, for values (rows,) of its rows.
        begin: called before each net.
    """
    if not controls:
        return conditions
    shared, sums = {name: conditions[name] for name in _SHARED if name in conditions}, list[Tensor]()
    for name, rows in controls.items():
        net = nets[name]
        begin()
        down, middle = net(latents, timestep, controlnet_cond=rows["embedding"], return_dict=False, **shared)
        is_on = (timesteps <= rows["first"]) & (timesteps >= rows["last"])
        scales = (rows["scales"] * is_on).to(latents.dtype)
        of_level = {level: spread(scales, level)[:, None, None, None] for level in range(len(net.down_blocks))}
        found = [each * of_level[level] for each, level in zip([*down, middle], levels_of(net), strict=True)]
        sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else found
    return conditions | {
        "down_block_additional_residuals": tuple(sums[:-1]),
        "mid_block_additional_residual": sums[-1],
    }


def levels_of(net: Any) -> list[int]:
    """Return the level of each result of a ControlNet: of its first convolution, of each layer and down-sampler of its
    blocks, and of its middle.
    """
    levels = [0]
    for level, block in enumerate(net.down_blocks):
        levels += [level] * len(block.resnets) + [level + 1] * len(block.downsamplers or ())
    return [*levels, len(net.down_blocks) - 1]
