"""Training of `emoji-clip`: a CLIPModel that judges pictures. It shares no weight and no seed with the generators."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from ...data.emoji.dataset import EmojiDataset
from ...data.emoji.scene import BACKGROUNDS
from ...data.resolution import Resolution
from .latents import draw_pool, to_float
from .loop import OnStep, Task, ignore_step, mixed_precision, train
from .optim import OptimConfig
from .text import MAX_TOKENS, is_outside_layers, tokenize

IMAGE_SIDE = 96
PATCH_SIDE = 12
SOURCES: dict[Resolution, int] = {Resolution(128, 128): 6000, Resolution(192, 192): 3000, Resolution(256, 256): 2000}
BATCH_SIZE = 192
MIN_BLUR_SCALE, MAX_NOISE = 0.6, 0.06


def new_judge(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return a new CLIP model with a 5-layer image tower of width 160 on 96 x 96 pixels in 12 x 12 patches."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_act": "gelu",
        **special,
    }
    vision = {
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_hidden_layers": 5,
        "num_attention_heads": 5,
        "image_size": IMAGE_SIDE,
        "patch_size": PATCH_SIDE,
        "hidden_act": "gelu",
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=128))


@dataclass(frozen=True, slots=True)
class JudgePool:
    """Training pictures with their captions and backgrounds.

    Attributes:
        images: half precision [n, 3, 96, 96] in -1..1.
        captions: three wordings for each picture.
        background: number of the background of each picture.
    """

    images: Tensor
    captions: list[list[str]]
    background: np.ndarray


def draw_judge_pool(seed: int, on_image: Callable[[], None] = lambda: None) -> JudgePool:
    """Draw training pictures of the three sizes."""
    pools, captions, grounds = [], [], []
    numbers = {name: number for number, name in enumerate(BACKGROUNDS)}
    rng = np.random.default_rng([seed, 3])
    for resolution, size in SOURCES.items():
        images, scenes = draw_pool(EmojiDataset(resolution, size, "train", seed), on_image)
        small = [F.interpolate(to_float(part), IMAGE_SIDE, mode="bicubic", antialias=True) for part in images.split(64)]
        pools.append(torch.cat(small).half())
        captions += [[scene.in_words(rng) for _ in range(3)] for scene in scenes]
        grounds += [numbers[scene.background] for scene in scenes]
    return JudgePool(torch.cat(pools), captions, np.array(grounds))


def draw_indices(pool: JudgePool, size: int, rng: np.random.Generator) -> np.ndarray:
    """Choose the pictures of a batch: half of the batches take any, the other half only those of two backgrounds.

    Among 192 random pictures few share both their background and an object, so that such batches soon become too easy:
    their accuracy reached 98 % while recall among 1,000 unseen pairs was 74 %.
    """
    allowed = np.arange(len(pool.captions))
    if rng.random() < 0.5:
        allowed = np.flatnonzero(np.isin(pool.background, rng.choice(len(BACKGROUNDS), 2, replace=False)))
    return rng.choice(allowed, size)


def degraded(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur a third of the batch slightly and add noise to it, so that the judge handles decoded pictures, too.

    All pictures are shifted by up to 4 pixels.
    """
    images = images.clone()
    third = len(images) // 3
    scale = rng.uniform(MIN_BLUR_SCALE, 1.0)
    small = F.interpolate(images[:third], scale_factor=scale, mode="bilinear", antialias=True)
    images[:third] = F.interpolate(small, IMAGE_SIDE, mode="bilinear")
    noise = torch.from_numpy(rng.standard_normal(images[:third].shape, np.float32))
    images[:third] += noise * rng.uniform(0, MAX_NOISE)
    shifts = [int(value) for value in rng.integers(-4, 5, size=2)]
    return torch.roll(images, shifts, (2, 3))


def contrastive_loss(model: CLIPModel, images: Tensor, ids: Tensor, captions: list[str]) -> tuple[Tensor, float]:
    """Symmetric cross entropy in which equal captions of a batch share the target equally; returns it with the accuracy
    of choosing a caption.
    """
    output = model(input_ids=ids, pixel_values=images)
    image, text = output.image_embeds.float(), output.text_embeds.float()
    logits = model.logit_scale.clamp(max=4.6).exp() * image @ text.T
    numbers = {caption: number for number, caption in enumerate(captions)}
    groups = torch.tensor([numbers[caption] for caption in captions], device=logits.device)
    target = (groups[:, None] == groups[None]).float()
    target /= target.sum(1, keepdim=True)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    is_right = groups[logits.argmax(1)] == groups
    return loss, float(is_right.float().mean())


def train_judge(
    pool: JudgePool,
    tokenizer: CLIPTokenizer,
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
) -> CLIPModel:
    """Train contrastively on pictures from `draw_judge_pool`; returns the model with averaged weights."""
    torch.manual_seed(task.seed)
    model = new_judge(tokenizer)

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([task.seed, 4, step])
        chosen = draw_indices(pool, BATCH_SIZE, rng)
        words = [pool.captions[index][int(rng.integers(3))] for index in chosen]
        pixels = degraded(pool.images[torch.from_numpy(chosen)].float(), rng).to(device)
        with mixed_precision(device):
            loss, accuracy = contrastive_loss(model, pixels, tokenize(tokenizer, words).to(device), words)
        return loss, {"accuracy": accuracy}

    optim = OptimConfig(muon_lr=2e-3, adam_lr=1.5e-3)
    train(model, task, device, loss_of, on_step, is_excluded=is_outside_layers, ema_decay=0.995, optim=optim)
    return model
