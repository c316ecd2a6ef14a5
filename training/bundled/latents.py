"""Pictures as training tensors, and their latents, which are encoded once per resolution and kept as safetensors."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...data.emoji.dataset import EmojiDataset, Numbered
from ...data.emoji.scene import Scene
from ...data.errors import RunError
from ...data.files import atomic_write
from ...data.resolution import Resolution
from .loop import mixed_precision

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
"""Number of pictures of each resolution that the generators are trained on."""


@dataclass(frozen=True, slots=True)
class LatentSet:
    """Latents fp16 [n, 4, height / 8, width / 8] of the first n pictures of a dataset, and their scenes."""

    resolution: Resolution
    latents: Tensor
    scenes: list[Scene]


def draw_pool(dataset: EmojiDataset, on_image: Callable[[], None] = lambda: None) -> tuple[Tensor, list[Scene]]:
    """Draw all pictures of a dataset as uint8 [n, 3, height, width]; returns them with their scenes."""
    resolution = dataset.resolution
    pool = torch.empty(len(dataset), 3, resolution.height, resolution.width, dtype=torch.uint8)
    scenes = []
    for index, (scene, image) in enumerate(dataset):
        pool[index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        scenes.append(scene)
        on_image()
    return pool, scenes


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 [n, 3, h, w] to float32 in -1..1, the range of diffusers' autoencoders."""
    return images.float().div_(127.5).sub_(1.0)


def random_crops(pools: Sequence[Tensor], num_crops: int, side: int, rng: np.random.Generator) -> Tensor:
    """Cut random squares of `side` pixels from pictures of large enough pools; returns uint8 [n, 3, side, side]."""
    usable = [pool for pool in pools if min(pool.shape[2:]) >= side]
    crops = []
    for _ in range(num_crops):
        pool = usable[rng.integers(len(usable))]
        top = int(rng.integers(pool.shape[2] - side + 1))
        left = int(rng.integers(pool.shape[3] - side + 1))
        crops.append(pool[int(rng.integers(len(pool))), :, top : top + side, left : left + side])
    return torch.stack(crops)


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: Tensor, device: torch.device) -> Tensor:
    """Encode uint8 pictures [n, 3, h, w] to posterior means in fp16, which the generators learn to draw."""
    chunk = max(1, ENCODE_CHUNK_PIXELS // (images.shape[2] * images.shape[3]))
    codes = []
    for part in images.split(chunk):
        with mixed_precision(device):
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
    """Return the latents of a whole dataset, read from `folder` if the same autoencoder made them there.

    Raises RunError: the file of latents is damaged.
    """

    def encode() -> dict[str, Tensor]:
        return {"latents": encode_images(vae, draw_pool(dataset, on_image)[0], device)}

    latents = kept_latents(folder, "latents", dataset, vae_digest, encode)["latents"]
    return LatentSet(dataset.resolution, latents, [dataset.scene(index) for index in range(len(dataset))])


def kept_latents(
    folder: Path, kind: str, dataset: Numbered, vae_digest: str, encode: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a kind of a dataset, read from `folder` if the same autoencoder made them there.

    Raises RunError: their file is damaged.
    """
    name = f"{dataset.split}-{dataset.seed}-{dataset.resolution}-{len(dataset)}"
    path = folder / f"{kind}-{name}.safetensors"
    if path.exists():
        try:
            with safe_open(path, "pt") as file:
                if json.loads(file.metadata()["made_by"]) == vae_digest:
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RunError(f"{path} is not a whole file of latents ({error}); delete it to make it again") from error
    tensors = encode()
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"made_by": json.dumps(vae_digest)})
    return tensors
