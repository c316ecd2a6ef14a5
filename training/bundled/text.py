"""Tokenizer and text encoders of the bundled generators.

Both encoders are CLIP text towers of different widths, as in SDXL and SD3. They are trained to classify from the
projected pooled state what a caption describes (which objects, in which order, how many, on which background), so that
the generators receive states that contain exactly this. No image is used, and the judge (`emoji-clip`) shares nothing
with them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from ...data.emoji.art import object_names
from ...data.emoji.scene import BACKGROUNDS, Scene, sample_scene
from ...data.resolution import Resolution
from .loop import OnStep, Task, ignore_step, train
from .optim import OptimConfig

MAX_TOKENS = 24
VOCABULARY = 1000
TOKENIZER_CAPTIONS = 20_000
TEXTS_PER_BATCH = 128
START, END = "<|startoftext|>", "<|endoftext|>"
ANY_RESOLUTION = Resolution(128, 128)
# Filler words, so that free wording ("a photo of", "picture", "the") is not spelled out letter by letter.
EXTRA_TEXT = (
    "a photo of the picture image drawing emoji with one two three and on in front background colour color flat"
)


def train_tokenizer(seed: int = 0) -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer in CLIP's form, learnt from training captions (held-out pairs contain no new
    words).
    """
    rng = np.random.default_rng([seed, 77])
    captions = [sample_scene(rng, ANY_RESOLUTION, "train").caption for _ in range(TOKENIZER_CAPTIONS)]
    return train_byte_pairs(captions + [EXTRA_TEXT] * 50)


def train_byte_pairs(texts: list[str]) -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer in CLIP's form, learnt from these texts."""
    blank = CLIPTokenizer()
    bpe = Tokenizer(models.BPE(unk_token=END, end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert blank.backend_tokenizer.pre_tokenizer is not None
    bpe.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    vocab = bpe.get_vocab()
    # BPE training adds "x</w>" forms only for letters that end a word; every byte needs both, or text is lost.
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(f"{letter}</w>", len(vocab))
    # The constructor takes pairs, although its annotation says strings.
    merges: Any = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def new_text_encoder(width: int, num_layers: int, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_text_config(width, num_layers, tokenizer))


def clip_text_config(width: int, num_layers: int, tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    """Return the configuration of a text model of CLIP with heads of width 32."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=width,
        hidden_act="gelu",
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )


def is_outside_layers(name: str) -> bool:
    """Whether a weight of a CLIP or T5 model is an embedding or a projection, which are not trained by Muon."""
    return "layers" not in name and "block" not in name


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return token ids int64 [n, MAX_TOKENS], padded and truncated as in diffusers' pipelines."""
    encoded = tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    return encoded.input_ids


def scene_targets(scenes: list[Scene]) -> Tensor:
    """Return class numbers int64 [n, 3]: first object, second object, background.

    The class after the last object means that there is no second one.
    """
    names, grounds = object_names(), list(BACKGROUNDS)
    rows = []
    for scene in scenes:
        shown = [names.index(placement.name) for placement in scene.placements]
        rows.append([shown[0], shown[1] if len(shown) > 1 else len(names), grounds.index(scene.background)])
    return torch.tensor(rows)


class TextReader(nn.Module):
    """A text encoder with the classifiers that it is trained through; only the encoder is kept.

    Args:
        encoder: the encoder.
        width: width of its states.
        states: returns the states [n, width] of token ids [n, length], given the encoder.
        sizes: number of classes of each classifier.
    """

    def __init__(
        self, encoder: nn.Module, width: int, states: Callable[[Any, Tensor], Tensor], sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.states = states
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Return the loss and the accuracy of ids [n, length] and class numbers [n, classifiers]."""
        states = self.states(self.encoder, ids)
        loss = torch.zeros((), device=ids.device)
        is_right = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for head, target in zip(self.heads, targets.T, strict=True):
            logits = head(states)
            loss = loss + F.cross_entropy(logits, target)
            is_right &= logits.argmax(1) == target
        return loss, float(is_right.float().mean())


def caption_reader(encoder: CLIPTextModelWithProjection) -> TextReader:
    """Return a reader of captions, whose targets are those of `scene_targets`."""
    width, num_objects = encoder.config.projection_dim, len(object_names())
    assert width is not None
    sizes = (num_objects, num_objects + 1, len(BACKGROUNDS))
    return TextReader(encoder, width, lambda model, ids: model(input_ids=ids).text_embeds, sizes)


def train_reader(
    reader: TextReader,
    draw: Callable[[np.random.Generator], tuple[Tensor, Tensor]],
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
) -> None:
    """Train a reader on batches of ids and class numbers that `draw` returns, as `loop.train`."""

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        ids, targets = draw(np.random.default_rng([task.seed, 5, step]))
        loss, accuracy = reader(ids.to(device), targets.to(device))
        return loss, {"accuracy": accuracy}

    optim = OptimConfig(muon_lr=2e-3, adam_lr=2e-3)
    train(reader, task, device, loss_of, on_step, is_excluded=is_outside_layers, ema_decay=0.99, optim=optim)


def train_text_encoder(
    encoder: CLIPTextModelWithProjection,
    tokenizer: CLIPTokenizer,
    task: Task,
    device: torch.device,
    on_step: OnStep = ignore_step,
) -> CLIPTextModelWithProjection:
    """Train an encoder to classify captions; returns it with averaged weights."""

    def draw(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        scenes = [sample_scene(rng, ANY_RESOLUTION, "train") for _ in range(TEXTS_PER_BATCH)]
        return tokenize(tokenizer, [scene.caption for scene in scenes]), scene_targets(scenes)

    train_reader(caption_reader(encoder), draw, task, device, on_step)
    return encoder
