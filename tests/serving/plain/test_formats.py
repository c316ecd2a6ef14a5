"""Memory formats, compiled blocks and recorded passes of plain diffusers give the same results (plain/formats.py)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.captured import CapturedPasses, PassBatch
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.plain.formats import FormatTiming, PlainModels, channels_last_copy
from patchedserve.serving.plain.stepper import PlainStepper
from patchedserve.serving.runs.summary import optional_figures

from ...support.family_kit import BUILDS, denoised, mixed
from ...support.patched_cases import model_of
from ...support.patched_models import relative_error
from ...support.tape import Tape
from ...support.tiny_models import tiny_sd3, tiny_sdxl

SIZES = [Resolution(32, 32), Resolution(64, 64)]


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny", fingerprint="a")


def stepper_of(model: ServedModel) -> PatchedStepper:
    assert isinstance(model.stepper, PatchedStepper)
    return model.stepper


def test_copy_shares_all_but_convolution_weights() -> None:
    model = model_of("sdxl")
    copied = channels_last_copy(model)
    given = dict(model.named_parameters())
    for name, parameter in copied.named_parameters():
        assert torch.equal(parameter, given[name])
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name
        else:
            assert parameter is given[name], name
    assert not model.conv_in.weight.is_contiguous(memory_format=torch.channels_last), "the model itself has changed"


def test_patch_engine_keeps_no_converted_weights(served: ServedModel) -> None:
    stepper = stepper_of(served)
    weights = stepper.model.channels_last_weights
    copied = dict(channels_last_copy(served.denoiser, weights).named_modules())
    assert len(weights) > 5
    for name, weight in weights.items():
        assert copied[name].weight.data_ptr() == weight.data_ptr()  # type: ignore[union-attr]


def test_faster_measured_format_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("sdxl")
    models, used = PlainModels(model), []
    forms = {id(model): "default", id(models._in_channels_last()[0]): "channels-last"}
    monkeypatch.setattr("patchedserve.serving.plain.formats.denoise", lambda given, *_: used.append(forms[id(given)]))
    models.points = [
        FormatTiming((8, 8), 2, 10.0, 20.0),
        FormatTiming((8, 8), 8, 40.0, 30.0),
        FormatTiming((16, 16), 2, 20.0, 15.0),
    ]
    for rows, side in ((1, 8), (4, 8), (6, 8), (40, 8), (40, 16), (2, 32)):
        models.predict(PassBatch(is_complete=True), torch.zeros(rows, 4, side, side), torch.zeros(rows), {})
    cl = "channels-last"
    assert used == ["default", "default", cl, cl, cl, "default"]


@pytest.mark.parametrize("count", [1, 3])
def test_both_formats_give_equal_latents(served: ServedModel, count: int) -> None:
    stepper = stepper_of(served)
    results = []
    for times in ((1.0, 2.0), (2.0, 1.0)):
        stepper.plain.points = [FormatTiming((8, 8), 2, *times)]
        active = [served.prepare(Request(n, f"a cat {n}", Resolution(64, 64), 4)) for n in range(count)]
        for _ in range(4):
            assert stepper.step(active) == {}
        results.append(torch.cat([prepared.latents for prepared in active]))
    stepper.plain.points = []
    assert float((results[0] - results[1]).abs().max() / results[0].abs().max()) <= 1e-4
    assert not torch.equal(*results), "the same model ran twice"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_formats_are_measured_once_per_circumstances(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_of(served)
    served.tune(SIZES, tmp_path)
    (path,) = tmp_path.glob("plain-*.json")
    rows = json.loads(path.read_text())["rows"]
    guided = [((4, 4), 2), ((4, 4), 8), ((8, 8), 2), ((8, 8), 8)]
    assert [(tuple(row["size"]), row["rows"]) for row in rows] == guided
    assert all(row["default_us"] > 0 and row["channels_last_us"] > 0 for row in rows)
    first, stepper.plain.points = stepper.plain.points, []
    with monkeypatch.context() as patch:
        patch.setattr(PlainModels, "_measure", lambda *_: pytest.fail("measured again"))
        served.tune(reversed(SIZES), tmp_path)
    assert stepper.plain.points == first
    # Measurements of a size stay when other sizes are tuned.
    served.tune([Resolution(48, 48)], tmp_path)
    assert [point for point in stepper.plain.points if point.size != (6, 6)] == first
    assert len(stepper.plain.points) == len(first) + 2
    path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match=rf"{path.name} is damaged \(.*\); it was put aside as"):
        served.tune(SIZES, tmp_path)
    assert json.loads(path.read_text())["rows"]


def test_transformer_has_one_format(tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "tiny", "fingerprint": "b"}
    build_model(tiny_sd3(), **options).tune(SIZES, tmp_path)
    assert list(tmp_path.glob("plain-*.json")) == []


def plain_of(pipe: Any, **options: Any) -> ServedModel:
    return build_model(pipe, name="tiny", options=EngineOptions("plain", **options))


NOT_RECORDED = {
    # Reads the lengths of texts.
    "lumina2": "tolist cannot be recorded",
    # Copies an embedding of zeros from the host.
    "chroma": "aten.mul.Tensor cannot be recorded: it copies from the host",
    # Selects tokens by a mask.
    "z-image": "aten.index.Tensor cannot be recorded: it waits for the device",
    # Copies from the host which tokens are of references.
    "qwen-edit": "aten.where.self cannot be recorded: it copies from the host",
}
"""Families whose forward in diffusers reads or copies values while it runs, and the first such operation."""


def recorded_plain(pipe: Any, recorder: Tape) -> ServedModel:
    model = plain_of(pipe)
    assert isinstance(model.stepper, PlainStepper)
    model.stepper.models.captured = CapturedPasses(recorder, patience=1)
    return model


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_recorded_passes_of_all_families_equal_eager_ones(name: str) -> None:
    """Batches have two resolutions, with and without guidance; requests leave, and a batch returns after another."""
    pipe, recorder = BUILDS[name](), Tape()
    first, second = mixed([6, 2, 3, 4]), mixed([3, 5, 2, 6])
    eager, recorded = plain_of(pipe), recorded_plain(pipe, recorder)
    for batch in (first, second, first):
        assert relative_error(denoised(recorded, batch), denoised(eager, batch)) <= 1e-5
    assert isinstance(recorded.stepper, PlainStepper)
    if name in NOT_RECORDED:
        failure = optional_figures(recorded, None)["recording_failure"]
        assert failure == f"recording a pass: AssertionError: {NOT_RECORDED[name]}"
        return
    assert recorded.stepper.recording_failure is None
    assert recorder.played > recorder.recorded > 0


def test_recurring_batch_needs_no_eager_pass() -> None:
    """The first pass of a patched batch must run eagerly, as it computes text keys and values; a plain one need not."""
    pipe, recorder = tiny_sd3(), Tape()
    recorded = recorded_plain(pipe, recorder)
    requests = [Request(n, f"a cat {n}", Resolution(32, 32), 4, seed=n) for n in range(2)]
    denoised(recorded, requests)
    assert (recorder.recorded, recorder.played) == (1, 3)
    denoised(recorded, [replace(request, prompt="a dog") for request in requests])
    assert (recorder.recorded, recorder.played) == (1, 7)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_compiled_blocks_equal_eager_ones_and_leave_the_model_eager(make: Any) -> None:
    pipe = make()
    requests = [Request(n, f"a cat {n}", Resolution(32, 32 + 32 * (n % 2)), 3, seed=n) for n in range(3)]
    compiled, eager = plain_of(pipe, compile=True), plain_of(pipe)
    found = denoised(compiled, requests)
    made = counters["stats"]["unique_graphs"]
    assert made > 0
    assert not counters["graph_break"]
    assert relative_error(found, denoised(eager, requests)) <= 1e-4
    assert counters["stats"]["unique_graphs"] == made
    assert all(module._compiled_call_impl is None for module in pipe_modules(pipe))


def pipe_modules(pipe: Any) -> list[torch.nn.Module]:
    return list(denoiser_of(pipe).modules())


def test_nothing_is_measured_if_the_strategy_is_given(tmp_path: Path) -> None:
    model = build_model(tiny_sdxl(), name="tiny", fingerprint="a", options=EngineOptions(strategy="regroup"))
    model.tune(SIZES, tmp_path)
    assert list(tmp_path.iterdir()) == []
