"""The bundled models on a device, and requests that differ in all respects."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.replay import replay
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.scheduling.policies import get_policy

from ..support.family_kit import denoised
from ..support.patched_models import relative_error

EXACT = 1e-4
"""Largest difference over largest magnitude, in float32. On a GPU, different batches use different algorithms for
convolutions and products, whose rounding differs by about 1e-6 in each pass, and by up to ten times as much after some
guided steps.
"""
JOINS = (0, 1, 2, 2)
BUNDLED = ("emoji-xl", "emoji-3")


@functools.cache
def loaded(name: str, device: str, dtype: str = "float32", sampler: Any = None) -> ServedModel:
    """Return a bundled model, which tests must not change."""
    return load_model(name, device, dtype, EngineOptions("plain", model=ModelOptions(sampler=sampler)))


def served(name: str, device: str, options: EngineOptions | None = None, **of_model: Any) -> ServedModel:
    """Return the same weights, served by another engine."""
    return with_engine(loaded(name, device, **of_model), options or EngineOptions())


def mixed(num_steps: Sequence[int] = (6, 2, 3, 4)) -> list[Request]:
    """Return requests of three sizes with these numbers of steps."""
    small, middle, large = (Resolution(side, side) for side in (128, 192, 256))
    return [
        Request(0, "a red apple on a blue background", small, num_steps[0], 4.0, seed=1),
        Request(1, "a hedgehog and a candle", large, num_steps[1], 1.0, seed=2),
        Request(2, "a butterfly", small, num_steps[2], 7.0, seed=3, negative_prompt="a fox"),
        Request(3, "", middle, num_steps[3], 2.0, seed=4),
    ]


def alone(model: ServedModel, requests: Sequence[Request]) -> list[Tensor]:
    """Return the final latents of each request alone, by plain diffusers' model on the same device."""
    plain = with_engine(model, EngineOptions("plain", cuda_graphs=False))
    return [denoised(plain, [request])[0] for request in requests]


def served_together(model: ServedModel, requests: Sequence[Request], max_batch_size: int = 4) -> RunResult:
    """Serve requests as they arrive, with stages in parallel with the denoise loop."""
    collector = InMemory(keep_images=True, keep_latents=True)
    engine = Engine(model, get_policy("continuous"), max_batch_size=max_batch_size, collector=collector)
    result = replay(engine, list(map(model.checked, requests)))
    assert [record.reason for record in result.records] == [None] * len(requests)
    return result


def error_of(result: RunResult, requests: Sequence[Request], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of the final latents of requests."""
    return relative_error([result.latents[request.request_id][0] for request in requests], expected)
