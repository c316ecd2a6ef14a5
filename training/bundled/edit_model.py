"""Training of `emoji-edit`: FLUX.1 Kontext's architecture, small, continued from `emoji-3`.

All of its blocks are joint blocks, which SD3 and FLUX.1 have in common, so those of `emoji-3` are taken over. New are
the norms of queries and keys, rotary positions in place of added ones, and everything that reads the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxTransformer2DModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from ...data.emoji.edits import EditDataset, SceneEdit
from ...data.errors import UsageError
from ...data.files import atomic_write
from ...data.resolution import Resolution
from .edit_text import CLIP_WIDTH, T5_WIDTH, as_written, t5_ids
from .generators import ANY_ATTENTION, flow_noised, train_on_sets, zero_weights
from .latents import encode_images, kept_latents
from .loop import OnStep, Task, ignore_step, mixed_precision
from .text import tokenize

EDIT_SIZES: dict[Resolution, int] = {
    Resolution(128, 128): 3600,
    Resolution(192, 192): 2000,
    Resolution(256, 256): 1400,
    Resolution(192, 128): 260,
    Resolution(128, 192): 260,
    Resolution(256, 128): 240,
    Resolution(128, 256): 240,
    Resolution(160, 224): 240,
    Resolution(224, 160): 240,
}
"""Number of edits of each resolution that the model is trained on."""
DRAWING_SHARE = 0.2
"""Part of the batches without references, which are drawn after captions."""
BATCH_PIXELS = 8192
WIDTH, HEADS, NUM_BLOCKS = 96, 3, 10
NORM_OF_QUERIES = 2.0
"""First weight of the norms of queries and keys, whose products `emoji-3` does not norm."""


@dataclass(frozen=True, slots=True)
class EditLatents:
    """Latents fp16 [n, 4, height / 8, width / 8] of pictures before and after the edits of a dataset, and the edits."""

    resolution: Resolution
    before: Tensor
    after: Tensor
    edits: list[SceneEdit]


def load_or_encode_edits(
    vae: AutoencoderKL,
    vae_digest: str,
    dataset: EditDataset,
    folder: Path,
    device: torch.device,
    on_image: Callable[[], None] = lambda: None,
) -> EditLatents:
    """Return the latents of a whole dataset, read from `folder` if the same autoencoder made them there.

    Raises RunError: the file of latents is damaged.
    """

    def encode() -> dict[str, Tensor]:
        resolution = dataset.resolution
        pool = torch.empty(2, len(dataset), 3, resolution.height, resolution.width, dtype=torch.uint8)
        for index in range(len(dataset)):
            for which, image in enumerate(dataset.images(index)):
                pool[which, index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            on_image()
        return {
            name: encode_images(vae, images, device) for name, images in zip(("before", "after"), pool, strict=True)
        }

    kept = kept_latents(folder, "edits", dataset, vae_digest, encode)
    edits = [dataset.edit(index) for index in range(len(dataset))]
    return EditLatents(dataset.resolution, kept["before"], kept["after"], edits)


class EditText:
    """Both text encoders, frozen, used as `FluxKontextPipeline` uses them."""

    def __init__(
        self,
        clip: tuple[CLIPTokenizer, CLIPTextModel],
        t5: tuple[T5Tokenizer, T5EncoderModel],
        device: torch.device,
    ) -> None:
        self.clip, self.t5, self.device = clip, t5, device
        for encoder in (clip[1], t5[1]):
            cast(Any, encoder).eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return token states [n, MAX_TOKENS, T5_WIDTH] and pooled states [n, CLIP_WIDTH]."""
        pooled = self.clip[1](input_ids=tokenize(self.clip[0], texts).to(self.device)).pooler_output
        return self.t5[1](input_ids=t5_ids(self.t5[0], texts).to(self.device)).last_hidden_state, pooled


def new_edit_transformer() -> FluxTransformer2DModel:
    """Return a small transformer of FLUX.1's architecture without its single-stream blocks."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=NUM_BLOCKS,
        num_single_layers=0,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    modulations = ("norm1.linear", "norm1_context.linear", "norm_out.linear")
    zero_weights(module for name, module in model.named_modules() if name.endswith(modulations) or name == "proj_out")
    return model


def continue_from_emoji_3(weights: Path, path: Path, seed: int) -> None:
    """Write the weights that training starts from: those of emoji-3 where both models have the same layer.

    Raises UsageError: `weights` are not those of emoji-3's transformer.
    """
    torch.manual_seed(seed)
    own = new_edit_transformer().state_dict()
    try:
        theirs = {name: tensor.float() for name, tensor in load_file(weights).items()}
        # A convolution over 2 x 2 latents is a linear layer of one token, whose latents come after their channels.
        theirs["x_embedder.weight"] = theirs["pos_embed.proj.weight"].flatten(1)
        theirs["x_embedder.bias"] = theirs["pos_embed.proj.bias"]
        # SD3 predicts (row, column, channel), FLUX.1 (channel, row, column).
        for name in ("proj_out.weight", "proj_out.bias"):
            theirs[name] = theirs[name].unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
    except (KeyError, OSError, SafetensorError, RuntimeError) as error:
        raise UsageError(f"{weights} does not hold the weights of emoji-3's transformer") from error
    for name, tensor in own.items():
        is_new = "text_embedder" in name or name not in theirs or theirs[name].shape != tensor.shape
        own[name] = tensor.fill_(NORM_OF_QUERIES) if "attn.norm" in name else tensor if is_new else theirs[name]
    with atomic_write(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in own.items()}, temporary)


class EditObjective:
    """Rectified flow, as of emoji-3, beside the tokens of a picture that is not noisy (FLUX.1 Kontext, section 3)."""

    def __init__(self, text: EditText) -> None:
        self.text = text
        self.model = new_edit_transformer()

    def loss(
        self,
        after: Tensor,
        before: Tensor | None,
        texts: list[str],
        resolution: Resolution,
        rng: np.random.Generator,
    ) -> Tensor:
        tokens, pooled = self.text(texts)
        noisy, noise, sigma = flow_noised(after, resolution, rng)
        states, ids = _packed(noisy, 0)
        num_drawn = states.shape[1]
        if before is not None:
            seen, seen_ids = _packed(before, 1)
            states, ids = torch.cat([states, seen], 1), torch.cat([ids, seen_ids])
        with mixed_precision(after.device):
            predicted = self.model(
                states,
                encoder_hidden_states=tokens,
                pooled_projections=pooled,
                timestep=sigma,
                img_ids=ids,
                txt_ids=ids.new_zeros(tokens.shape[1], 3),
            ).sample[:, :num_drawn]
        return F.mse_loss(predicted.float(), _packed(noise - after, 0)[0])


def _packed(latents: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Return latents as tokens, 2 x 2 of them in each, and the tokens' positions: kind, row, column."""
    count, channels, height, width = latents.shape
    half = height // 2, width // 2
    ids = FluxKontextPipeline._prepare_latent_image_ids(count, *half, latents.device, latents.dtype)
    ids[:, 0] = kind
    return FluxKontextPipeline._pack_latents(latents, count, channels, height, width), ids


def train_edit_model(
    text: EditText,
    sets: list[EditLatents],
    weights: Sequence[float],
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
    *,
    batch_pixels: int = BATCH_PIXELS,
) -> FluxTransformer2DModel:
    """Train on cached latents; returns the model with averaged weights.

    Each batch comes from one of the sets, drawn by their weights: edits with `batch_pixels` latent positions, or, for
    DRAWING_SHARE of the batches, twice as many drawings after captions, without references.
    """
    objective = EditObjective(text)

    def loss_of(latents: EditLatents, rng: np.random.Generator) -> tuple[Tensor, str]:
        is_drawn = rng.random() < DRAWING_SHARE
        size = max(1, batch_pixels // (latents.after.shape[2] * latents.after.shape[3])) * (2 if is_drawn else 1)
        chosen = rng.integers(len(latents.edits), size=size)
        rows, edits = torch.from_numpy(chosen), [latents.edits[index] for index in chosen]
        after, texts = latents.after[rows], [edit.in_words(rng) for edit in edits]
        if is_drawn:
            # Captions know no painted drawings.
            is_before = torch.tensor([edit.kind == "recolour" for edit in edits])[:, None, None, None]
            after = torch.where(is_before, latents.before[rows], after)
            texts = [(edit.before if edit.kind == "recolour" else edit.after).in_words(rng) for edit in edits]
        before = None if is_drawn else latents.before[rows].float().to(device)
        texts = [as_written(text, rng) for text in texts]
        # With a reference, sequences are long enough for the CPU's flash kernel.
        with sdpa_kernel(list(ANY_ATTENTION)):
            loss = objective.loss(after.float().to(device), before, texts, latents.resolution, rng)
        return loss, f"{'drawn' if is_drawn else 'edited'}_{latents.resolution}"

    train_on_sets(objective.model, sets, weights, loss_of, task, device, on_step)
    return objective.model
