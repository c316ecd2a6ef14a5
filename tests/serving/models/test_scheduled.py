"""`--cache schedule` on every engine, against diffusers' own pipelines with a model that forecasts skipped steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.edits import EditSpec, Reference
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.block_facts import ProfiledModel
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.models.build import as_plain, build_model, with_engine, without_cache
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.training.cache.schedule import CacheSchedule, StepPlan, shares

from ...support.edits import edit_request, image_of
from ...support.engine_runs import serve
from ...support.joining import run_joining
from ...support.plain import plain_latents, short_texts
from ...support.tape import Tape
from ...support.template_records import TEMPLATE, with_records
from ...support.tiny_families import tiny_flux, tiny_klein, tiny_pixart, tiny_z_image
from ...support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

STEPS = {20: (0, 1, 4, 9, 13), 6: (0, 2)}
SIZES = (Resolution(64, 64), Resolution(96, 64), Resolution(32, 64))


def scheduled(pipe: Any, folder: Path, **options: Any) -> ServedModel:
    file = folder / "schedule.json"
    plans = {number: StepPlan(number, steps) for number, steps in STEPS.items()}
    CacheSchedule(ProfiledModel("tiny", "", type(pipe.scheduler).__name__), plans).save(file)
    cache = CacheOptions("schedule", schedule=file)
    engine = EngineOptions(cache=cache, **options)
    return build_model(pipe, name="tiny", defaults=ModelDefaults(**short_texts(pipe)), options=engine)


def requests_of(**options: Any) -> list[Request]:
    return [
        Request(index, f"prompt {index}", SIZES[index % 3], (20, 6, 20, 20)[index], 3.0 * (index != 2), seed=index)
        for index in range(4)
    ]


@contextmanager
def forecasting(pipe: Any, plan: StepPlan) -> Iterator[None]:
    """Make the model of a pipeline extrapolate its output at skipped steps from the last two computed ones."""
    model = denoiser_of(pipe)
    forward, calls, said = model.forward, iter(range(plan.num_steps)), dict[int, torch.Tensor]()

    def run(*arguments: Any, **named: Any) -> Any:
        step = next(calls)
        if step in plan.steps:
            output = forward(*arguments, **named)
            said[step] = output[0]
            return output
        last, *before = sorted(said, reverse=True)[:2]
        slope = said[last] - said[before[0]] if before else torch.zeros_like(said[last])
        share = shares(last - before[0], step - last + 1)[-1] if before else 0.0
        return (said[last] + share * slope,)

    model.forward = run
    try:
        yield
    finally:
        model.forward = forward


@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3, tiny_flux, tiny_klein], ids=lambda make: make.__name__)
def test_images_equal_diffusers_with_forecasts(make: Any, tmp_path: Path) -> None:
    pipe = make()
    requests = requests_of()
    if make is tiny_klein:
        requests[1:3] = [replace(each, references=(Reference(image_of(SIZES[1])),)) for each in requests[1:3]]
    expected = {}
    for request in requests:
        plan = StepPlan(request.num_inference_steps, STEPS[request.num_inference_steps])
        with forecasting(pipe, plan):
            expected[request.request_id] = plain_latents(pipe, request, **short_texts(pipe))
    patched = scheduled(pipe, tmp_path)
    engines = {
        "patched": patched,
        "plain": with_engine(patched, EngineOptions("plain", cache=patched.options.cache)),
    }
    for name, model in engines.items():
        latents, failures = run_joining(model, requests)
        assert not failures, name
        for request_id, own in expected.items():
            largest = float(own.abs().max())
            assert float((latents[request_id] - own).abs().max()) <= 1e-3 * largest, name


def test_request_without_cache_is_exact_beside_others(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    model = scheduled(pipe, tmp_path)
    exact = Request(9, "exact", SIZES[0], 20, 3.0, seed=5, cache=False)
    latents, failures = run_joining(model, [requests_of()[0], exact, requests_of()[2]])
    assert not failures
    expected = plain_latents(pipe, exact)
    assert float((latents[9] - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def test_ranks_that_share_images_skip_steps(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    patched = scheduled(pipe, tmp_path)
    ranks = EngineOptions("parallel", cache=patched.options.cache, parallel=ParallelOptions("virtual:2"))
    together, alone = run_joining(with_engine(patched, ranks), requests_of())[0], run_joining(patched, requests_of())[0]
    for request_id, own in alone.items():
        assert float((together[request_id] - own).abs().max()) <= 1e-3 * float(own.abs().max())


@pytest.mark.parametrize("make", [tiny_pixart, tiny_z_image], ids=lambda make: make.__name__)
def test_families_without_block_cache_skip_steps(make: Any, tmp_path: Path) -> None:
    pipe = make()
    model = scheduled(pipe, tmp_path)
    latents, failures = run_joining(model, requests_of())
    assert not failures
    assert all(bool(each.isfinite().all()) for each in latents.values())


def test_served_request_takes_one_iteration_per_computed_step(tmp_path: Path) -> None:
    model = scheduled(tiny_sdxl(), tmp_path)
    request = requests_of()[0]
    collector = InMemory()
    [record] = serve(model, [request], collector=collector).records
    assert record.status == "completed"
    assert record.steps_reused == 15
    assert len(collector.steps) == 5
    stats = model.cache_stats
    assert stats is not None
    assert stats.saved_share == 15 / 20
    model.clear_cache()
    assert model.cache_stats is not None
    assert model.cache_stats.patches == 0


def test_edit_skips_steps_and_keeps_pixels_outside_its_mask(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    model = scheduled(pipe, tmp_path)
    mask = np.zeros((64, 64), bool)
    mask[:, :32] = True
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for strength, computed in ((1.0, 5), (0.5, 3)):
        request = Request(0, "a hat", SIZES[0], 20, 3.0, edit=EditSpec(image, mask, strength))
        assert model.checked(request).num_computed == model.prepare(request).state.num_steps == computed
        [latents] = run_joining(model, [request])[0].values()
        known = model.prepare(request).known_area
        assert known is not None
        torch.testing.assert_close(latents[:, :, 4:], known.clean[0, :, :, 4:])
        assert bool(latents.isfinite().all())


def test_edits_with_a_record_compute_every_step_beside_skipping_requests(tmp_path: Path) -> None:
    pipe, requests = tiny_sdxl(), [edit_request(number, SIZES[0], "line", template=TEMPLATE) for number in range(2)]
    exact = with_records(build_model(pipe, name="tiny"), TemplateStore(tmp_path / "exact"), requests)
    model = with_records(scheduled(pipe, tmp_path), TemplateStore(tmp_path / "records"), requests)
    drawing = requests_of()[3]
    expected, found = run_joining(exact, requests)[0], run_joining(model, [*requests, drawing])[0]
    for request in requests:
        own = expected[request.request_id]
        assert model.prepare(request).steps_reused == 0
        assert float((found[request.request_id] - own).abs().max()) <= 1e-3 * float(own.abs().max())
    assert model.prepare(drawing).steps_reused == 15
    # A generation that records its trajectory computes all of its steps, too.
    model.reuse.start_trajectory(drawing, tmp_path / "steps")
    assert model.checked(drawing).num_computed == model.prepare(drawing).state.num_steps == 20


def test_replayed_passes_are_those_of_computed_steps(tmp_path: Path) -> None:
    """A tape stands in for CUDA graphs."""
    pipe = tiny_sdxl()
    eager, recorded = scheduled(pipe, tmp_path), scheduled(pipe, tmp_path)
    recorder = Tape()
    assert isinstance(recorded.stepper, PatchedStepper)
    recorded.stepper.model.use_graphs(recorder, patience=1)
    together = [[Request(n, f"a cat {n}", size, 20, 3.0, seed=n) for n, size in enumerate(SIZES)]] * 2
    for requests in together:
        expected, found = (denoised_together(model, requests) for model in (eager, recorded))
        for own, other in zip(expected, found, strict=True):
            assert float((own - other).abs().max()) <= 1e-4 * float(own.abs().max())
    assert recorder.recorded
    assert recorder.played >= 5, "whole batches of the five computed steps"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_compiled_blocks_run_the_computed_steps(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    requests = requests_of()
    expected = run_joining(scheduled(pipe, tmp_path), requests)[0]
    found, failures = run_joining(scheduled(pipe, tmp_path, compile=True), requests)
    assert not failures
    for request_id, own in expected.items():
        assert float((found[request_id] - own).abs().max()) <= 1e-3 * float(own.abs().max())


def test_adapters_of_requests_apply_with_skipped_steps(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    pipe = tiny_sdxl()
    lora = save_lora(tmp_path / "pixel.safetensors", pipe, "unet")
    folder = save_tiny(tmp_path / "model", pipe)
    file = tmp_path / "schedule.json"
    plans = {number: StepPlan(number, steps) for number, steps in STEPS.items()}
    CacheSchedule(ProfiledModel(str(folder), "", "EulerDiscreteScheduler"), plans).save(file)
    options = EngineOptions(
        cache=CacheOptions("schedule", schedule=file), model=ModelOptions(adapter=[f"pixel={lora}"])
    )
    model = load_model(str(folder), "cpu", "float32", options)
    first, second = requests_of()[0], requests_of()[2]
    named = replace(first, adapters=(("pixel", 1.0),), request_id=7)
    together = run_joining(model, [first, named, second])[0]
    for request in (first, named, second):
        [alone] = run_joining(model, [request])[0].values()
        own = together[request.request_id]
        assert float((own - alone).abs().max()) <= 1e-3 * float(alone.abs().max())
    assert float((together[0] - together[7]).abs().max()) > 1e-2 * float(together[0].abs().max())


def denoised_together(model: ServedModel, requests: Sequence[Request]) -> list[torch.Tensor]:
    active = [model.prepare(request) for request in requests]
    while not active[0].state.is_finished:
        assert not model.stepper.step(active)
    return [prepared.latents for prepared in active]


def test_the_baseline_computes_every_step(tmp_path: Path) -> None:
    model = scheduled(tiny_sdxl(), tmp_path)
    plain = with_engine(model, EngineOptions("plain", cache=model.options.cache))
    request = requests_of()[0]
    assert as_plain(plain).prepare(request).state.num_steps == 20
    assert without_cache(model).prepare(request).state.num_steps == 20


def test_incompatible_options_are_refused(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    file = tmp_path / "schedule.json"
    CacheSchedule(ProfiledModel("other", "", "EulerDiscreteScheduler"), {20: StepPlan(20, (0, 1))}).save(file)
    with pytest.raises(
        UsageError, match="is for the model other, but tiny is served; run psctl train-predictor schedule"
    ):
        build_model(pipe, name="tiny", options=EngineOptions(cache=CacheOptions("schedule", schedule=file)))
    with pytest.raises(UsageError, match="--cache schedule needs a list of steps"):
        build_model(pipe, name="tiny", options=EngineOptions(cache=CacheOptions("schedule")))
    with pytest.raises(UsageError, match="--cache-schedule belongs to --cache schedule, not patch"):
        CacheOptions("patch", schedule=file)
    with pytest.raises(UsageError, match="--cache-threshold belongs to"):
        CacheOptions("schedule", threshold=0.1)
    # Options that refuse the other caches accept a schedule.
    EngineOptions("plain", cache=CacheOptions("schedule"))
    EngineOptions(compile=True, cache=CacheOptions("schedule"))
    EngineOptions(cuda_graphs=True, cache=CacheOptions("schedule"))
