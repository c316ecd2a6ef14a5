"""Fitting a discriminator: a classifier of real and drawn images, and the temperature that calibrates it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ..bundled.loop import OnStep, Task, ignore_step, mixed_precision, train
from ..bundled.optim import OptimConfig
from .discriminator import Discriminator, DiscriminatorAbout, calibration_error, normalised
from .nets import new_net

DEFAULT_STEPS = 600
_BATCH, _VALIDATION_SHARE, _LEAST = 64, 0.2, 10
_OPTIM = OptimConfig(adam_lr=2e-3, weight_decay=0.05)
_MAX_SHIFT = 6


@dataclass(frozen=True, slots=True)
class Examples:
    """Thumbnails to train on.

    Attributes:
        real, drawn: uint8 (n, 3, 96, 96).
    """

    real: Tensor
    drawn: Tensor

    def split(self, seed: int) -> "tuple[Examples, Examples]":
        """Split into four fifths to train on and one fifth to calibrate with."""
        rng = np.random.default_rng([seed, 1])
        parts: list[list[Tensor]] = [[], []]
        for images in (self.real, self.drawn):
            order = rng.permutation(len(images))
            count = max(1, round(len(images) * _VALIDATION_SHARE))
            parts[0].append(images[np.sort(order[count:])])
            parts[1].append(images[np.sort(order[:count])])
        return Examples(*parts[0]), Examples(*parts[1])

    @property
    def digest(self) -> str:
        """SHA-256 of all images."""
        digest = hashlib.sha256()
        for images in (self.real, self.drawn):
            digest.update(str(tuple(images.shape)).encode())
            digest.update(images.numpy().tobytes())
        return digest.hexdigest()


def fit_discriminator(
    examples: Examples,
    about: DiscriminatorAbout,
    folder: Path,
    device: torch.device,
    *,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    on_step: OnStep = ignore_step,
) -> Discriminator:
    """Train a discriminator, or resume an interrupted training.

    Batches contain as many real images as drawn ones, each shifted by up to 6 pixels and mirrored at random. A fifth of
    the images is held out, for the temperature and for the figures in `about.fit`: accuracy, area under the ROC curve,
    and the calibration error before and after.

    Args:
        examples: images to train on.
        about: description of the discriminator; temperature and fit are filled in.
        folder: folder for checkpoints; other examples, networks or seeds have checkpoints of their own in it.
        device: device to train on.
        steps, seed: length and seed of the training.
        on_step: called after each step.

    Raises:
        UsageError: there are fewer than 10 real or drawn images, or a checkpoint has more steps.
        RunError: the loss diverges, or a checkpoint is damaged.
        KeyboardInterrupt: on Ctrl-C; a checkpoint is kept.
    """
    if min(len(examples.real), len(examples.drawn)) < _LEAST:
        raise UsageError(
            f"there are {len(examples.real)} real and {len(examples.drawn)} drawn images to learn from, but at least "
            f"{_LEAST} of each are needed"
        )
    learnt, held_out = examples.split(seed)
    torch.manual_seed(seed)
    net = new_net(about.net)
    key = hashlib.sha256(f"{about.net} {seed} {examples.digest}".encode()).hexdigest()[:12]
    train(
        net,
        Task(folder / f"discriminator-{about.net}-{key}", steps, seed),
        device,
        _loss_of(net, learnt, seed, device),
        on_step,
        # Layers have a few thousand weights, for which plain AdamW suffices.
        is_excluded=lambda name: True,
        ema_decay=0.99,
        optim=_OPTIM,
    )
    found = Discriminator(net.cpu(), replace(about, temperature=1.0))
    images = torch.cat([held_out.real, held_out.drawn])
    is_real = torch.arange(len(images)) < len(held_out.real)
    raw = found.confidences(images)
    temperature = fitted_temperature(torch.logit(raw.double(), 1e-7), is_real)
    found.about = replace(about, temperature=temperature)
    calibrated = found.confidences(images)
    fit = {
        "num_real": len(learnt.real),
        "num_drawn": len(learnt.drawn),
        "num_held_out": len(images),
        "steps": steps,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "accuracy": float(((calibrated >= 0.5) == is_real).float().mean()),
        "auc": _auc(calibrated, is_real),
        "ece_before": calibration_error(raw, is_real),
        "ece": calibration_error(calibrated, is_real),
    }
    found.about = replace(found.about, fit=fit)
    return found


def fitted_temperature(logits: Tensor, is_real: Tensor) -> float:
    """Find the temperature with the least cross entropy by golden-section search from 0.05 to 20.

    Args:
        logits: (n,) log odds of real over drawn.
        is_real: (n,) booleans.
    """

    def loss(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        return float(F.binary_cross_entropy_with_logits(scaled, is_real.double()))

    return float(np.exp(_minimum(loss, np.log(0.05), np.log(20.0))))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    golden = (5**0.5 - 1) / 2
    for _ in range(60):
        first, second = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, second) if function(first) < function(second) else (first, high)
    return (low + high) / 2


def _loss_of(
    net: nn.Module, examples: Examples, seed: int, device: torch.device
) -> Callable[[int], tuple[Tensor, dict[str, float]]]:
    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([seed, 2, step])
        sides = [images[rng.integers(0, len(images), _BATCH // 2)] for images in (examples.drawn, examples.real)]
        batch = normalised(_augmented(torch.cat(sides), rng)).to(device)
        wanted = torch.arange(2, device=device).repeat_interleave(_BATCH // 2)
        with mixed_precision(device):
            logits = net(batch).float()
        accuracy = float((logits.argmax(1) == wanted).float().mean())
        return F.cross_entropy(logits, wanted), {"accuracy": accuracy}

    return loss


def _augmented(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Shift each image, replicating its border, and mirror it at random."""
    side = images.shape[-1]
    padded = F.pad(images.float(), [_MAX_SHIFT] * 4, mode="replicate")
    moved = []
    for image, (x, y), is_mirrored in zip(
        padded, rng.integers(0, 2 * _MAX_SHIFT + 1, (len(images), 2)), rng.random(len(images)) < 0.5, strict=True
    ):
        part = image[:, y : y + side, x : x + side]
        moved.append(part.flip(2) if is_mirrored else part)
    return torch.stack(moved)


def _auc(confidences: Tensor, is_real: Tensor) -> float:
    """Return how often a real image has a higher confidence than a drawn one; ties count half."""
    real, drawn = confidences[is_real], confidences[~is_real]
    wins = (real[:, None] > drawn).float() + 0.5 * (real[:, None] == drawn)
    return float(wins.mean())
