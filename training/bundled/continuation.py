"""Starts a training from the weights of finished models instead of from random ones."""

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
}
"""Where a finished model keeps the weights that its training makes."""


def adopt_parts(models_dir: Path, root: Path) -> None:
    """Take tokenizer, text encoders and autoencoder of finished models as trained parts in `root`, in fp32.

    Parts that lie in `root` already are left alone: latents may have been made with them.

    Raises:
        UsageError: if `models_dir` lacks `emoji-3`, which holds all of them as they were trained.
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
    """Write what has a `save_pretrained`, whole or not at all: that its folder exists means that it is finished."""
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
