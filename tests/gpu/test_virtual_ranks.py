"""Ranks that share a device draw the images of one rank."""

from typing import Any, cast

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.stepper import ParallelStepper
from patchedserve.serving.parallel.virtual import VirtualRanks

from ..support.family_kit import denoised
from ..support.patched_models import relative_error
from .cases import BUNDLED, EXACT, alone, error_of, mixed, served, served_together


def _options(count: int, **settings: Any) -> EngineOptions:
    return EngineOptions("parallel", parallel=ParallelOptions(f"virtual:{count}", **settings))


@pytest.mark.parametrize("cfg_split", ["off", "on"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", BUNDLED)
def test_synchronous_ranks_equal_one(name: str, count: int, cfg_split: Any, device: str) -> None:
    model, requests = served(name, device, _options(count, mode="sync", cfg_split=cfg_split)), mixed()
    found = denoised(model, requests)
    model.close()
    assert relative_error(found, alone(model, requests)) <= EXACT


@pytest.mark.parametrize("decode", ["whole", "strips"])
def test_images_of_ranks_equal_those_of_one(decode: Any, device: str) -> None:
    model, requests = served("emoji-xl", device, _options(2, mode="sync", decode=decode)), mixed()
    result = served_together(model, requests)
    model.close()
    assert error_of(result, requests, alone(model, requests)) <= EXACT


@pytest.mark.parametrize("mode", ["displaced", "naive"])
def test_approximate_modes_equal_those_on_a_cpu(mode: Any, device: str) -> None:
    found = []
    for where in (device, "cpu"):
        model = served("emoji-xl", where, _options(2, mode=mode))
        found.append([latents.cpu() for latents in denoised(model, mixed())])
        model.close()
    assert relative_error(*found) <= 10 * EXACT


@pytest.mark.parametrize("mode", ["sync", "displaced"])
@pytest.mark.parametrize("name", BUNDLED)
def test_replayed_strips_equal_eager_ones(name: str, mode: Any, cuda: str) -> None:
    """Requests of one size leave one by one, and the last ones recur."""
    sides = (256, 256, 128)
    requests = [
        Request(n, "a hedgehog and a candle", Resolution(side, side), 12, 4.0, seed=n) for n, side in enumerate(sides)
    ]
    parallel = ParallelOptions("virtual:2", mode=mode, cfg_split="off")
    eager, recorded = (
        served(name, cuda, EngineOptions("parallel", cuda_graphs=is_on, parallel=parallel)) for is_on in (False, True)
    )
    expected = denoised(eager, requests)
    for _ in range(2):
        assert relative_error(denoised(recorded, requests), expected) <= EXACT
    stepper = cast(ParallelStepper, recorded.stepper)
    assert stepper.recording_failure is None
    for model in cast(VirtualRanks, stepper.group)._models:
        assert model.captured is not None
        assert model.captured._recorded
    eager.close()
    recorded.close()
