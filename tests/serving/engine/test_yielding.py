"""Lines of batch files yield to waiting requests, and their images are the same as when they run alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.build import build_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import get_policy

from ...support.plain import plain_latents
from ...support.tiny_models import OWN_SCHEDULERS, SAMPLERS, largest_error, tiny_sdxl

SMALL, OTHER = Resolution(32, 32), Resolution(48, 32)
NUM_STEPS = 12


@pytest.mark.product(most=1)
@pytest.mark.parametrize("sampler", ["euler-ancestral", "dpm++", "unipc", "heun"])
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_yielding_requests_wait_between_steps_and_images_are_equal(
    engine: Any, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_sdxl()
    pipe.scheduler = (SAMPLERS | OWN_SCHEDULERS)[sampler](pipe.scheduler.config)
    lines = [Request(number, f"cat {number}", OTHER, NUM_STEPS, 3.0, seed=number, yields=True) for number in range(3)]
    others = [Request(9, "a dog", SMALL, 3, 3.0, seed=9), Request(10, "a hat", SMALL, 2, 3.0, seed=10)]
    kept = InMemory(keep_latents=True)
    model = build_model(pipe, name="tiny", options=EngineOptions(engine, stages="inline"))
    serve = Engine(model, get_policy("continuous"), max_batch_size=4, collector=kept)
    step, coming = model.stepper.step, {3: others[0], 9: others[1]}

    def step_and_more_come(active: Sequence[PreparedRequest]) -> dict[int, str]:
        if (other := coming.pop(serve._scheduler.num_steps, None)) is not None:
            serve.submit(other)
            if not coming:
                serve.close()
        return step(active)

    monkeypatch.setattr(model.stepper, "step", step_and_more_come)
    for line in lines:
        serve.submit(line)
    serve.run()
    assert [record.status for record in kept.records] == ["completed"] * 5
    # Both overtook all lines, and while they were drawn, only one line was beside them.
    assert [record.request_id for record in kept.records][:2] == [9, 10]
    beside = [row.resolutions.get(str(OTHER), 0) for row in kept.steps if str(SMALL) in row.resolutions]
    assert beside
    assert max(beside) == 1
    assert max(row.resolutions.get(str(OTHER), 0) for row in kept.steps) == 3
    requests = [replace(each, yields=False) for each in (*lines, *others)]
    expected = [plain_latents(pipe, request) for request in requests]
    assert largest_error([kept.latents[request.request_id][0] for request in requests], expected) <= 1e-3
