"""CLIP as a judge, with a tiny random CLIP model and hand-made embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from patchedserve.data.errors import RunError, UsageError
from patchedserve.eval.metrics import clip as clip_module
from patchedserve.eval.metrics.clip import Clip, clip_scores, load_clip, retrieval_recall, zero_shot

from ...support.tiny_models import tiny_tokenizer


def tiny_clip_folder(folder: Path) -> Path:
    """Save a CLIP model with random weights and its processor in the form of a user's folder."""
    tower: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tokenizer = tiny_tokenizer()
    config = CLIPConfig(
        text_config=tower
        | {"vocab_size": 190, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        vision_config=tower | {"image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return load_clip(tiny_clip_folder(tmp_path_factory.mktemp("clip")))


def _images(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20 + i % 2 * 8, 24, 3), dtype=np.uint8)) for i in range(count)]


def test_embeddings_equal_those_of_the_full_model(clip: Clip, tmp_path: Path) -> None:
    images, texts = _images(3), ["a fox", "a cat on a hat", "b"]
    processor: Any = CLIPProcessor.from_pretrained(tiny_clip_folder(tmp_path))
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    with torch.inference_mode():
        expected = clip.model(**inputs)
    for found, whole in (
        (clip.embed_images(images), expected.image_embeds),
        (clip.embed_texts(texts), expected.text_embeds),
    ):
        assert torch.allclose(found, whole, atol=1e-5)
        assert torch.allclose(found.norm(dim=-1), torch.ones(3))


def test_batching_preserves_embeddings_and_order(clip: Clip) -> None:
    images, texts = _images(5), ["a", "a fox", "a fox on a hat", "bb", "c"]
    assert torch.allclose(clip.embed_images(images, 2), clip.embed_images(images), atol=1e-6)
    assert torch.allclose(clip.embed_texts(texts, 2), clip.embed_texts(texts), atol=1e-6)
    assert clip.embed_images([]).shape == clip.embed_texts([]).shape == (0, 8)


def test_long_texts_are_truncated(clip: Clip) -> None:
    assert torch.allclose(clip.embed_texts(["x y " * 40]), clip.embed_texts(["x y " * 50]))


def test_class_embeddings_average_templates(clip: Clip) -> None:
    found = clip.embed_classes(["fox", "cat"], ["{}", "a {}"])
    for i, name in enumerate(("fox", "cat")):
        mean = clip.embed_texts([name, f"a {name}"]).mean(0)
        assert torch.allclose(found[i], mean / mean.norm(), atol=1e-6)
    for templates in ([], ["a fox"]):
        with pytest.raises(UsageError, match="templates"):
            clip.embed_classes(["fox"], templates)


def test_unknown_models_give_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(clip_module, "bundled_model_path", lambda name: tmp_path / "not-there")
    for source in (tmp_path / "empty", tmp_path / "none", "nobody/no-such-clip", "emoji-clip"):
        with pytest.raises(RunError) as caught:
            load_clip(source)
        assert str(source) in str(caught.value)
        assert "\n" not in str(caught.value)


# Embeddings in the plane, by their angle in degrees.
def _at(*degrees: float) -> torch.Tensor:
    angles = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_retrieval_recall_matches_manual_values() -> None:
    images, texts = _at(0, 10, 100, 200), _at(4, 3, 110, 330)
    captions = ["a", "b", "c", "d"]
    # Nearest texts: image 0 -> text 1 (wrong), 1 -> 0 (wrong), 2 -> 2 (right), 3 -> 2 (wrong, 90 against 130 degrees).
    assert retrieval_recall(images, texts, captions, 1) == 0.25
    assert retrieval_recall(images, texts, captions, 2) == 1.0
    assert retrieval_recall(images, texts, ["a", "a", "c", "d"], 1) == 0.75
    assert retrieval_recall(images, texts, ["a", "a", "c", "c"], 1) == 1.0
    # Neighbours from texts to images differ: text 3 is nearest to image 0.
    assert retrieval_recall(texts, images, captions, 1) == 0.5


def test_zero_shot_and_clip_scores_match_manual_values() -> None:
    classes = _at(0, 90, 180)
    assert zero_shot(_at(80, 170, 350), classes).tolist() == [[1], [2], [0]]
    assert zero_shot(_at(80, 170), classes, 2).tolist() == [[1, 0], [2, 1]]
    assert clip_scores(_at(0, 0, 0), _at(60, 0, 180)).tolist() == pytest.approx([50, 100, 0], rel=1e-5)


def test_mismatched_counts_are_refused() -> None:
    with pytest.raises(UsageError, match="3 captions"):
        retrieval_recall(_at(0, 1), _at(0, 1), ["a", "b", "c"])
    with pytest.raises(UsageError, match="k is 3"):
        retrieval_recall(_at(0, 1), _at(0, 1), ["a", "b"], 3)
    with pytest.raises(UsageError, match="at least one"):
        retrieval_recall(_at(), _at(), [])
    with pytest.raises(UsageError, match="k is 0"):
        zero_shot(_at(0), _at(0, 1), 0)
    with pytest.raises(UsageError, match="must be equal"):
        clip_scores(_at(0), _at(0, 1))
