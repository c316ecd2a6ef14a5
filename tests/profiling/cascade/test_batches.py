"""e(b) and T(b), measured on the engine that serves."""

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.profiling.cascade.batches import MAX_STEPS, measure_batches

from ...support.family_kit import served
from ...support.tiny_models import tiny_sd


@pytest.mark.exhaustive
@pytest.mark.slow
def test_batches_alone_and_in_a_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, size, scored = served(tiny_sd()), Resolution(64, 64), []
    prepared = []
    prepare = model.prepare
    monkeypatch.setattr(model, "prepare", lambda request: (prepared.append(request), prepare(request))[1])
    times = measure_batches(model, size, 4, 2, score=lambda image: scored.append(image.size) or 0.5)
    # Four batches of four in the loop and one more of four; every image is scored.
    assert len(prepared) == len(scored) == 4 * 4 + 4
    assert {request.num_inference_steps for request in prepared} == {2}
    assert times.latency_s > 2 * times.step_s
    assert min(times.prepare_s, times.step_s, times.postprocess_s, times.throughput) > 0
    # Of many steps only the first are run; the others count as equally long.
    prepared.clear()
    long = measure_batches(model, size, 1, 10 * MAX_STEPS)
    assert {request.num_inference_steps for request in prepared} == {MAX_STEPS}
    assert len(prepared) == 12 + 4
    assert long.latency_s > 9 * MAX_STEPS * long.step_s
    assert long.throughput < 1 / (9 * MAX_STEPS * long.step_s)


@pytest.mark.exhaustive
def test_batches_starting_from_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model, size = served(tiny_sd()), Resolution(64, 64)
    prepared = []
    prepare = model.prepare
    monkeypatch.setattr(model, "prepare", lambda request: (prepared.append(request), prepare(request))[1])
    times = measure_batches(model, size, 1, 10 * MAX_STEPS, strength=0.5)
    assert {request.num_steps for request in prepared} == {MAX_STEPS}
    assert {request.edit.strength for request in prepared if request.edit is not None} == {0.5}
    assert len(prepared) == 12 + 4
    # Half of the steps, all but the first of which are as long as the measured ones.
    assert 4 * MAX_STEPS * times.step_s < times.latency_s < 8 * MAX_STEPS * times.step_s
