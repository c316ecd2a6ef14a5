"""Progressive distillation: each student learns to do in one step what its teacher does in two.

The first teacher is `emoji-xl` with classifier-free guidance, which is baked into its student (C. Meng et al., 2023);
each student teaches the next, which takes half as many steps (T. Salimans and J. Ho, 2022). All of them predict v on
the trailing grid of diffusers' Euler scheduler, so that the result needs no sampler of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...data.resolution import Resolution
from .continuation import load_initial_weights, save_part
from .generators import BETAS, TextStates, TextTower, new_unet, train_generator
from .latents import LatentSet
from .loop import OnStep, Task, ignore_step, mixed_precision
from .optim import OptimConfig

TEACHER_STEPS = 32
GUIDANCE = 4.0
STAGES = (16, 8, 4, 2)
"""Number of steps of each student."""
_OPTIM = OptimConfig(muon_lr=6e-4, adam_lr=4e-4)
_WEIGHTS = "diffusion_pytorch_model.safetensors"

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(noisy latents, sigmas (n,), timesteps (n,)) -> predicted v."""


def trailing_grid(num_steps: int) -> tuple[Tensor, Tensor]:
    """Timesteps (n,) and sigmas (n + 1,) of the sampler that bundled models come with, the last sigma being 0."""
    scheduler = EulerDiscreteScheduler(  # pyright: ignore[reportArgumentType]  # annotated as an enum of names
        prediction_type="v_prediction", timestep_spacing="trailing", num_train_timesteps=1000, **BETAS
    )
    scheduler.set_timesteps(num_steps)
    return scheduler.timesteps.float(), scheduler.sigmas.float()


def denoised(latents: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean latents that v predicts for latents x_0 + sigma noise; sigma (n,)."""
    sigma = sigma.view(-1, 1, 1, 1)
    return (latents - v * sigma * (sigma**2 + 1).sqrt()) / (sigma**2 + 1)


def stepped(latents: Tensor, clean: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """Take an Euler step from sigma (n,) to the next (n,)."""
    return clean + (next_sigma / sigma).view(-1, 1, 1, 1) * (latents - clean)


def two_steps(latents: Tensor, predict: Velocity, sigmas: Tensor, timesteps: Tensor) -> Tensor:
    """Return the clean latents that a student should predict, so that one of its steps ends where two of the teacher's
    do.

    Args:
        latents: [n, channels, h, w], x_0 + sigma noise.
        predict: the teacher.
        sigmas: (n, 3), where the two steps begin, meet and end.
        timesteps: (n, 2), timesteps of the two steps.
    """
    first, second, last = sigmas.unbind(1)
    between = stepped(latents, denoised(latents, predict(latents, first, timesteps[:, 0]), first), first, second)
    end = stepped(between, denoised(between, predict(between, second, timesteps[:, 1]), second), second, last)
    share = (last / first).view(-1, 1, 1, 1)
    return (end - share * latents) / (1 - share)


class DistillObjective:
    """Training objective of one stage: a student, and a teacher that takes twice as many steps.

    Args:
        text: both text encoders.
        student: the trained model; begins as a copy of the teacher.
        teacher: frozen.
        num_steps: number of steps of the student.
        guidance: guidance scale of the teacher, which doubles its rows; None for a teacher that has it baked in.
    """

    def __init__(
        self,
        text: TextTower,
        student: UNet2DConditionModel,
        teacher: UNet2DConditionModel,
        num_steps: int,
        guidance: float | None,
    ) -> None:
        self.text, self.model, self.guidance = text, student, guidance
        self.teacher = teacher.eval().requires_grad_(False)
        self.timesteps, self.sigmas = trailing_grid(2 * num_steps)

    def loss(self, latents: Tensor, captions: list[str], resolution: Resolution, rng: np.random.Generator) -> Tensor:
        """Return the mean squared error of v, with timesteps spread evenly over the steps of the student."""
        count, num_steps = len(captions), len(self.timesteps) // 2
        states = self.text(captions, is_pooled_joined=False)
        noise = torch.from_numpy(rng.standard_normal(latents.shape, np.float32)).to(latents.device)
        # Spread as evenly as a batch allows, like the timesteps in the teacher's own training.
        places = 2 * ((rng.permutation(count) + rng.random()) * num_steps / count).astype(np.int64)
        sigmas = torch.stack([self.sigmas[places + ahead] for ahead in range(3)], 1).to(latents)
        timesteps = torch.stack([self.timesteps[places + ahead] for ahead in range(2)], 1).to(latents)
        sigma = sigmas[:, 0]
        noisy = latents + sigma.view(-1, 1, 1, 1) * noise
        width, height = resolution
        time_ids = torch.tensor([[height, width, 0, 0, height, width]]).repeat(count, 1).to(latents)
        with torch.no_grad(), mixed_precision(latents.device):
            target = two_steps(noisy, self._teacher(states, time_ids), sigmas, timesteps)
            # The v that leads there: alpha noise - sigma x_0 in the terms of the variance-preserving process.
            wanted = ((noisy - target) / sigma.view(-1, 1, 1, 1) - sigma.view(-1, 1, 1, 1) * target) / (
                sigma.view(-1, 1, 1, 1) ** 2 + 1
            ).sqrt()
        with mixed_precision(latents.device):
            predicted = velocity(self.model, noisy, sigma, timesteps[:, 0], states, time_ids)
        return F.mse_loss(predicted.float(), wanted.float())

    def _teacher(self, states: TextStates, time_ids: Tensor) -> Velocity:
        if self.guidance is None:
            return lambda x, sigma, timestep: velocity(self.teacher, x, sigma, timestep, states, time_ids).float()
        scale = self.guidance
        # An empty negative prompt is a zero state in SDXL's pipeline (force_zeros_for_empty_prompt).
        both = TextStates(*(torch.cat([torch.zeros_like(each), each]) for each in (states.tokens, states.pooled)))

        def guided(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            x, sigma, timestep = (torch.cat([each, each]) for each in (x, sigma, timestep))
            both_ids = torch.cat([time_ids, time_ids])
            plain, conditional = velocity(self.teacher, x, sigma, timestep, both, both_ids).float().chunk(2)
            return plain + scale * (conditional - plain)

        return guided


def velocity(
    model: UNet2DConditionModel, latents: Tensor, sigma: Tensor, timestep: Tensor, states: TextStates, time_ids: Tensor
) -> Tensor:
    """Return a U-Net's prediction for latents x_0 + sigma noise, scaled to a variance of 1 for its input."""
    scaled = latents / (sigma.view(-1, 1, 1, 1) ** 2 + 1).sqrt()
    added = {"text_embeds": states.pooled, "time_ids": time_ids}
    return model(scaled, timestep, states.tokens, added_cond_kwargs=added).sample


def distill(
    teacher_weights: Path,
    text: TextTower,
    sets: list[LatentSet],
    weights: Sequence[float],
    task: Task,
    device: torch.device,
    on_stage: Callable[[str, int], None] = lambda name, total: None,
    on_step: OnStep = ignore_step,
) -> Any:
    """Train all students, each in a subfolder of the task's folder; returns the last one, with averaged weights.

    A finished student is not trained again. `task.steps` is the number of training steps of one stage.

    Raises:
        UsageError: if the teacher's weights are missing, or of another architecture.
    """
    if not teacher_weights.is_file():
        raise UsageError(f"{teacher_weights} does not exist; train the teacher first: psctl models train emoji-xl")
    before, guidance = teacher_weights, GUIDANCE
    for num_steps in STAGES:
        folder = task.folder / f"steps-{num_steps}"
        finished = folder / "model"
        if not finished.is_dir():
            on_stage(f"student of {num_steps} steps", task.steps)
            teacher, student = _unet(before), new_unet()
            nn.Module.to(teacher, device)  # diffusers annotates its own `to` without its self
            objective = DistillObjective(text, student, teacher, num_steps, guidance)
            own = Task(folder, task.steps, task.seed, before)
            save_part(train_generator(objective, sets, weights, own, device, on_step, optim=_OPTIM).cpu(), finished)
        before, guidance = finished / _WEIGHTS, None
    return _unet(before)


def _unet(weights: Path) -> UNet2DConditionModel:
    model = new_unet()
    load_initial_weights(model, weights)
    return model
