"""training/bundled/continuation.py: training that starts from the bundled models."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patchedserve.data.errors import UsageError
from patchedserve.data.files import sha256_of
from patchedserve.data.models.bundled import bundled_model_path
from patchedserve.training.bundled.continuation import WEIGHT_FILES, adopt_parts, load_initial_weights, save_part
from patchedserve.training.bundled.generators import new_transformer, new_unet

MODELS = bundled_model_path("emoji-xl").parent


def test_parts_are_loaded_in_full_precision(tmp_path: Path) -> None:
    adopt_parts(MODELS, tmp_path)
    taken = load_file(tmp_path / "autoencoder" / "model" / "diffusion_pytorch_model.safetensors")
    shipped = load_file(MODELS / "emoji-3" / "vae" / "diffusion_pytorch_model.safetensors")
    assert taken.keys() == shipped.keys()
    for name, tensor in taken.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, shipped[name].float())
    for part, source in (("small-model", "text_encoder"), ("large-model", "text_encoder_2")):
        taken = load_file(tmp_path / "text" / part / "model.safetensors")
        shipped = load_file(MODELS / "emoji-3" / source / "model.safetensors")
        assert all(torch.equal(tensor, shipped[name].float()) for name, tensor in taken.items())
    assert (tmp_path / "text" / "tokenizer" / "tokenizer_config.json").is_file()


class HalfWritten:
    """A model whose writing is interrupted by Ctrl-C."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt


def test_truncated_part_is_not_taken_as_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        save_part(HalfWritten(), tmp_path / "text" / "tokenizer")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    adopt_parts(MODELS, tmp_path)
    assert (tmp_path / "text" / "tokenizer" / "tokenizer_config.json").is_file()
    with pytest.raises(KeyboardInterrupt):
        save_part(HalfWritten(), tmp_path / "text" / "tokenizer")
    assert (tmp_path / "text" / "tokenizer" / "tokenizer_config.json").is_file()
    assert not list(tmp_path.rglob(".*"))


def test_existing_parts_are_kept(tmp_path: Path) -> None:
    own = tmp_path / "autoencoder" / "model"
    own.mkdir(parents=True)
    adopt_parts(MODELS, tmp_path)
    assert list(own.iterdir()) == []


@pytest.mark.parametrize(("name", "build"), [("emoji-xl", new_unet), ("emoji-3", new_transformer)])
def test_weights_are_loaded_and_named_by_their_checksum(name: str, build) -> None:
    weights = MODELS / name / WEIGHT_FILES[name]
    model = build()
    assert load_initial_weights(model, weights) == sha256_of(weights)
    shipped = load_file(weights)
    assert all(
        torch.equal(tensor, shipped[key].float()) for key, tensor in model.state_dict().items() if key in shipped
    )


def test_mismatched_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no emoji-3"):
        adopt_parts(tmp_path, tmp_path / "root")
    with pytest.raises(UsageError, match="does not exist"):
        load_initial_weights(new_unet(), tmp_path / "none.safetensors")
    other = shutil.copy(MODELS / "emoji-3" / WEIGHT_FILES["emoji-3"], tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="another architecture"):
        load_initial_weights(new_unet(), Path(other))
