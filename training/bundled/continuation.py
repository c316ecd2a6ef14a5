"""Training that starts from the weights of finished models instead of random ones."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from ...data.errors import UsageError
from ...data.files import atomic_folder, sha256_of

WEIGHT_FILES = {
    "emoji-clip": "model.safetensors",
    "emoji-xl": "unet/diffusion_pytorch_model.safetensors",
    "emoji-3": "transformer/diffusion_pytorch_model.safetensors",
    "emoji-edit": "transformer/diffusion_pytorch_model.safetensors",
}
"""File with the trained weights, in the folder of each finished model."""


def adopt_parts(models_dir: Path, root: Path) -> None:
    """Copy tokenizer, text encoders and autoencoder of finished models to `root` as trained parts, in fp32.

    Parts that exist in `root` already are kept: latents may have been made with them.

    Raises:
        UsageError: if `models_dir` lacks `emoji-3`, which contains all of them as they were trained.
    """
    source = models_dir / "emoji-3"
    if not (source / "model_index.json").is_file():
        raise UsageError(f"{models_dir} holds no emoji-3 to take the text encoders and the autoencoder from")
    encoders = {"small-model": "text_encoder", "large-model": "text_encoder_2"}
    for name, folder in encoders.items():
        if not (root / "text" / name).is_dir():
            encoder = CLIPTextModelWithProjection.from_pretrained(source / folder, dtype=torch.float32)
            save_part(encoder, root / "text" / name)
    if not (root / "text" / "tokenizer").is_dir():
        save_part(CLIPTokenizer.from_pretrained(source / "tokenizer"), root / "text" / "tokenizer")
    autoencoder = root / "autoencoder" / "model"
    if not autoencoder.is_dir():
        save_part(AutoencoderKL.from_pretrained(source / "vae", torch_dtype=torch.float32), autoencoder)


def save_part(part: Any, folder: Path) -> None:
    """Write an object with a `save_pretrained`, atomically: if its folder exists, it is complete."""
    with atomic_folder(folder) as staged:
        part.save_pretrained(staged)


def load_initial_weights(model: nn.Module, weights: Path) -> str:
    """Copy the weights of a finished model of the same architecture into `model`; returns their sha256.

    Raises UsageError: if the file does not exist or belongs to another architecture.
    """
    if not weights.is_file():
        raise UsageError(f"{weights} does not exist; --from-models names a folder of finished models")
    tensors = load_file(weights)
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise UsageError(f"{weights} holds another architecture than the one that is trained now") from error
    return sha256_of(weights)
