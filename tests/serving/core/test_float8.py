"""`--quantize fp8`: products equal those of `torch._scaled_mm`, in every family, engine and mix of sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.kernels.quantize_rows import quantize_rows
from patchedserve.serving.core import float8
from patchedserve.serving.core.attention import FusedLinear
from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.core.float8 import Float8Linear, check_float8, convert_to_float8
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.patched.stepper import PatchedStepper

from ...support.fake_device import fake_device
from ...support.family_kit import BUILDS, STEPS, denoised, mixed
from ...support.patched_models import relative_error
from ...support.tape import Tape
from ...support.tiny_families import tiny_flux, tiny_pixart
from ...support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

NEAR = 0.02
"""In mixed batches, a difference in the last bit of float32 rounds a few inputs to other numbers of 8 bits."""


def layer_of(inputs: int, outputs: int, *, has_bias: bool = True, seed: int = 0) -> nn.Linear:
    generator, layer = torch.Generator().manual_seed(seed), nn.Linear(inputs, outputs, bias=has_bias)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(generator=generator)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_those_of_torch(has_bias: bool, dtype: torch.dtype) -> None:
    layer = layer_of(64, 48, has_bias=has_bias).to(dtype)
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = Float8Linear.of(layer)(x)
    tokens, scales = quantize_rows(x.flatten(0, 1))
    weight, by_output = quantize_rows(layer.weight)
    expected = torch._scaled_mm(tokens, weight.t(), scales, by_output.t(), out_dtype=torch.float32)
    if layer.bias is not None:
        expected = expected + layer.bias.float()
    assert (found.shape, found.dtype) == ((3, 7, 48), dtype)
    torch.testing.assert_close(found.flatten(0, 1), expected.to(dtype))
    # 3 bits of mantissa on both sides.
    assert 0.01 < relative_error([found.float()], [layer.float()(x.float())]) < 0.06


def test_queries_keys_and_values_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = [Float8Linear.of(layer_of(64, 32, seed=seed)) for seed in range(3)], torch.randn(5, 64)
    expected = torch.cat([layer(x) for layer in layers], -1)
    shapes, product = list[torch.Size](), float8._product
    monkeypatch.setattr(float8, "_product", lambda *given: (shapes.append(given[2].shape), product(*given))[1])
    fused = FusedLinear(*layers)  # type: ignore[arg-type]
    for _ in range(2):
        torch.testing.assert_close(fused(x), expected)
    assert shapes == [(96, 64)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_device_multiplies_in_two_launches(dtype: torch.dtype) -> None:
    layers = [Float8Linear.of(layer_of(64, 32, seed=seed).to(dtype)) for seed in range(3)]
    x = torch.randn(2, 7, 64).to(dtype)
    expected = torch.cat([layer(x) for layer in layers], -1)
    fused = FusedLinear(*layers)  # type: ignore[arg-type]
    with fake_device() as device, torch.inference_mode():
        for layer in layers:
            device.move(layer)
        given = device.put(x)
        fused(given)  # joins the weights
        device.events.clear()
        found = fused(given)
        assert list(map(str, device.events)) == ["launch quantize_rows_kernel", "launch aten._scaled_mm.default"]
        found = found.cpu()
    assert found.dtype == dtype
    assert relative_error([found.float()], [expected.float()]) <= 0.01


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "pixart"])
def test_blocks_are_converted_and_nothing_else(name: str) -> None:
    pipe = BUILDS[name]()
    model: Any = denoiser_of(pipe)
    layers = {key: each for key, each in model.named_modules() if type(each) is nn.Linear}
    count = convert_to_float8(model)
    kept = {key for key, each in model.named_modules() if type(each) is nn.Linear}
    converted = {key for key, each in model.named_modules() if isinstance(each, Float8Linear)}
    assert len(converted) == count > 10
    assert kept | converted == layers.keys()
    assert not {key for key in converted if "norm" in key or "mod" in key.split(".") or "time" in key or "adaLN" in key}
    # What remains in the blocks of attention is modulation, or has another size.
    for key in kept:
        if (".attn" in key or ".ff" in key) and not key.startswith("context_refiner"):  # it runs once for a batch
            assert (layers[key].in_features | layers[key].out_features) % 16, key
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--quantize fp8: no layer of PixArtTransformer2DModel has sizes that"):
        convert_to_float8(denoiser_of(tiny_pixart()))


def served(folder: Path, engine: Any = "patched", *, is_quantised: bool = True, **options: Any) -> ServedModel:
    model = ModelOptions(quantize="fp8" if is_quantised else None, adapter=options.pop("adapter", None))
    return load_model(str(folder), "cpu", "float32", EngineOptions(engine, model=model, **options))


@pytest.mark.product(most=1)
@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3, tiny_flux])
def test_mixed_batches_equal_requests_alone(build: Callable[[], Any], tmp_path: Path) -> None:
    folder, requests = save_tiny(tmp_path / "model", build()), mixed([3, 2, 3, 2])
    plain, exact = served(folder, "plain"), served(folder, "plain", is_quantised=False)
    expected = [denoised(plain, [request])[0] for request in requests]
    error = relative_error(expected, denoised(exact, requests))
    assert 0.001 < error < 0.2
    for order in ("image", "patch"):
        assert relative_error(denoised(served(folder, order=order), requests), expected) <= error
    assert "fp8 (inexact)" in plain.about
    assert len({plain.fingerprint, exact.fingerprint}) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3, tiny_flux])
def test_mixed_batches_equal_requests_alone_without_rounding(
    build: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to 8 bits amplifies the last bit of float32. Without it, engines differ by no more than that."""
    folder, requests = save_tiny(tmp_path / "model", build()), mixed([3, 2, 3, 2])
    plain, *patched = (served(folder, *given) for given in (("plain",), ("patched",)))

    def unrounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = quantize_rows(x)[1]
        return x.float() / scales, scales

    monkeypatch.setattr(float8, "quantize_rows", unrounded)
    expected = [denoised(plain, [request])[0] for request in requests]
    for model in patched:
        assert relative_error(denoised(model, requests), expected) <= STEPS


def test_recorded_passes_equal_eager_ones(tmp_path: Path) -> None:
    folder, tape = save_tiny(tmp_path / "model", tiny_sd3()), Tape()
    eager, recorded = served(folder, order="patch"), served(folder, order="patch")
    assert isinstance(recorded.stepper, PatchedStepper)
    recorded.stepper.model.use_graphs(tape, patience=0)
    for counts in ([3, 2, 3, 2], [2, 3, 2, 3]):
        assert relative_error(denoised(recorded, mixed(counts)), denoised(eager, mixed(counts))) <= NEAR
    plain, recorded = served(folder, "plain"), served(folder, "plain")
    recorded.stepper.models.captured = CapturedPasses(tape, patience=0)  # type: ignore[attr-defined]
    assert relative_error(denoised(recorded, mixed([2] * 4)), denoised(plain, mixed([2] * 4))) <= NEAR
    assert tape.played > 4


@pytest.mark.exhaustive
def test_compiled_blocks_equal_eager_ones(tmp_path: Path) -> None:
    folder, requests = save_tiny(tmp_path / "model", tiny_sd3()), mixed([2, 2, 1, 1])
    found = denoised(served(folder, compile=True), requests)
    assert relative_error(found, denoised(served(folder), requests)) <= NEAR


def test_adapters_change_their_rows(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from dataclasses import replace

    from ...support.loras import save_lora

    pipe = tiny_sd3()
    path = save_lora(tmp_path / "toy.safetensors", pipe, "transformer")
    folder = save_tiny(tmp_path / "model", pipe)
    each = ((("toy", 1.0),), (), (("toy", -0.7),), ())
    requests = [replace(one, adapters=own) for one, own in zip(mixed([3, 2, 3, 2]), each, strict=True)]
    exact = denoised(served(folder, "plain", is_quantised=False, adapter=[f"toy={path}"]), requests)
    without = denoised(served(folder, "plain"), [replace(one, adapters=()) for one in requests])
    for engine in ("patched", "plain"):
        found = denoised(served(folder, engine, adapter=[f"toy={path}"]), requests)
        for index, own in enumerate(each):
            error, change = (relative_error([found[index]], [side[index]]) for side in (exact, without))
            assert error < 0.2
            # Rows with the adapter differ from those without it by more than by 8 bits; the others do not.
            assert (change > 2 * error) if own else (change <= NEAR), (engine, index, error, change)


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_device_without_such_products_is_refused(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    check_float8(torch.device("cpu"))
    if is_refused:
        with pytest.raises(
            UsageError, match=r"compute capability 8\.9 or higher, but NVIDIA A100 has 8\.\d; --quantize"
        ):
            check_float8(torch.device("cuda", 0))
    else:
        check_float8(torch.device("cuda", 0))
