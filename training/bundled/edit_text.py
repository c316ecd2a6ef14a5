"""Tokenizers and text encoders of `emoji-edit`, which reads instructions as well as captions.

A CLIP text model and a T5 encoder, as FLUX.1 has. Both learn to classify from their states what a text asks for: the
kind of edit, the object that goes, the one that comes, and the colour. T5's padding takes part in its attention, as in
the pipeline.
"""

import math
import re
import string
from collections import Counter

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from ...data.emoji.art import object_names
from ...data.emoji.edits import KIND_WEIGHTS, SceneEdit, sample_edit
from ...data.emoji.scene import BACKGROUNDS, sample_scene
from .loop import OnStep, Task, ignore_step
from .text import (
    ANY_RESOLUTION,
    MAX_TOKENS,
    TEXTS_PER_BATCH,
    TOKENIZER_CAPTIONS,
    TextReader,
    clip_text_config,
    tokenize,
    train_byte_pairs,
    train_reader,
)

CLIP_WIDTH, T5_WIDTH = 96, 128
CAPTION_SHARE = 0.2
"""Part of the texts that are captions of scenes to draw instead of instructions."""
_KINDS = ("draw", *KIND_WEIGHTS)
LETTER_SCORE = -15.0
"""Logarithm of the chance of a letter: a word is never spelled if it is a piece."""


def sample_texts(num_texts: int, rng: np.random.Generator) -> tuple[list[str], Tensor]:
    """Return training texts and what they ask for, int64 [n, 4]: kind, object that goes (of a caption: the first),
    object that comes (the second), colour; the class after the last one of each stands for none.
    """
    names, grounds = object_names(), list(BACKGROUNDS)
    texts, rows = [], []
    for _ in range(num_texts):
        if rng.random() < CAPTION_SHARE:
            scene = sample_scene(rng, ANY_RESOLUTION, "train")
            shown = [placement.name for placement in scene.placements] + [""]
            text, kind, old, new, colour = scene.caption, "draw", shown[0], shown[1], scene.background
        else:
            edit = sample_edit(rng, ANY_RESOLUTION, "train")
            text, kind, old, new, colour = edit.instruction, edit.kind, _named(edit), edit.new, edit.colour
        texts.append(as_written(text, rng))
        objects = [names.index(name) if name else len(names) for name in (old, new)]
        rows.append([_KINDS.index(kind), *objects, grounds.index(colour) if colour else len(grounds)])
    return texts, torch.tensor(rows)


def as_written(text: str, rng: np.random.Generator) -> str:
    """Return a text as people may write it: with or without a capital and a full stop."""
    text = text[0].upper() + text[1:] if rng.random() < 0.25 else text
    return f"{text}." if rng.random() < 0.1 else text


def _named(edit: SceneEdit) -> str:
    """Return the object that an instruction names as the old one: "make it red" names none."""
    return "" if edit.kind == "recolour" and f" {edit.old}" not in edit.instruction else edit.old


def train_edit_tokenizers(seed: int = 0, num_texts: int = TOKENIZER_CAPTIONS) -> tuple[CLIPTokenizer, T5Tokenizer]:
    """Return a tokenizer for each encoder, learnt from the same texts.

    T5's is a unigram model whose pieces are the words of the texts, and letters for all others.
    """
    texts, _ = sample_texts(num_texts, np.random.default_rng([seed, 78]))
    counts = Counter(word for text in texts for word in re.findall(r"[^\s,.]+", text))
    words = {f"\u2581{word}": math.log(count / counts.total()) for word, count in sorted(counts.items())}
    letters = ("\u2581", *string.printable.strip(), *(f"\u2581{letter}" for letter in string.ascii_lowercase))
    words |= {letter: LETTER_SCORE for letter in letters if letter not in words}
    special = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    return train_byte_pairs(texts), T5Tokenizer(vocab=special + list(words.items()), extra_ids=0)


def t5_ids(tokenizer: T5Tokenizer, texts: list[str]) -> Tensor:
    """Return token ids int64 [n, MAX_TOKENS], padded and truncated as in `FluxPipeline`."""
    return tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt").input_ids


def new_clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(clip_text_config(CLIP_WIDTH, 2, tokenizer))


def new_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=4 * T5_WIDTH,
        num_layers=3,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def train_edit_encoder(
    tokenizer: CLIPTokenizer | T5Tokenizer, task: Task, device: torch.device, on_step: OnStep = ignore_step
) -> CLIPTextModel | T5EncoderModel:
    """Train the encoder of a tokenizer to read texts; returns it with averaged weights."""
    torch.manual_seed(task.seed)
    num_objects, num_colours = len(object_names()) + 1, len(BACKGROUNDS) + 1
    sizes = (len(_KINDS), num_objects, num_objects, num_colours)
    encoder: CLIPTextModel | T5EncoderModel
    if isinstance(tokenizer, CLIPTokenizer):
        encoder = new_clip(tokenizer)
        reader = TextReader(encoder, CLIP_WIDTH, lambda model, ids: model(input_ids=ids).pooler_output, sizes)
    else:
        encoder = new_t5(tokenizer)
        # The mean of the states, which the generator sees one by one.
        reader = TextReader(encoder, T5_WIDTH, lambda model, ids: model(input_ids=ids).last_hidden_state.mean(1), sizes)

    def draw(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        texts, targets = sample_texts(TEXTS_PER_BATCH, rng)
        ids = tokenize(tokenizer, texts) if isinstance(tokenizer, CLIPTokenizer) else t5_ids(tokenizer, texts)
        return ids, targets

    train_reader(reader, draw, task, device, on_step)
    return encoder
