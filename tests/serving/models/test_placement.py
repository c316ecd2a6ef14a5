"""Number format in which a model is loaded (serving/models/placement.py)."""

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.serving.families.table import FAMILIES
from patchedserve.serving.models.placement import resolve_dtype

UNETS = {"StableDiffusionPipeline", "StableDiffusionXLPipeline"}


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_transformers_on_a_gpu_are_in_bfloat16(pipeline: str) -> None:
    found = resolve_dtype("auto", torch.device("cuda", 0), pipeline)
    assert found == (torch.float16 if pipeline in UNETS else torch.bfloat16)


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_requested_dtype_is_used(pipeline: str) -> None:
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        assert resolve_dtype("float16", device, pipeline) == torch.float16


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'half': allowed are auto, float32, bfloat16, float16"):
        resolve_dtype("half", torch.device("cpu"), "FluxPipeline")
