"""profiling/steps/matrix_peak.py: operations are counted correctly, and the peak is that of large products."""

import time

import pytest
import torch
from torch.nn import functional as F

from patchedserve.profiling.steps.lanes import operations_of
from patchedserve.profiling.steps.matrix_peak import count_operations, matrix_peak
from patchedserve.profiling.steps.sides import OneByOne, RequestPool, StepperSide, plain_models, plain_side
from patchedserve.serving.models.build import build_model

from ...support.bench_cases import squares
from ...support.tiny_models import tiny_sdxl

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_operations_of_single_operators(bias: bool) -> None:
    query, mask = torch.randn(2, 4, 64, 16), torch.zeros(1, 1, 1, 64) if bias else None
    linear, image = torch.nn.Linear(16, 8, bias=bias), torch.randn(3, 5, 10, 12)
    with torch.inference_mode():
        assert count_operations(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=mask)) == (
            2 * 2 * (2 * 4 * 64 * 64 * 16)
        )
        assert count_operations(lambda: linear(query)) == 2 * (2 * 4 * 64) * 16 * 8
        assert count_operations(lambda: F.conv2d(image, torch.randn(7, 5, 3, 3), padding=1)) == (
            2 * (3 * 7 * 10 * 12) * 5 * 9
        )
        assert count_operations(lambda: image + 1) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_sides_of_a_unet_execute_the_same_operations() -> None:
    model = build_model(tiny_sdxl(), name="tiny")
    requests = RequestPool(model).take(squares(2, 1, 2))
    models = plain_models(model)["default"]
    batched = operations_of(plain_side(model, models, requests))
    assert operations_of(OneByOne(model, models, requests)) == batched > 1e6
    # The patched step omits only text keys and values and the embeddings of time steps for every row.
    patched = operations_of(StepperSide(model.stepper, requests))
    assert 0.85 * batched < patched <= batched


@pytest.mark.slow
def test_peak_is_measured_on_large_products() -> None:
    peak = matrix_peak(CPU, torch.float32)
    assert matrix_peak(CPU, torch.float32) == peak  # the second call returns the measured value
    left = torch.randn(512, 512)
    start = time.perf_counter()
    torch.mm(left, left)
    # On a shared machine the peak may be measured too low, but never by a factor of ten.
    assert 2 * 512**3 / (time.perf_counter() - start) < 10 * peak
