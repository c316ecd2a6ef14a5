"""serving/samplers/batched.py against `scheduler.step` of diffusers, one scheduler per request."""

import re
from collections.abc import Sequence
from typing import Any

import diffusers
import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.serving.samplers.batched import BatchedSampler, SamplerBatch
from patchedserve.serving.samplers.rules import SUPPORTED_SCHEDULERS
from patchedserve.serving.samplers.single import PerRequestSampler

from ...support.docs_pages import REPOSITORY
from ...support.sampler_cases import (
    CASES,
    CHANNELS,
    DDIM,
    ONE_OF_EACH,
    PATCH,
    REQUESTS,
    SAMPLE,
    SIGMA_MIN,
    TOLERANCE,
    ZERO_SNR,
    ServedRequest,
    advance,
    cut,
    make_scheduler,
    pack,
    serve,
    serve_to_the_end,
    start,
)


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_scheduler_step(case: str) -> None:
    # diffusers steps from the batch's own latents, so that each step is compared by itself.
    plain = PerRequestSampler(make_scheduler(case), pass_step_kwargs=True)
    steps_seen = dict.fromkeys(range(len(REQUESTS)), 0)
    expected: dict[int, tuple[torch.Tensor, float]] = {}

    def compare(served: Sequence[ServedRequest]) -> None:
        for one in served:
            latents, scale = expected[one.index]
            assert float((one.latents - latents).abs().max()) <= TOLERANCE * scale, (one.index, one.state.steps_done)

    latest: list[ServedRequest] = []
    for batch, served in serve(case, dict.fromkeys(range(len(REQUESTS)), 0)):
        compare(latest)
        references, latents = [one.reference for one in served], [one.latents for one in served]
        timesteps = batch.timesteps()
        assert torch.equal(timesteps, plain.timesteps(references))
        assert timesteps.dtype == references[0].timesteps.dtype
        inputs = plain.model_input(references, latents)
        torch.testing.assert_close(batch.model_input(), torch.cat([cut(one) for one in inputs]), rtol=TOLERANCE, atol=0)
        for one in served:
            assert one.state.steps_done == one.reference.steps_done == steps_seen[one.index]
            if case == "unipc-beta":
                # The first steps are so short (14.6 to 14.5) that diffusers' weights in float32 are off by 1e-5.
                one.reference.scheduler.sigmas = one.reference.scheduler.sigmas.double()
            updated = plain.update(one.reference, one.predictions[one.reference.steps_done], one.latents)
            # A step that ends far below its start (Euler at zero SNR: 4096 to 15) is a difference of large numbers.
            expected[one.index] = updated, float(torch.stack([updated, one.latents]).abs().max())
            steps_seen[one.index] += 1
        latest = list(served)
    compare(latest)
    assert list(steps_seen.values()) == [steps for steps, _, _ in REQUESTS]


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_requests_that_join_mid_way_equal_those_alone(case: str) -> None:
    # A request that joins brings NaN as its history; the others bring the history of the previous batch.
    arrivals = {0: 0, 1: 4, 2: 2, 3: 0, 4: 7, 5: 1}
    together = serve_to_the_end(case, arrivals)
    for index in arrivals:
        alone = serve_to_the_end(case, {index: 0})[index]
        assert together[index].state.is_finished
        torch.testing.assert_close(together[index].latents, alone.latents, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", ["euler", "ancestral", "dpm", "unipc", "lcm", "tcd", "flow-dynamic"])
def test_full_run_equals_diffusers(case: str) -> None:
    plain = PerRequestSampler(make_scheduler(case), pass_step_kwargs=True)
    found = serve_to_the_end(case, dict.fromkeys(range(len(REQUESTS)), 0))
    for index, one in found.items():
        latents = start(case, index).latents
        for prediction in one.predictions:
            plain.model_input([one.reference], [latents])
            latents = plain.update(one.reference, prediction, latents)
        # The errors of up to 30 steps add up.
        assert float((one.latents - latents).abs().max()) <= 5 * TOLERANCE * float(latents.abs().max())


@pytest.mark.parametrize("case", [case for case in CASES if "clip" not in case])
def test_predicted_clean_latents_equal_diffusers(case: str) -> None:
    sampler = BatchedSampler(make_scheduler(case), pass_step_kwargs=True)
    served = [start(case, 0), start(case, 2)]
    batch, of_first = pack(sampler, served), served[0].num_patches
    for _ in range(REQUESTS[0][0] - 1):
        expected = [_clean_latents_of_diffusers(one) for one in served]
        advance(batch, served)
        assert batch.last is not None
        latents, output = batch.last
        for number, (one, x0) in enumerate(zip(served, expected, strict=True)):
            own = slice(of_first) if number == 0 else slice(of_first, None)
            of_latents, of_output = sampler.x0_factors(one.state)
            found = latents[own] * of_latents + output[own] * of_output
            tolerance = 1e-5 * float(torch.stack([found.abs().max(), latents[own].abs().max()]).max())
            torch.testing.assert_close(found, cut(x0), rtol=1e-4, atol=tolerance)


def _clean_latents_of_diffusers(one: ServedRequest) -> Any:
    """Take the next step of diffusers' own scheduler and return its prediction of the clean latents."""
    state = one.reference
    done, scheduler = state.steps_done, state.scheduler
    prediction, timestep = one.predictions[done], state.timesteps[done]
    if hasattr(scheduler, "scale_model_input"):
        scheduler.scale_model_input(one.latents, timestep)
    result = scheduler.step(prediction, timestep, one.latents, **state.step_kwargs)
    state.steps_done += 1
    if isinstance(scheduler, diffusers.DPMSolverMultistepScheduler | diffusers.UniPCMultistepScheduler):
        return scheduler.model_outputs[-1]
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        assert scheduler.sigmas is not None
        return one.latents - scheduler.sigmas[done] * prediction
    if isinstance(scheduler, diffusers.LCMScheduler | diffusers.TCDScheduler):
        # Neither returns it; for a single timestep, DDIM's prediction is the same.
        ddim: Any = diffusers.DDIMScheduler.from_config(scheduler.config, clip_sample=False, thresholding=False)
        ddim.set_timesteps(state.num_steps)
        return ddim.step(prediction, timestep, one.latents).pred_original_sample
    return result.pred_original_sample


def test_updates_use_the_fewest_terms() -> None:
    terms = {case: BatchedSampler(make_scheduler(case), pass_step_kwargs=True).terms for case in CASES}
    assert terms["flow"] == ("output",)
    assert terms["euler"] == ("scale", "output")
    assert terms["euler-v"] == ("scale", "sample", "output")
    assert terms["ddim"] == terms["dpm-first-order"] == ("sample", "output")
    assert terms["ancestral"] == ("scale", "output", "noise")


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_memory_format_is_preserved_and_inputs_are_not_modified(case: str) -> None:
    served = [start(case, 0), start(case, 2)]
    batch = pack(BatchedSampler(make_scheduler(case), pass_step_kwargs=True), served)
    before = batch.latents = batch.latents.to(memory_format=torch.channels_last)
    model_input, copy = batch.model_input(), before.clone()
    assert (model_input is before) == ("euler" not in case and "ancestral" not in case)
    for dtype in (torch.bfloat16, torch.float64):
        # Predictions and noise come in another memory format.
        prediction, noise = torch.ones(before.shape, dtype=dtype), torch.ones(before.shape, dtype=dtype)
        batch.step(prediction, lambda noise=noise: noise)
        for tensor in (model_input, batch.latents, batch.history):
            assert tensor is None or tensor.dtype == torch.float32
            assert tensor is None or tensor.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(before, copy)


def test_table_is_computed_once_per_request() -> None:
    scheduler = make_scheduler("dpm")
    sampler = BatchedSampler(scheduler, pass_step_kwargs=True)
    state = start("dpm", 0).state
    table = sampler.table(state)
    assert table.shape == (14, len(sampler.terms))
    assert table.dtype == torch.float32
    assert sampler.table(state) is table
    assert sampler.table(start("dpm", 0).state) is not table
    assert scheduler.num_inference_steps is None


def test_finished_request_is_an_error_and_changes_nothing() -> None:
    served = [start("dpm", 0), start("dpm", 3)]
    batch = pack(BatchedSampler(make_scheduler("dpm"), pass_step_kwargs=True), served)
    for _ in range(2):
        advance(batch, served)
    latents, history = batch.latents, batch.history
    for call in (batch.timesteps, lambda: batch.step(latents)):
        with pytest.raises(RuntimeError, match="finished"):
            call()
    assert batch.latents is latents
    assert batch.history is history
    assert [one.state.steps_done for one in served] == [2, 2]


def test_lost_history_is_an_error() -> None:
    served = [start("dpm", 0)]
    sampler = BatchedSampler(make_scheduler("dpm"), pass_step_kwargs=True)
    first = SamplerBatch(sampler, [served[0].state], cut(served[0].latents), torch.zeros(2, dtype=torch.int64))
    advance(first, served)
    with pytest.raises(ValueError, match="history"):
        SamplerBatch(sampler, [served[0].state], first.latents, torch.zeros(2, dtype=torch.int64))


def test_docs_name_the_batched_schedulers() -> None:
    page = (REPOSITORY / "docs/patch-engine.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| batched", page, re.MULTILINE) == list(SUPPORTED_SCHEDULERS)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "class": ("HeunDiscreteScheduler", {}, "HeunDiscreteScheduler"),
    "subclass": ("DDIMParallelScheduler", {}, "DDIMParallelScheduler"),
    "ddim-thresholding": ("DDIMScheduler", {"thresholding": True}, "thresholding=True"),
    "euler-original-sample": ("EulerDiscreteScheduler", {"prediction_type": "original_sample"}, "original_sample"),
    "ancestral-sample": ("EulerAncestralDiscreteScheduler", SAMPLE, "prediction_type='sample'"),
    "dpm-thresholding": ("DPMSolverMultistepScheduler", {"thresholding": True}, "thresholding=True"),
    "dpm-third-order": ("DPMSolverMultistepScheduler", {"solver_order": 3}, "solver_order=3"),
    "dpm-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, "'sde-dpmsolver++'"),
    "dpm-noise": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver", **SIGMA_MIN},
        "algorithm_type='dpmsolver'",
    ),
    "dpm-learned": ("DPMSolverMultistepScheduler", {"variance_type": "learned"}, "variance_type='learned'"),
    "unipc-third-order": ("UniPCMultistepScheduler", {"solver_order": 3}, "solver_order=3"),
    "unipc-noise": ("UniPCMultistepScheduler", {"predict_x0": False}, "predict_x0=False"),
    "lcm-thresholding": ("LCMScheduler", {"thresholding": True}, "thresholding=True"),
    "flow-stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "stochastic_sampling=True"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_unsupported_schedulers_are_refused(case: str) -> None:
    name, options, given = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        BatchedSampler(getattr(diffusers, name)(**options), pass_step_kwargs=True)
    message = str(caught.value)
    assert name in message
    assert given in message
    assert all(supported in message for supported in SUPPORTED_SCHEDULERS)
    assert "\n" not in message


def test_ancestral_without_the_request_s_generator_is_refused() -> None:
    with pytest.raises(UsageError, match="no generator"):
        BatchedSampler(make_scheduler("ancestral"), pass_step_kwargs=False)
    BatchedSampler(make_scheduler("flow"), pass_step_kwargs=False)


def test_schedule_without_finite_update_is_named() -> None:
    # Without any signal in x, epsilon does not determine x0, and diffusers divides by zero.
    scheduler = diffusers.DDIMScheduler(**DDIM, **ZERO_SNR)
    state = PerRequestSampler(scheduler, pass_step_kwargs=True).start(5, device=torch.device("cpu"))
    with pytest.raises(UsageError, match="DDIMScheduler with 5 steps has no finite update"):
        BatchedSampler(scheduler, pass_step_kwargs=True).table(state)


def test_ancestral_stays_finite_where_float32_does_not() -> None:
    scheduler = diffusers.EulerAncestralDiscreteScheduler(beta_schedule="squaredcos_cap_v2")
    sampler = PerRequestSampler(scheduler, pass_step_kwargs=True)
    state, reference = (sampler.start(4, device=torch.device("cpu")) for _ in range(2))
    latents = torch.ones(1, CHANNELS, PATCH, PATCH) * state.scheduler.init_noise_sigma
    sampler.model_input([reference], [latents])
    assert sampler.update(reference, torch.ones_like(latents), latents).isnan().all()
    batch = SamplerBatch(BatchedSampler(scheduler, pass_step_kwargs=True), [state], latents, torch.tensor([0]))
    batch.step(torch.ones_like(latents), lambda: torch.ones_like(latents))
    assert batch.latents.isfinite().all()
