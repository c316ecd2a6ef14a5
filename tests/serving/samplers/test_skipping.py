"""serving/samplers/skipping.py: one folded update equals a sampler's single steps with forecast outputs."""

import diffusers
import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.serving.samplers.batched import BatchedSampler, SamplerBatch
from patchedserve.serving.samplers.choice import choose_sampler
from patchedserve.serving.samplers.single import PerRequestSampler, SamplerState
from patchedserve.serving.samplers.skipping import SkippingSampler
from patchedserve.training.cache.schedule import StepPlan

from ...support.sampler_cases import make_scheduler

NUM_STEPS = 12
PLANS = [(0,), (0, 3), (0, 1, 2, 5, 9), (0, 4, 11), tuple(range(NUM_STEPS))]
LINEAR = ["ddim", "ddim-v", "euler", "euler-karras", "euler-v", "dpm", "dpm-heun", "unipc", "tcd", "flow-dynamic"]
SHAPE = (1, 4, 4, 4)


def start_state(case: str, plan: StepPlan | None = None) -> SamplerState:
    plain = PerRequestSampler(make_scheduler(case), pass_step_kwargs=True)
    dynamic = {"mu": 0.7} if case == "flow-dynamic" else {}
    state = plain.start(NUM_STEPS, device=torch.device("cpu"), schedule_kwargs=dynamic)
    if plan is not None:
        state.skip(plan)
    return state


def outputs_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("steps", PLANS, ids=str)
@pytest.mark.parametrize("case", LINEAR)
def test_skipping_equals_stepwise_forecasts(case: str, steps: tuple[int, ...]) -> None:
    plan, where = StepPlan(NUM_STEPS, steps), torch.zeros(1, dtype=torch.int64)
    skipping = SkippingSampler(make_scheduler(case), pass_step_kwargs=True)
    latents, said = 10 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), outputs_of(len(steps))

    state = start_state(case, plan)
    batch = SamplerBatch(skipping, [state], latents, where)
    for output in said:
        batch.model_input()
        batch.step(output)
    assert state.is_finished
    assert state.num_passed == state.num_requested == NUM_STEPS

    whole = start_state(case)
    plain = BatchedSampler(make_scheduler(case), pass_step_kwargs=True)
    reference = SamplerBatch(plain, [whole], latents, where)
    for number, gap in enumerate(plan.gaps()):
        for share in gap.shares:
            slope = 0.0 if number == 0 else said[number] - said[number - 1]
            reference.step(said[number] + share * slope)
    largest = float(reference.latents.abs().max())
    assert float((batch.latents - reference.latents).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize("case", LINEAR)
def test_skipping_and_full_requests_share_batches(case: str) -> None:
    skipping = SkippingSampler(make_scheduler(case), pass_step_kwargs=True)
    plans = [StepPlan(NUM_STEPS, (0, 1, 4, 8)), None]
    patch_request = torch.tensor([0, 1])
    latents, said = torch.cat(outputs_of(2)), outputs_of(NUM_STEPS)
    states = [start_state(case, plan) for plan in plans]
    together = SamplerBatch(skipping, states, latents, patch_request)
    for output in said[:4]:
        together.step(output.expand(2, -1, -1, -1))
    assert [state.is_finished for state in states] == [True, False]
    assert together.history is not None
    last = SamplerBatch(skipping, [states[1]], together.latents[1:], patch_request[:1], together.history[1:])
    for output in said[4:]:
        last.step(output)

    for number, found in ((0, together.latents[:1]), (1, last.latents)):
        alone = SamplerBatch(
            skipping, [start_state(case, plans[number])], latents[number : number + 1], patch_request[:1]
        )
        for output in said[: 4 if number == 0 else NUM_STEPS]:
            alone.step(output)
        torch.testing.assert_close(found, alone.latents, rtol=1e-5, atol=1e-5)


def test_output_weights_equal_their_effect() -> None:
    for case in ("euler", "unipc"):
        skipping = SkippingSampler(make_scheduler(case), pass_step_kwargs=True)
        weights, said = skipping.output_weights(start_state(case)), outputs_of(NUM_STEPS)
        ends = []
        for changed in (None, 5):
            batch = SamplerBatch(skipping, [start_state(case)], torch.zeros(SHAPE), torch.zeros(1, dtype=torch.int64))
            for step, output in enumerate(said):
                batch.step(output + (step == changed))
            ends.append(batch.latents)
        torch.testing.assert_close(ends[1] - ends[0], torch.full(SHAPE, weights[5]), rtol=1e-3, atol=1e-5)


def test_noise_of_skipped_steps_is_drawn_together() -> None:
    """The standard deviation of latents is the same as when each step draws its own noise."""
    skipping = SkippingSampler(make_scheduler("ancestral"), pass_step_kwargs=True)
    plain = BatchedSampler(make_scheduler("ancestral"), pass_step_kwargs=True)
    shape, where = (400, 4, 8, 8), torch.zeros(400, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)

    def spread(sampler: BatchedSampler, plan: StepPlan | None, num_steps: int) -> float:
        batch = SamplerBatch(sampler, [start_state("ancestral", plan)], torch.zeros(shape), where)
        for _ in range(num_steps):
            batch.step(torch.zeros(shape), lambda: torch.randn(shape, generator=generator))
        return float(batch.latents.std())

    assert spread(skipping, StepPlan(NUM_STEPS, (0, 1, 6)), 2) == pytest.approx(spread(plain, None, 6), rel=0.01)
    assert spread(skipping, StepPlan(NUM_STEPS, (0, 1, 6)), 3) == pytest.approx(spread(plain, None, 12), rel=0.01)


def test_samplers_that_cannot_skip_are_refused() -> None:
    with pytest.raises(UsageError, match="--cache schedule: steps of DDIMScheduler with clip_sample=True"):
        choose_sampler(make_scheduler("ddim-clip"), pass_step_kwargs=True, skips=True)
    with pytest.raises(UsageError, match="HeunDiscreteScheduler is not batched"):
        choose_sampler(diffusers.HeunDiscreteScheduler(), pass_step_kwargs=True, skips=True)
