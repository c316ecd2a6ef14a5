"""Tiny models with the patch cache, their steps, and reuse rules with predictable decisions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.cache.patch_batch import CachedRequest
from patchedserve.serving.cache.patch_cache import PatchCache
from patchedserve.serving.cache.rules import Booleans, PatchView, ReuseRule
from patchedserve.serving.patched.patched_model import PatchedModel

from .imposed_reuse import FixedShare
from .patched_cases import model_of
from .patched_models import Row, stack_conditions

SIZES = [(16, 16), (16, 16), (24, 16), (24, 24), (32, 32)]
OPTIONS = CacheOptions("patch", threshold=0.0, patch_size=8, warmup_steps=1, max_reuse=3, full_above=1)
STEPS = 20


class PlaceRule(ReuseRule):
    """Reuses a patch depending only on its request's step and its own place, never on its neighbours.

    It requests input changes without using them, so that stores keep inputs, too.
    """

    needs_change = True

    def may_reuse(self, view: PatchView) -> Booleans:
        place = np.arange(len(view.request)) - np.searchsorted(view.request, view.request)
        mixed = (view.block * 7 + view.steps_done * 3 + place * 5 + view.pixels // 1024) * 2654435761 % 2**32
        return mixed / 2**32 < 0.5


class RequestRule(ReuseRule):
    """Reuses all patches of some requests, and at every fourth step of the first one also patches by `PlaceRule`."""

    needs_change = True

    def __init__(self) -> None:
        self.by_place = PlaceRule()

    def may_reuse(self, view: PatchView) -> Booleans:
        is_reused = (view.steps_done * 2 + view.request + view.pixels // 4096) % 3 != 0
        return self.by_place.may_reuse(view) if view.steps_done[0] % 4 == 3 else is_reused


class Switch(ReuseRule):
    """Reuses a random share once it is switched on."""

    def __init__(self, share: float) -> None:
        self.imposed, self.is_on = FixedShare(share, seed=3), False

    def may_reuse(self, view: PatchView) -> Booleans:
        return self.imposed.may_reuse(view) if self.is_on else np.zeros(len(view.request), bool)


def cached_model(
    name: str, order: Any, rule: Any, options: CacheOptions = OPTIONS
) -> tuple[Any, PatchedModel, PatchCache]:
    """Return a small model with random weights, which tests must not change, its patched version, and the cache, all of
    whose blocks store what masks need.
    """
    model = model_of(name)
    patched = PatchedModel(model, order=order, patch_size=8 if order == "patch" else None, strategy="regroup")
    cache = patched.use_cache(options, rule)
    # Otherwise the first step that needs a mask would be computed in full.
    cache.uses_masks[:] = [True] * len(cache.names)
    return model, patched, cache


def requests_of(rows: Sequence[Row], keys: Sequence[int] | None = None) -> list[CachedRequest]:
    """Return one cached request for each row."""
    keys = range(len(rows)) if keys is None else keys
    return [CachedRequest(key, 1, STEPS, 64 * row.size[0] * row.size[1]) for key, row in zip(keys, rows, strict=True)]


@torch.inference_mode()
def step(patched: PatchedModel, rows: Sequence[Row], steps_done: Sequence[int]) -> list[Tensor]:
    packing = patched.context.packing
    assert packing is not None
    timesteps = torch.tensor([row.timestep for row in rows])
    patches = packing.pack([row.latents for row in rows])
    out = patched(patches, timesteps, steps_done=steps_done, **stack_conditions(rows))
    return [packing.unpack(out, number) for number in range(len(rows))]


def begin(patched: PatchedModel, rows: Sequence[Row], keys: Sequence[int] | None = None) -> None:
    patched.begin(patched.pack([row.size for row in rows]), requests=requests_of(rows, keys))
