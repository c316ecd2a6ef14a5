"""Training of the bundled generators on cached latents: `emoji-xl` (U-Net), `emoji-3` (diffusion transformer)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from diffusers import DDPMScheduler, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from ...data.resolution import Resolution
from .joint_attention import RepeatedTokenJointAttention
from .latents import LatentSet
from .loop import OnStep, Task, ignore_step, mixed_precision, train
from .optim import OptimConfig
from .text import tokenize

CAPTION_DROPOUT = 0.1
BATCH_PIXELS = 12288
ZERO_TOKENS = 256  # diffusers' default max_sequence_length when SD3 has no T5
BETAS = {"beta_start": 0.00085, "beta_end": 0.02, "beta_schedule": "scaled_linear"}
FLOW_SHIFT = 1.5
OPTIM = OptimConfig(muon_lr=2e-3, adam_lr=1.5e-3)
OUTER_LAYERS = (
    "conv_in.",
    "conv_out.",
    "pos_embed.",
    "x_embedder.",
    "time_emb",
    "add_emb",
    "text_emb",
    "context_embedder.",
    "norm_out.",
)
LAST_LAYER = "proj_out.weight"  # the transformer's; inside the U-Net's blocks the name stands for hidden layers
AnySet = TypeVar("AnySet")
ANY_ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True, slots=True)
class TextStates:
    """Text conditions of a generator: token states [n, MAX_TOKENS, channels] and pooled state [n, channels]."""

    tokens: Tensor
    pooled: Tensor


class TextTower:
    """Both text encoders of a generator, frozen, used as the pipelines use them (penultimate hidden state)."""

    def __init__(self, tokenizer: CLIPTokenizer, encoders: list[CLIPTextModelWithProjection]) -> None:
        self.tokenizer, self.encoders = tokenizer, [encoder.eval().requires_grad_(False) for encoder in encoders]

    @torch.no_grad()
    def __call__(self, captions: list[str], *, is_pooled_joined: bool) -> TextStates:
        ids = tokenize(self.tokenizer, captions).to(self.encoders[0].device)
        outputs = [encoder(input_ids=ids, output_hidden_states=True) for encoder in self.encoders]
        tokens = torch.cat([output.hidden_states[-2] for output in outputs], -1)
        pooled = torch.cat([o.text_embeds for o in outputs], -1) if is_pooled_joined else outputs[-1].text_embeds
        return TextStates(tokens, pooled)


class Objective(Protocol):
    """Training objective of one family of generators, on batches of latents fp32 [n, 4, h, w] with captions."""

    @property
    def model(self) -> nn.Module: ...

    def loss(
        self, latents: Tensor, captions: list[str], resolution: Resolution, rng: np.random.Generator
    ) -> Tensor: ...


class UNetObjective:
    """v-prediction over the scaled-linear schedule (T. Salimans and J. Ho, 2022), SDXL's added conditions."""

    def __init__(self, text: TextTower) -> None:
        self.text = text
        self.model = new_unet()
        self.schedule = DDPMScheduler(num_train_timesteps=1000, prediction_type="v_prediction", **BETAS)

    def loss(self, latents: Tensor, captions: list[str], resolution: Resolution, rng: np.random.Generator) -> Tensor:
        states = self.text(_with_dropout(captions, rng, 0.3 * CAPTION_DROPOUT), is_pooled_joined=False)
        # An empty negative prompt is a zero state in SDXL's pipeline (force_zeros_for_empty_prompt).
        keep = torch.from_numpy(rng.random(len(captions)) >= 0.7 * CAPTION_DROPOUT).to(latents)
        noise = torch.from_numpy(rng.standard_normal(latents.shape, np.float32)).to(latents.device)
        # Evenly spread timesteps: less noise in the loss than independent ones.
        spread = (np.arange(len(captions)) + rng.random(len(captions))) / len(captions)
        timesteps = torch.from_numpy((spread * 1000).astype(np.int64)).to(latents.device)
        noisy = self.schedule.add_noise(latents, noise, timesteps)  # type: ignore[arg-type]
        target = self.schedule.get_velocity(latents, noise, timesteps)  # type: ignore[arg-type]
        width, height = resolution
        time_ids = torch.tensor([[height, width, 0, 0, height, width]]).repeat(len(captions), 1).to(latents)
        added = {"text_embeds": states.pooled * keep[:, None], "time_ids": time_ids}
        tokens = states.tokens * keep[:, None, None]
        with mixed_precision(latents.device):
            predicted = self.model(noisy, timesteps, tokens, added_cond_kwargs=added).sample
        return F.mse_loss(predicted.float(), target)


def flow_noised(latents: Tensor, resolution: Resolution, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy latents, their noise and their sigmas (n,), for latents [n, channels, height, width].

    Timesteps are logit-normal (P. Esser et al., 2024), shifted more for larger pictures.
    """
    noise = torch.from_numpy(rng.standard_normal(latents.shape, np.float32)).to(latents.device)
    position = 1 / (1 + np.exp(-rng.standard_normal(len(latents), np.float32)))
    shift = FLOW_SHIFT * (resolution.pixels / 192**2) ** 0.25
    sigma = torch.from_numpy(shift * position / (1 + (shift - 1) * position)).to(latents)
    return torch.lerp(latents, noise, sigma[:, None, None, None]), noise, sigma


class TransformerObjective:
    """Rectified flow (P. Esser et al., 2024)."""

    def __init__(self, text: TextTower) -> None:
        self.text = text
        self.model = new_transformer()
        for block in self.model.transformer_blocks:
            block.attn.set_processor(RepeatedTokenJointAttention(ZERO_TOKENS))  # type: ignore[union-attr]

    def loss(self, latents: Tensor, captions: list[str], resolution: Resolution, rng: np.random.Generator) -> Tensor:
        states = self.text(_with_dropout(captions, rng, CAPTION_DROPOUT), is_pooled_joined=True)
        tokens = F.pad(states.tokens, (0, 0, 0, 1))
        noisy, noise, sigma = flow_noised(latents, resolution, rng)
        with mixed_precision(latents.device):
            predicted = self.model(noisy, tokens, states.pooled, 1000 * sigma).sample
        return F.mse_loss(predicted.float(), noise - latents)


def new_unet() -> UNet2DConditionModel:
    """Return a small U-Net of SDXL's architecture: 7 blocks, of which the 2 deeper levels and the middle attend to the
    text.

    Every residual branch starts at zero (P. Dhariwal and A. Nichol, 2021), which the class itself does not do.
    """
    model = UNet2DConditionModel(
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(64, 96, 96),
        layers_per_block=1,
        transformer_layers_per_block=1,
        attention_head_dim=(2, 3, 3),  # pyright: ignore[reportArgumentType]  # annotated as a tuple of one
        cross_attention_dim=160,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96 + 6 * 32,
        use_linear_projection=True,
        norm_num_groups=16,
    )
    zero_weights(module for name, module in model.named_modules() if name.endswith(("conv2", "proj_out", "conv_out")))
    return model


def new_transformer() -> SD3Transformer2DModel:
    """Return a small transformer of SD3's architecture: 10 joint blocks of width 96.

    The modulation of every block starts at zero (adaLN-Zero; W. Peebles and S. Xie, 2023, section 3.2).
    """
    model = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=10,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=160,
        caption_projection_dim=96,
        pooled_projection_dim=160,
        pos_embed_max_size=32,
    )
    modulations = ("norm1.linear", "norm1_context.linear", "norm_out.linear")
    zero_weights(module for name, module in model.named_modules() if name.endswith(modulations) or name == "proj_out")
    return model


@torch.no_grad()
def zero_weights(modules: Iterable[nn.Module]) -> None:
    """Set weights and biases of linear and convolution layers to zero."""
    for module in modules:
        assert isinstance(module, nn.Linear | nn.Conv2d)
        module.weight.zero_()
        if module.bias is not None:
            module.bias.zero_()


def train_generator(
    objective: Objective,
    sets: list[LatentSet],
    weights: Sequence[float],
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
    *,
    batch_pixels: int = BATCH_PIXELS,
    optim: OptimConfig = OPTIM,
) -> nn.Module:
    """Train on cached latents; returns the model with averaged weights.

    Each batch of `batch_pixels` latent positions comes from one of the sets, drawn by their weights.
    """

    def loss_of(latent_set: LatentSet, rng: np.random.Generator) -> tuple[Tensor, str]:
        latents, captions = _draw_batch(latent_set, batch_pixels, rng)
        # At these short sequences the backward pass of the CPU's flash kernel takes a fifth of a step; the plain
        # one does not.
        with sdpa_kernel([SDPBackend.MATH] if device.type == "cpu" else list(ANY_ATTENTION)):
            loss = objective.loss(latents.to(device), captions, latent_set.resolution, rng)
        return loss, f"loss_{latent_set.resolution}"

    train_on_sets(objective.model, sets, weights, loss_of, task, device, on_step, optim=optim)
    return objective.model


def train_on_sets(
    model: nn.Module,
    sets: Sequence[AnySet],
    weights: Sequence[float],
    loss_of: Callable[[AnySet, np.random.Generator], tuple[Tensor, str]],
    task: Task,
    device: torch.device,
    on_step: OnStep,
    *,
    optim: OptimConfig = OPTIM,
) -> None:
    """Train a generator on batches from one of several sets, drawn by their weights, as `loop.train`.

    `loss_of` returns the loss of a batch, and the name of the figure that it is logged as.
    """
    chances = np.array(weights) / sum(weights)

    def loss_of_step(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([task.seed, 9, step])
        loss, name = loss_of(sets[int(rng.choice(len(sets), p=chances))], rng)
        return loss, {name: float(loss.detach())}

    train(model, task, device, loss_of_step, on_step, is_excluded=_is_outer, ema_decay=0.9985, optim=optim)


def _draw_batch(latent_set: LatentSet, batch_pixels: int, rng: np.random.Generator) -> tuple[Tensor, list[str]]:
    latents = latent_set.latents
    size = max(1, batch_pixels // (latents.shape[2] * latents.shape[3]))
    chosen = rng.integers(len(latents), size=size)
    captions = [latent_set.scenes[index].in_words(rng) for index in chosen]
    return latents[torch.from_numpy(chosen)].float(), captions


def _with_dropout(captions: list[str], rng: np.random.Generator, chance: float) -> list[str]:
    is_dropped = rng.random(len(captions)) < chance
    return ["" if dropped else caption for caption, dropped in zip(captions, is_dropped, strict=True)]


def _is_outer(name: str) -> bool:
    """Whether a weight is of the first or last layers or modulates conditions, which are not trained by Muon."""
    return name == LAST_LAYER or any(part in name for part in OUTER_LAYERS)
