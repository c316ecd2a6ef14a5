"""The closed form compared with torch's count in unmodified models."""

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from patchedserve.data.errors import UsageError
from patchedserve.data.models.published import PUBLISHED, published_config
from patchedserve.profiling.steps.counting import counted_macs, meta_model
from patchedserve.profiling.steps.model_config import TEXT_LENGTH
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.parallel.cost import Call, Cost
from patchedserve.serving.parallel.model_levels import levels_of

from ...support.random_models import MODELS, WITH_ALL_OPTIONS
from ...support.tiny_models import smallest_sd, tiny_sd, tiny_sd3, tiny_sdxl

PIPES = {"tiny-sdxl": tiny_sdxl, "tiny-sd": tiny_sd, "smallest-sd": smallest_sd, "tiny-sd3": tiny_sd3}


def on_meta(model: Any) -> Any:
    return meta_model({"_class_name": type(model).__name__, **model.config}, "of the test")


def test_attention_operations_are_counted() -> None:
    query, key = torch.empty(2, 3, 5, 8, device="meta"), torch.empty(2, 3, 7, 8, device="meta")
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(query, key, key)
    assert counter.get_total_flops() // 2 == 2 * 3 * 5 * 7 * (8 + 8)


@pytest.mark.product(most=5)
@pytest.mark.parametrize("name", [*WITH_ALL_OPTIONS, *PIPES])
def test_small_models(name: str) -> None:
    model = on_meta(MODELS[name]() if name in MODELS else denoiser_of(PIPES[name]()))
    cost = Cost(levels_of(model))
    # U-Nets are also tested with sizes that are odd at every level.
    call = Call(16, 20, 5, rows=3) if name in ("sd3", "sd35", "tiny-sd3") else Call(29, 13, 5, rows=3)
    assert cost.macs(call) == counted_macs(model, call)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "height", "width"),
    # Whole images of 1024x1024, and an eighth of such an image as an image of its own.
    [("sdxl", 128, 128), ("sdxl", 16, 128), ("sd3-medium", 128, 128)],
)
def test_published_models(name: str, height: int, width: int) -> None:
    config = published_config(name)
    call = Call(height, width, TEXT_LENGTH[config["_class_name"]])
    # The bar is 0.5 %, but the counts are equal because no operation is omitted.
    model = meta_model(config, name)
    assert Cost(levels_of(model)).macs(call) == counted_macs(model, call)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_complete(name: str) -> None:
    # Compared with the JSON that diffusers writes: no key is missing, none is unknown.
    config = published_config(name)
    whole = json.loads(meta_model(config, name).to_json_string())
    assert {key: value for key, value in whole.items() if key != "_diffusers_version"} == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "is of no class, but it must be of UNet2DConditionModel or SD3Transformer2DModel"),
        ({"_class_name": "AutoencoderKL"}, "is of AutoencoderKL, but"),
        ({"_class_name": "FluxTransformer2DModel"}, "is of FluxTransformer2DModel, but"),
        ({"_class_name": "UNet2DConditionModel", "block_out_channels": [8]}, "makes no UNet2DConditionModel of it"),
        (published_config("sdxl") | {"class_embed_type": "timestep"}, "--parallel cannot run this model"),
    ],
)
def test_other_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        meta_model(config, "mine")
