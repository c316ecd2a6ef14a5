"""Tiny model that the engine's tests share."""

from typing import Any

import pytest

from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel

from ...support.tiny_models import tiny_sdxl


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_sdxl()


@pytest.fixture
def model(pipe: Any) -> ServedModel:
    return build_model(pipe, name="tiny")
