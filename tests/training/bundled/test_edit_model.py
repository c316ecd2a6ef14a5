"""training/bundled/edit_*.py: text, weights and export of the model that edits by reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, SD3Transformer2DModel
from safetensors.torch import load_file

from patchedserve.data.emoji.edits import EditDataset
from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.models.bundled import bundled_model_path
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.defaults import read_defaults, read_geometry
from patchedserve.serving.models.loading import load_model
from patchedserve.training.bundled.edit_model import (
    EditText,
    continue_from_emoji_3,
    load_or_encode_edits,
    new_edit_transformer,
    train_edit_model,
)
from patchedserve.training.bundled.edit_text import (
    as_written,
    new_clip,
    new_t5,
    sample_texts,
    t5_ids,
    train_edit_encoder,
    train_edit_tokenizers,
)
from patchedserve.training.bundled.export import export_emoji_edit
from patchedserve.training.bundled.loop import Task
from patchedserve.training.bundled.text import MAX_TOKENS

SMALL, CPU = Resolution(128, 128), torch.device("cpu")
EMOJI_3 = bundled_model_path("emoji-3")
WEIGHTS = EMOJI_3 / "transformer" / "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def tokenizers():
    return train_edit_tokenizers(num_texts=5000)


@pytest.fixture(scope="module")
def text(tokenizers):
    torch.manual_seed(0)
    clip, t5 = tokenizers
    return EditText((clip, new_clip(clip)), (t5, new_t5(t5)), CPU)


@pytest.fixture(scope="module")
def vae():
    return AutoencoderKL.from_pretrained(EMOJI_3 / "vae", torch_dtype=torch.float32)


def test_both_tokenizers_hold_every_text_whole(tokenizers, tmp_path):
    clip, t5 = tokenizers
    texts, targets = sample_texts(400, np.random.default_rng(5))
    assert targets.shape == (400, 4)
    for each in texts:
        assert len(clip(each).input_ids) <= MAX_TOKENS
        assert len(t5(each).input_ids) <= MAX_TOKENS
        assert t5.unk_token_id not in t5(each).input_ids
    assert len(t5.tokenize("replace the maple leaf by an ice cream")) == 8, "words are whole"
    assert t5.unk_token_id not in t5("a kangaroo, painted 7 times!").input_ids, "other words are spelled"
    t5.save_pretrained(tmp_path)
    again = type(t5).from_pretrained(tmp_path)
    assert torch.equal(t5_ids(again, texts[:20]), t5_ids(t5, texts[:20]))


def test_texts_are_written_as_people_do():
    rng = np.random.default_rng(0)
    written = {as_written("make it red", rng) for _ in range(100)}
    assert written == {"make it red", "Make it red", "make it red.", "Make it red."}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_encoder_learns_what_a_text_asks_for(tokenizers, tmp_path):
    figures = []
    train_edit_encoder(tokenizers[1], Task(tmp_path, 60), CPU, lambda step, latest: figures.append(latest["loss"]))
    assert np.mean(figures[-5:]) < 0.6 * np.mean(figures[:5])


def test_joint_blocks_compute_as_those_of_emoji_3(tmp_path):
    """Without what is new (norms of queries and keys, positions), a block is the same function in both models."""
    continue_from_emoji_3(WEIGHTS, tmp_path / "initial.safetensors", seed=0)
    model = new_edit_transformer()
    model.load_state_dict(load_file(tmp_path / "initial.safetensors"))
    theirs = SD3Transformer2DModel.from_pretrained(EMOJI_3 / "transformer", torch_dtype=torch.float32)
    states, words, condition = torch.randn(2, 64, 96), torch.randn(2, 5, 96), torch.randn(2, 96)
    own_block, their_block = model.transformer_blocks[3], theirs.transformer_blocks[3]
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        setattr(own_block.attn, name, torch.nn.Identity())
    with torch.no_grad():
        own = own_block(states, words, condition)
        their = their_block(states, words, condition)
    for one, other in zip(own, their, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()
    # A token's embedding and its prediction, in the order of each pipeline.
    latents = torch.randn(2, 4, 16, 16)
    packed = FluxKontextPipeline._pack_latents(latents, 2, 4, 16, 16)
    with torch.no_grad():
        embedded = theirs.pos_embed.proj(latents).flatten(2).transpose(1, 2)
        assert torch.allclose(model.x_embedder(packed), embedded, atol=1e-5)
        predicted = theirs.proj_out(states).view(2, 8, 8, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(2, 4, 16, 16)
        own_prediction = FluxKontextPipeline._unpack_latents(model.proj_out(states), 16, 16, vae_scale_factor=1)
    assert torch.allclose(own_prediction, predicted, atol=1e-5)
    with pytest.raises(UsageError, match="does not hold the weights of emoji-3"):
        continue_from_emoji_3(EMOJI_3 / "vae" / WEIGHTS.name, tmp_path / "other.safetensors", seed=0)


def test_latents_of_edits_are_kept_and_a_damaged_file_is_named(vae, tmp_path):
    drawn = []
    dataset = EditDataset(SMALL, 3)

    def encode(digest: str):
        return load_or_encode_edits(vae, digest, dataset, tmp_path, CPU, lambda: drawn.append(1))

    first, again = encode("a"), encode("a")
    assert len(drawn) == 3
    assert first.before.shape == first.after.shape == (3, 4, 16, 16)
    assert torch.equal(first.before, again.before)
    assert torch.equal(first.after, again.after)
    assert not torch.equal(first.before, first.after)
    encode("b")
    assert len(drawn) == 6
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match="not a whole file of latents"):
        encode("b")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_lowers_the_loss(text, vae, tmp_path):
    continue_from_emoji_3(WEIGHTS, tmp_path / "initial.safetensors", seed=0)
    sets = [load_or_encode_edits(vae, "x", EditDataset(SMALL, 4), tmp_path, CPU)]
    losses: list[float] = []
    task = Task(tmp_path / "run", 30, initial_weights=tmp_path / "initial.safetensors")
    train_edit_model(
        text, sets, [1.0], task, CPU, lambda step, figures: losses.append(figures["loss"]), batch_pixels=4 * 256
    )
    assert np.mean(losses[-8:]) < 0.9 * np.mean(losses[:4])


@pytest.mark.slow
def test_export_is_a_plain_diffusers_directory_that_sees_references_at_their_own_size(text, tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "emoji-edit"
    autoencoder = AutoencoderKL.from_pretrained(EMOJI_3 / "vae", torch_dtype=torch.float32)
    export_emoji_edit(folder, new_edit_transformer(), autoencoder, text.clip, text.t5)
    defaults = read_defaults(folder)
    assert (defaults.reference_size, defaults.max_sequence_length) == ("own", MAX_TOKENS)
    rule = read_geometry(folder).references
    assert rule is not None
    photo = np.zeros((150, 200, 3), np.uint8)
    assert rule.fitted(photo, 16).resolution == Resolution(192, 144)
    large = np.zeros((3000, 4000, 3), np.uint8)
    assert rule.fitted(large, 16).resolution == Resolution(288, 208), "at most 256 x 256 pixels"
    assert load_model(str(folder), "cpu").family.geometry.references == rule
    pipe: Any = FluxKontextPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    seen = EditDataset(SMALL, 4).images(0)[0]
    image = pipe(
        seen,
        "make it red",
        width=128,
        height=192,
        max_area=128 * 192,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=MAX_TOKENS,
        _auto_resize=False,
    ).images[0]
    assert image.size == (128, 192)
    assert not list(Path(tmp_path).glob(".*")), "no staging folder is left"
