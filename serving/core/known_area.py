"""Known areas of edits: latents outside a mask follow the noised image step by step, as in diffusers' inpainting."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..layout.packing import Packing, WholeImages
from .prepared import KnownArea, PreparedRequest


class KnownAreas:
    """Known areas of all requests of a batch, packed. Requests that are no edits may change everywhere.

    Created again whenever a request joins or leaves; each call of `restored` follows a step of all requests.
    """

    def __init__(self, requests: Sequence[PreparedRequest], packing: Packing | WholeImages) -> None:
        areas = [each.known_area or KnownArea.nothing(each.latents, each.state.num_steps) for each in requests]
        device = requests[0].latents.device
        self._weights = packing.pack([area.weights[0] for area in areas])
        self._areas, self._packing = areas, packing
        self._next = [each.state.steps_done for each in requests]
        self._has_trajectories = any(area.trajectory is not None for area in areas)
        self._clean = packing.pack([area.clean[0] for area in areas])
        self._noise = packing.pack([area.noise[0] for area in areas])
        self._levels = torch.cat([area.levels for area in areas]).to(device)
        ends = accumulate(len(area.levels) for area in areas)
        rows = [
            end - len(area.levels) + each.state.steps_done
            for end, area, each in zip(ends, areas, requests, strict=True)
        ]
        self._rows = torch.tensor(rows, device=device)[packing.row_index]

    def restored(self, latents: Tensor) -> Tensor:
        """Return the latents (P, channels, side, side) after a step, with the known areas put back."""
        self._rows += 1
        if self._has_trajectories:
            self._next = [step + 1 for step in self._next]
            self._clean = self._packing.pack([
                (area.clean if area.trajectory is None else area.trajectory[step : step + 1])[0]
                for area, step in zip(self._areas, self._next, strict=True)
            ])  # fmt: skip
        of_clean, of_noise = self._levels.index_select(0, self._rows)[:, :, None, None, None].unbind(1)
        # Exactly the one or the other where the weight is 0 or 1.
        return torch.lerp(self._clean * of_clean + self._noise * of_noise, latents, self._weights)
