"""`--cache patch` on a device: exact without reuse, and close with the bundled predictor."""

from typing import Any

import numpy as np
import pytest

from patchedserve.data.models.bundled import bundled_model_path
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheMode, CacheOptions
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

from ..support.cached_models import PlaceRule
from ..support.family_kit import denoised
from ..support.patched_models import relative_error
from .cases import BUNDLED, EXACT, JOINS, alone, mixed, served, served_together


def _cached(name: str, device: str, mode: CacheMode = "patch", order: Any = "auto", **options: Any) -> ServedModel:
    cache = CacheOptions(mode, **options).with_file_of(bundled_model_path(name))
    return served(name, device, EngineOptions(order=order, cache=cache))


def _stats(model: ServedModel) -> Any:
    cache = patched_stepper(model).model.cache
    assert cache is not None
    return cache.stats


@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", BUNDLED)
def test_nothing_reused_is_exact(name: str, order: Any, device: str) -> None:
    model, requests = _cached(name, device, order=order, threshold=0.0, warmup_steps=1), mixed()
    assert relative_error(denoised(model, requests, JOINS), alone(model, requests)) <= EXACT
    assert _stats(model).skipped == 0


@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", BUNDLED)
def test_patch_reuse_equals_that_of_a_request_alone(name: str, order: Any, device: str) -> None:
    """The rule depends only on a request's step and the positions of its patches."""
    found = []
    requests = mixed((8, 3, 5, 6))
    for batches in ([requests], [[request] for request in requests]):
        model = _cached(name, device, order=order, threshold=0.1, warmup_steps=1, max_reuse=2, full_above=1)
        cache = patched_stepper(model).model.cache
        assert cache is not None
        cache.rule = PlaceRule()
        cache.uses_masks[:] = [True] * len(cache.names)
        found.append([latents for batch in batches for latents in denoised(model, batch)])
        assert _stats(model).masked > 0
    assert relative_error(*found) <= 10 * EXACT
    assert relative_error(found[0], alone(served(name, device), requests)) > 1e-2


@pytest.mark.parametrize("mode", ["patch", "image"])
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_predictor_saves_computation_and_stays_close(name: str, mode: CacheMode, device: str) -> None:
    requests = mixed((30, 30, 30, 30))
    model = _cached(name, device, mode)
    found, exact = served_together(model, requests), served_together(served(name, device), requests)
    if mode == "patch":
        assert _stats(model).saved_share > 0
    near = [psnr(found.images[number], exact.images[number]) for number in range(len(requests))]
    assert np.mean(near) >= 25.0, near


@pytest.mark.parametrize(("mode", "options"), [("interval", {}), ("accumulated", {"threshold": 0.2})])
def test_other_rules_run(mode: CacheMode, options: dict[str, Any], device: str) -> None:
    requests = mixed((12, 8, 10, 8))
    model = _cached("emoji-xl", device, mode, **options)
    error = relative_error(denoised(model, requests, JOINS), alone(model, requests))
    assert 0 < error < 1
    assert _stats(model).skipped > 0
