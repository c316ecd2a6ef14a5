"""The parts of the bundled models before training: tokenizer, text encoders, autoencoder, generators, export."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline
from transformers import CLIPModel, CLIPProcessor

from patchedserve.data.emoji.dataset import EmojiDataset
from patchedserve.data.emoji.scene import BACKGROUNDS, sample_scene
from patchedserve.data.models.bundled import CARD_FILES, read_checksums, verify_bundled, write_checksums
from patchedserve.data.resolution import Resolution
from patchedserve.training.bundled.autoencoder import new_autoencoder, normalise_latents, reconstruction_loss
from patchedserve.training.bundled.export import export_emoji_3, export_emoji_clip, export_emoji_xl
from patchedserve.training.bundled.generators import (
    ZERO_TOKENS,
    TextTower,
    TransformerObjective,
    UNetObjective,
    new_transformer,
    new_unet,
    train_generator,
)
from patchedserve.training.bundled.joint_attention import RepeatedTokenJointAttention
from patchedserve.training.bundled.judge import contrastive_loss, degraded, new_judge
from patchedserve.training.bundled.latents import draw_pool, load_or_encode, random_crops, to_float
from patchedserve.training.bundled.loop import Task
from patchedserve.training.bundled.text import (
    MAX_TOKENS,
    caption_reader,
    new_text_encoder,
    scene_targets,
    tokenize,
    train_tokenizer,
)

SMALL = Resolution(128, 128)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def encoders(tokenizer):
    torch.manual_seed(0)
    return [new_text_encoder(64, 2, tokenizer).eval(), new_text_encoder(96, 3, tokenizer).eval()]


@pytest.mark.slow
def test_tokenizer_round_trips_any_text_and_all_captions_fit(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    strange = "zürich: a t-rex, 7 kiwis & çédille!"
    ids = again(strange).input_ids
    assert again.decode(ids, skip_special_tokens=True).replace(" ", "") == strange.replace(" ", "")
    rng = np.random.default_rng(0)
    captions = [sample_scene(rng, SMALL, "heldout").caption for _ in range(300)]
    assert max(len(again(caption).input_ids) for caption in captions) <= MAX_TOKENS
    assert tokenize(again, captions).shape == (300, MAX_TOKENS)


def test_scene_targets_name_objects_and_background():
    rng = np.random.default_rng(1)
    scenes = [sample_scene(rng, SMALL, "train") for _ in range(50)]
    from patchedserve.data.emoji.art import object_names

    names = [*object_names(), None]
    for scene, (first, second, ground) in zip(scenes, scene_targets(scenes).tolist(), strict=True):
        shown = [placement.name for placement in scene.placements]
        assert [names[first], names[second]] == [*shown, None][:2]
        assert list(BACKGROUNDS)[ground] == scene.background


@pytest.mark.slow
def test_the_caption_reader_trains_its_encoder(tokenizer):
    torch.manual_seed(0)
    reader = caption_reader(new_text_encoder(64, 2, tokenizer))
    rng = np.random.default_rng(0)
    scenes = [sample_scene(rng, SMALL, "train") for _ in range(4)]
    loss, accuracy = reader(tokenize(tokenizer, [scene.caption for scene in scenes]), scene_targets(scenes))
    loss.backward()
    assert 0 <= accuracy <= 1
    gradient = reader.encoder.text_projection.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


@pytest.mark.slow
def test_normalised_latents_have_unit_scale_and_decode_equally():
    torch.manual_seed(0)
    vae: Any = new_autoencoder().eval()
    pool, _ = draw_pool(EmojiDataset(SMALL, 8))
    with torch.no_grad():
        before = vae.decode(vae.encode(to_float(pool)).latent_dist.mean).sample
        spread = vae.encode(to_float(pool)).latent_dist.std
        normalise_latents(vae, [pool])
        posterior = vae.encode(to_float(pool)).latent_dist
        after = vae.decode(posterior.mean).sample
    codes = posterior.mean.transpose(0, 1).flatten(1)
    torch.testing.assert_close(codes.mean(1), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(codes.std(1), torch.ones(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(posterior.std, spread)


def test_the_reconstruction_loss_is_zero_only_for_a_perfect_copy():
    vae = new_autoencoder()
    images = to_float(random_crops([draw_pool(EmojiDataset(SMALL, 2))[0]], 2, 64, np.random.default_rng(0)))
    loss, figures = reconstruction_loss(vae, images, torch.Generator().manual_seed(0))
    assert float(loss.detach()) > figures["l1"] > 0


def test_one_repeated_token_equals_all_repetitions():
    torch.manual_seed(0)
    model: Any = new_transformer().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    latents, pooled, text = torch.randn(2, 4, 16, 24), torch.randn(2, 160), torch.randn(2, MAX_TOKENS, 160)
    timesteps = torch.tensor([900.0, 200.0])
    zeros = torch.zeros(2, ZERO_TOKENS, 160)
    with torch.no_grad():
        expected = model(latents, torch.cat([text, zeros], 1), pooled, timesteps).sample
        for block in model.transformer_blocks:
            block.attn.set_processor(RepeatedTokenJointAttention(ZERO_TOKENS))
        actual = model(latents, torch.cat([text, zeros[:, :1]], 1), pooled, timesteps).sample
    assert expected.std() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_latents_are_encoded_once_per_autoencoder(tmp_path):
    vae = new_autoencoder().eval()
    drawn = []
    dataset = EmojiDataset(SMALL, 3)

    def encode(digest):
        return load_or_encode(vae, digest, dataset, tmp_path, torch.device("cpu"), lambda: drawn.append(1))

    first, again = encode("a"), encode("a")
    assert len(drawn) == 3
    assert torch.equal(first.latents, again.latents)
    assert first.latents.shape == (3, 4, 16, 16)
    encode("b")
    assert len(drawn) == 6


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("objective_class", [UNetObjective, TransformerObjective])
def test_generator_overfits_a_single_image(objective_class, tokenizer, encoders, tmp_path):
    torch.manual_seed(0)
    dataset = EmojiDataset(SMALL, 1)
    latent_set = load_or_encode(new_autoencoder(), "x", dataset, tmp_path, torch.device("cpu"))
    losses = []
    task = Task(tmp_path / "run", 40)
    objective = objective_class(TextTower(tokenizer, encoders))

    def on_step(step: int, figures: dict[str, float]) -> None:
        losses.append(figures["loss"])

    train_generator(objective, [latent_set], [1.0], task, torch.device("cpu"), on_step, batch_pixels=4 * 256)
    assert np.mean(losses[-8:]) < 0.85 * np.mean(losses[:2])


@pytest.mark.slow
def test_exported_generators_are_plain_diffusers_directories(tokenizer, encoders, tmp_path):
    torch.manual_seed(0)
    export_emoji_xl(tmp_path / "xl", new_unet(), new_autoencoder(), tokenizer, encoders)
    export_emoji_3(tmp_path / "3", new_transformer(), new_autoencoder(), tokenizer, encoders)
    for pipeline_class, name in ((StableDiffusionXLPipeline, "xl"), (StableDiffusion3Pipeline, "3")):
        pipe: Any = pipeline_class.from_pretrained(tmp_path / name)
        pipe.set_progress_bar_config(disable=True)
        image = pipe("a red apple on a blue background", width=128, height=192, num_inference_steps=2).images[0]
        assert image.size == (128, 192)
        if name == "3":
            states = pipe.encode_prompt("a fox", None, None)[0]
            assert states.shape == (1, MAX_TOKENS + ZERO_TOKENS, 160)
            assert states[:, MAX_TOKENS:].abs().max() == 0
            assert states[:, :MAX_TOKENS].abs().max() > 0
    assert not list(tmp_path.glob(".*")), "no staging folder is left"


def test_exported_judge_is_a_plain_clip_model(tokenizer, tmp_path):
    torch.manual_seed(0)
    export_emoji_clip(tmp_path / "clip", new_judge(tokenizer), tokenizer)
    model = CLIPModel.from_pretrained(tmp_path / "clip")
    processor: Any = CLIPProcessor.from_pretrained(tmp_path / "clip")
    images = [EmojiDataset(size, 1).image(0) for size in (SMALL, Resolution(192, 128))]
    inputs = processor(text=["a red apple", "a fox"], images=images, padding="max_length", return_tensors="pt")
    assert model(**inputs).logits_per_image.shape == (2, 2)


def test_export_keeps_the_card_and_updates_checksums(tokenizer, tmp_path):
    folder = tmp_path / "emoji-clip"
    folder.mkdir()
    for name in (*CARD_FILES, "stale.bin"):
        (folder / name).write_text(name)
    write_checksums(tmp_path)
    export_emoji_clip(folder, new_judge(tokenizer), tokenizer)
    assert [(folder / name).read_text() for name in CARD_FILES] == list(CARD_FILES)
    assert not (folder / "stale.bin").exists()
    assert verify_bundled("emoji-clip", tmp_path) == []
    assert "emoji-clip/model.safetensors" in read_checksums(tmp_path)
    assert not list(tmp_path.glob(".*")), "no staging folder is left"


def test_contrastive_loss_accepts_equal_captions_as_matches(tokenizer):
    torch.manual_seed(0)
    model = new_judge(tokenizer)
    images = degraded(torch.rand(6, 3, 96, 96), np.random.default_rng(0))
    captions = ["a fox"] * 6
    loss, accuracy = contrastive_loss(model, images, tokenize(tokenizer, captions), captions)
    assert accuracy == 1.0
    assert torch.isfinite(loss)
