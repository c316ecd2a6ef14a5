"""Ranks that share a device draw the images of one rank."""

from typing import Any

import pytest

from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.options import ParallelOptions

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
