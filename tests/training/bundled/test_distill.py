"""Progressive distillation: targets equal two steps of diffusers' Euler sampler, and a student learns them."""

from pathlib import Path

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.training.bundled.distill import (
    STAGES,
    TEACHER_STEPS,
    denoised,
    distill,
    stepped,
    trailing_grid,
    two_steps,
)
from patchedserve.training.bundled.generators import BETAS
from patchedserve.training.bundled.loop import Task

LATENTS = (3, 4, 6, 5)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_velocity(latents: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
    """Return an arbitrary function of all arguments."""
    return 0.3 * latents / (sigma.view(-1, 1, 1, 1) + 1) + torch.sin(timestep).view(-1, 1, 1, 1)


@pytest.mark.parametrize("num_steps", [TEACHER_STEPS, *STAGES])
def test_grid_equals_diffusers_and_students_use_every_other_point(num_steps: int) -> None:
    timesteps, sigmas = trailing_grid(num_steps)
    scheduler = EulerDiscreteScheduler(prediction_type="v_prediction", timestep_spacing="trailing", **BETAS)
    scheduler.set_timesteps(num_steps)
    assert torch.equal(timesteps, scheduler.timesteps.float())
    assert torch.equal(sigmas, scheduler.sigmas.float())
    if num_steps > STAGES[-1]:
        own, finer = trailing_grid(num_steps // 2), (timesteps, sigmas)
        assert torch.equal(own[0], finer[0][::2])
        assert torch.allclose(own[1], finer[1][::2])


def test_two_teacher_steps_equal_those_of_the_sampler() -> None:
    scheduler = EulerDiscreteScheduler(prediction_type="v_prediction", timestep_spacing="trailing", **BETAS)
    scheduler.set_timesteps(8)
    timesteps, sigmas = trailing_grid(8)
    x = drawn(*LATENTS) * sigmas[0]
    end = x
    for timestep in scheduler.timesteps[:2]:
        sigma = scheduler.sigmas[scheduler.index_for_timestep(timestep)].expand(len(x))
        v = some_velocity(end, sigma, timestep.expand(len(x)))
        end = scheduler.step(v, timestep, end, return_dict=False)[0]
    three, two = sigmas[:3].expand(3, 3), timesteps[:2].expand(3, 2)
    clean = two_steps(x, some_velocity, three, two)
    assert torch.allclose(stepped(x, clean, three[:, 0], three[:, 2]), end, atol=1e-5)
    # The last two steps end without noise.
    clean = two_steps(x, some_velocity, sigmas[-3:].expand(3, 3), timesteps[-2:].expand(3, 2))
    assert torch.isfinite(clean).all()


def test_clean_latents_of_a_velocity() -> None:
    clean, noise, sigma = drawn(*LATENTS, seed=1), drawn(*LATENTS, seed=2), torch.tensor([0.1, 1.0, 14.0])
    s = sigma.view(-1, 1, 1, 1)
    v = (noise - s * clean) / (s**2 + 1).sqrt()
    assert torch.allclose(denoised(clean + s * noise, v, sigma), clean, atol=1e-4)


def test_missing_teacher_says_what_to_train(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train the teacher first: psctl models train emoji-xl"):
        distill(tmp_path / "none.safetensors", None, [], [], Task(tmp_path, 1), torch.device("cpu"))  # type: ignore[arg-type]
