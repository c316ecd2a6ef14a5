"""Training of the small autoencoder that both bundled generators share (AutoencoderKL, 8x smaller, 4 channels)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from .latents import random_crops, to_float
from .loop import OnStep, Task, ignore_step, mixed_precision, train
from .optim import OptimConfig

CROP_SIDES = (64, 96, 128, 192)
PIXELS_PER_BATCH = 16 * 96 * 96
GROUPS = 4
KL_WEIGHT = 2e-4
GRADIENT_WEIGHT = 0.4
LATENT_NOISE = 0.05


def new_autoencoder() -> AutoencoderKL:
    """Return a new autoencoder whose posterior starts narrow (log-variance near -6), so that it learns to encode at
    once.
    """
    # diffusers annotates tuples of any length as tuples of one.
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * 4,  # pyright: ignore[reportArgumentType]
        block_out_channels=(16, 32, 64, 96),  # pyright: ignore[reportArgumentType]
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=GROUPS,
        sample_size=128,
        scaling_factor=1.0,
        force_upcast=False,
    )
    assert isinstance(model.quant_conv, nn.Conv2d)
    assert model.quant_conv.bias is not None
    with torch.no_grad():
        model.quant_conv.bias[4:] = -6.0
        model.quant_conv.weight[4:] *= 0.1
    return model


def reconstruction_loss(
    model: AutoencoderKL, images: Tensor, generator: torch.Generator
) -> tuple[Tensor, dict[str, float]]:
    """L1 + 0.5 MSE + gradient difference + KL of float images [n, 3, h, w] in -1..1."""
    posterior: Any = model.encode(images, return_dict=False)[0]
    noise = torch.randn(posterior.mean.shape, generator=generator, device="cpu").to(images.device)
    latents = posterior.mean + posterior.std * noise
    # Noise on the latents, so that small errors of the generators do not show.
    latents = latents + LATENT_NOISE * torch.randn(latents.shape, generator=generator, device="cpu").to(images.device)
    restored = model.decode(latents, return_dict=False)[0].float()
    l1 = (restored - images).abs().mean()
    gradient = sum(((restored.diff(dim=axis)) - images.diff(dim=axis)).abs().mean() for axis in (2, 3))
    kl = posterior.kl().float().mean() / posterior.mean[0].numel()
    mse = F.mse_loss(restored, images)
    loss = l1 + 0.5 * mse + GRADIENT_WEIGHT * gradient + KL_WEIGHT * kl
    psnr = float(10 * torch.log10(4.0 / mse.detach()))
    return loss, {"l1": float(l1.detach()), "psnr": psnr, "kl": float(kl.detach())}


def train_autoencoder(
    pools: Sequence[Tensor],
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
) -> AutoencoderKL:
    """Train on random crops of uint8 pools [n, 3, h, w]; returns the averaged model, latents normalised."""
    torch.manual_seed(task.seed)
    model = new_autoencoder()

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([task.seed, step])
        side = int(rng.choice(CROP_SIDES))
        crops = random_crops(pools, max(2, PIXELS_PER_BATCH // side**2), side, rng)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        with mixed_precision(device):
            return reconstruction_loss(model, to_float(crops).to(device), generator)

    optim = OptimConfig(muon_lr=4e-3, adam_lr=2e-3, weight_decay=0.0)
    train(model, task, device, loss_of, on_step, is_excluded=_is_outer, optim=optim)
    normalise_latents(model, pools)
    return model


def _is_outer(name: str) -> bool:
    return name.endswith(("encoder.conv_in.weight", "decoder.conv_out.weight"))


@torch.no_grad()
def normalise_latents(model: AutoencoderKL, pools: Sequence[Tensor]) -> None:
    """Fold each latent channel's mean and standard deviation over 256 pictures into the quantisation convolutions.

    Afterwards each latent channel has mean 0 and standard deviation 1, and `scaling_factor` is 1 by construction.
    """
    device = next(model.parameters()).device
    chunks = [chunk for pool in pools for chunk in pool[: 256 // len(pools)].split(16)]
    codes = [model.encode(to_float(chunk).to(device), return_dict=False)[0].mean for chunk in chunks]
    values = torch.cat([code.transpose(0, 1).flatten(1) for code in codes], 1)
    mean, std = values.mean(1), values.std(1)
    quant, post = model.quant_conv, model.post_quant_conv
    assert isinstance(quant, nn.Conv2d)
    assert isinstance(post, nn.Conv2d)
    assert quant.bias is not None
    assert post.bias is not None
    size = len(mean)
    quant.weight[:size] /= std[:, None, None, None]
    quant.bias[:size] = (quant.bias[:size] - mean) / std
    quant.bias[size:] -= 2 * std.log()
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight *= std[None, :, None, None]
