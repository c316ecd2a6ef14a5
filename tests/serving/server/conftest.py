"""Tiny model, and its folder, that the tests of backends share."""

import pytest

from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel

from ...support.tiny_models import save_tiny, tiny_sdxl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model") / "tiny", tiny_sdxl(), guidance_scale=3.0))


@pytest.fixture(scope="module")
def model(folder: str) -> ServedModel:
    return load_model(folder, "cpu", "float32")
