"""serving/patched/plain_models.py: the two memory formats of plain diffusers give the same, and the faster one runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.errors import RunError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.plain.formats import PlainModels, Point, channels_last_copy

from ...support.patched_cases import model_of
from ...support.tiny_models import tiny_sd3, tiny_sdxl

SIZES = [Resolution(32, 32), Resolution(64, 64)]


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny", fingerprint="a")


def stepper_of(model: ServedModel) -> PatchedStepper:
    assert isinstance(model.stepper, PatchedStepper)
    return model.stepper


def test_the_copy_shares_all_but_weights_of_convolutions() -> None:
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


def test_the_patch_engine_keeps_no_weights_for_it(served: ServedModel) -> None:
    stepper = stepper_of(served)
    weights = stepper.model.channels_last_weights
    copied = dict(channels_last_copy(served.denoiser, weights).named_modules())
    assert len(weights) > 5
    for name, weight in weights.items():
        assert copied[name].weight.data_ptr() == weight.data_ptr()  # type: ignore[union-attr]


def test_the_format_that_was_faster_for_such_batches_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("sdxl")
    models, used = PlainModels(model), []
    monkeypatch.setattr(PlainModels, "_in_channels_last", lambda *_: used.append("channels-last"))
    monkeypatch.setattr("patchedserve.serving.plain.formats.denoise", lambda given, *_: used.append("default"))
    models.points = [Point((8, 8), 2, 10.0, 20.0), Point((8, 8), 8, 40.0, 30.0), Point((16, 16), 2, 20.0, 15.0)]
    for rows, side in ((1, 8), (4, 8), (6, 8), (40, 8), (40, 16), (2, 32)):
        models.predict(torch.zeros(rows, 4, side, side), torch.zeros(rows), {})
    cl = "channels-last"
    assert used == ["default", "default", cl, cl, cl, "default"]


@pytest.mark.parametrize("count", [1, 3])
def test_both_formats_denoise_alike(served: ServedModel, count: int) -> None:
    stepper = stepper_of(served)
    results = []
    for times in ((1.0, 2.0), (2.0, 1.0)):
        stepper.plain.points = [Point((8, 8), 2, *times)]
        active = [served.prepare(Request(n, f"a cat {n}", Resolution(64, 64), 4)) for n in range(count)]
        for _ in range(4):
            assert stepper.step(active) == {}
        results.append(torch.cat([prepared.latents for prepared in active]))
    stepper.plain.points = []
    assert float((results[0] - results[1]).abs().max() / results[0].abs().max()) <= 1e-4
    assert not torch.equal(*results), "the same model ran twice"


@pytest.mark.slow
def test_it_is_measured_once_for_the_same_circumstances(
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
    # What is known of a size stays when others are tuned for.
    served.tune([Resolution(48, 48)], tmp_path)
    assert [point for point in stepper.plain.points if point.size != (6, 6)] == first
    assert len(stepper.plain.points) == len(first) + 2
    path.write_text(path.read_text()[:100])
    with pytest.raises(RunError, match=rf"{path.name} is damaged \(.*\); delete it to measure again"):
        served.tune(SIZES, tmp_path)


def test_a_transformer_has_one_format(tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "tiny", "fingerprint": "b"}
    build_model(tiny_sd3(), **options).tune(SIZES, tmp_path)
    assert list(tmp_path.glob("plain-*.json")) == []


def test_nothing_is_measured_where_the_strategy_is_given(tmp_path: Path) -> None:
    model = build_model(tiny_sdxl(), name="tiny", fingerprint="a", options=EngineOptions(strategy="regroup"))
    model.tune(SIZES, tmp_path)
    assert list(tmp_path.iterdir()) == []
