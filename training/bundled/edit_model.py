"""Training of `emoji-edit`: FLUX.1 Kontext's architecture, small, continued from `emoji-3`.

All of its blocks are joint blocks, which SD3 and FLUX.1 have in common, so those of `emoji-3` are taken over. New are
the norms of queries and keys, rotary positions in place of added ones, and everything that reads the text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from ...data.emoji.edits import EditDataset, SceneEdit
from ...data.emoji.scene import caption_of
from ...data.errors import RunError, UsageError
from ...data.files import atomic_write
from ...data.resolution import Resolution
from .edit_text import CLIP_WIDTH, T5_WIDTH, as_written, t5_ids
from .generators import ANY_ATTENTION, FLOW_SHIFT, OPTIM, zero_weights
from .latents import encode_images
from .loop import OnStep, Task, ignore_step, mixed_precision, train
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
    resolution = dataset.resolution
    path = folder / f"edits-{dataset.split}-{dataset.seed}-{resolution}-{len(dataset)}.safetensors"
    edits = [dataset.edit(index) for index in range(len(dataset))]
    if path.exists():
        try:
            with safe_open(path, "pt") as file:
                if json.loads(file.metadata()["made_by"]) == vae_digest:
                    return EditLatents(resolution, file.get_tensor("before"), file.get_tensor("after"), edits)
        except SafetensorError as error:
            raise RunError(f"{path} is not a whole file of latents ({error}); delete it to make it again") from error
    pool = torch.empty(2, len(dataset), 3, resolution.height, resolution.width, dtype=torch.uint8)
    for index in range(len(dataset)):
        for which, image in enumerate(dataset.images(index)):
            pool[which, index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        on_image()
    before, after = (encode_images(vae, images, device) for images in pool)
    with atomic_write(path) as temporary:
        save_file({"before": before, "after": after}, temporary, metadata={"made_by": json.dumps(vae_digest)})
    return EditLatents(resolution, before, after, edits)


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

    def loss(self, after: Tensor, before: Tensor | None, texts: list[str], rng: np.random.Generator) -> Tensor:
        tokens, pooled = self.text(texts)
        noise = torch.from_numpy(rng.standard_normal(after.shape, np.float32)).to(after.device)
        position = 1 / (1 + np.exp(-rng.standard_normal(len(texts), np.float32)))
        shift = FLOW_SHIFT * (after.shape[2] * after.shape[3] / 24**2) ** 0.25
        sigma = torch.from_numpy(shift * position / (1 + (shift - 1) * position)).to(after)
        noisy = torch.lerp(after, noise, sigma[:, None, None, None])
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
    ids = FluxKontextPipeline._prepare_latent_image_ids(
        count, height // 2, width // 2, latents.device, latents.dtype
    )  # fmt: skip
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

    Each batch of `batch_pixels` latent positions comes from one of the sets, drawn by their weights. DRAWING_SHARE of
    them are drawn after captions, without references.
    """
    objective = EditObjective(text)
    chances = np.array(weights) / sum(weights)

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([task.seed, 11, step])
        latents = sets[int(rng.choice(len(sets), p=chances))]
        is_drawn = rng.random() < DRAWING_SHARE
        size = max(1, batch_pixels // (latents.after.shape[2] * latents.after.shape[3])) * (2 if is_drawn else 1)
        chosen = rng.integers(len(latents.edits), size=size)
        edits = [latents.edits[index] for index in chosen]
        rows = torch.from_numpy(chosen)
        before = None if is_drawn else latents.before[rows].float().to(device)
        after = (_drawable(latents, rows) if is_drawn else latents.after[rows]).float().to(device)
        texts = [as_written(_caption(edit, rng) if is_drawn else edit.in_words(rng), rng) for edit in edits]
        # With a reference, sequences are long enough for the CPU's flash kernel.
        with sdpa_kernel(list(ANY_ATTENTION)):
            loss = objective.loss(after, before, texts, rng)
        name = "drawn" if is_drawn else "edited"
        return loss, {f"{name}_{latents.resolution}": float(loss.detach())}

    train(objective.model, task, device, loss_of, on_step, is_excluded=_is_outer, ema_decay=0.9985, optim=OPTIM)
    return objective.model


def _drawable(latents: EditLatents, rows: Tensor) -> Tensor:
    """Return the pictures of edits that captions describe: those before a recolouring, after any other edit."""
    is_before = torch.tensor([latents.edits[int(row)].kind == "recolour" for row in rows])
    return torch.where(is_before[:, None, None, None], latents.before[rows], latents.after[rows])


def _caption(edit: SceneEdit, rng: np.random.Generator) -> str:
    scene = edit.before if edit.kind == "recolour" else edit.after
    return caption_of(tuple(placement.name for placement in scene.placements), scene.background, rng)


def _is_outer(name: str) -> bool:
    """Whether a weight is of the first or last layers or modulates conditions, which are not trained by Muon."""
    return name.startswith(("x_embedder.", "context_embedder.", "time_text_embed.", "norm_out.", "proj_out."))
