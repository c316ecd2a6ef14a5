"""Latents of training pictures, encoded once per resolution and kept on disk as safetensors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...data.emoji.dataset import EmojiDataset
from ...data.emoji.scene import Scene
from ...data.errors import RunError
from ...data.files import atomic_write
from ...data.resolution import Resolution
from .images import draw_pool, to_float

ENCODE_CHUNK_PIXELS = 16 * 128 * 128

TRAINING_SIZES: dict[Resolution, int] = {
    Resolution(128, 128): 9000,
    Resolution(192, 192): 5000,
    Resolution(256, 256): 3500,
    Resolution(192, 128): 1000,
    Resolution(128, 192): 1000,
    Resolution(256, 128): 700,
    Resolution(128, 256): 700,
    Resolution(160, 224): 600,
    Resolution(224, 160): 600,
}
"""How many pictures of each resolution the generators are trained on."""


@dataclass(frozen=True, slots=True)
class LatentSet:
    """Latents fp16 [n, 4, height / 8, width / 8] of the first n pictures of a dataset, and their scenes."""

    resolution: Resolution
    latents: Tensor
    scenes: list[Scene]


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: Tensor, device: torch.device) -> Tensor:
    """Posterior means fp16 of uint8 pictures [n, 3, h, w]: what the generators learn to draw."""
    chunk = max(1, ENCODE_CHUNK_PIXELS // (images.shape[2] * images.shape[3]))
    codes = []
    for part in images.split(chunk):
        with torch.autocast(device.type, torch.bfloat16):
            posterior = vae.encode(to_float(part).to(device), return_dict=False)[0]
        codes.append(posterior.mean.half().cpu())
    return torch.cat(codes).contiguous()


def load_or_encode(
    vae: AutoencoderKL,
    vae_digest: str,
    dataset: EmojiDataset,
    folder: Path,
    device: torch.device,
    on_image: Callable[[], None] = lambda: None,
) -> LatentSet:
    """Latents of a whole dataset, from `folder` if they were made there by the same autoencoder."""
    name = f"{dataset.split}-{dataset.seed}-{dataset.resolution}-{len(dataset)}"
    path = folder / f"latents-{name}.safetensors"
    if path.exists():
        try:
            with safe_open(path, "pt") as file:
                if json.loads(file.metadata()["made_by"]) == vae_digest:
                    scenes = [dataset.scene(index) for index in range(len(dataset))]
                    return LatentSet(dataset.resolution, file.get_tensor("latents"), scenes)
        except SafetensorError as error:
            raise RunError(f"{path} is not a whole file of latents ({error}); delete it to make it again") from error
    pool, scenes = draw_pool(dataset, on_image)
    latents = encode_images(vae, pool, device)
    with atomic_write(path) as temporary:
        save_file({"latents": latents}, temporary, metadata={"made_by": json.dumps(vae_digest)})
    return LatentSet(dataset.resolution, latents, scenes)
