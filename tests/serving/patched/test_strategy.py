"""Convolution strategies: measurement, storage and choice, and guarantees that the patch engine's stepper relies on."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.failures import Failures
from patchedserve.serving.core.stepper import Tuning
from patchedserve.serving.models.build import build_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched import leaves, tuning
from patchedserve.serving.patched.patched_model import PatchedModel
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.patched.strategy import StrategyTable, StrategyTiming
from patchedserve.serving.patched.text import without_repeats
from patchedserve.serving.patched.tuning import MEASURED_ROWS

from ...support.tiny_models import tiny_sdxl

SIZES = [(4, 4), (8, 8)]


@pytest.fixture(scope="module")
def model() -> PatchedModel:
    return PatchedModel(tiny_sdxl().unet)


def place(groups: int, tokens: int) -> Any:
    return SimpleNamespace(groups=(None,) * groups, num_tokens=tokens, side=1)


def test_nearest_measurement_decides(model: PatchedModel) -> None:
    conv, _ = model.convolutions[0]
    shape = conv.shape_key(1)
    table = StrategyTable([StrategyTiming(shape, 2, 100, 5.0, 9.0), StrategyTiming(shape, 2, 10_000, 50.0, 9.0)])
    assert [table.choose(conv, place(2, n), place(2, n)) for n in (90, 900, 1100, 9000)] == [
        *("stitch", "stitch", "regroup", "regroup")
    ]


def test_resolutions_and_tokens_have_equal_weight(model: PatchedModel) -> None:
    conv, _ = model.convolutions[0]
    shape = conv.shape_key(1)
    table = StrategyTable([StrategyTiming(shape, 1, 800, 9.0, 5.0), StrategyTiming(shape, 8, 100, 5.0, 9.0)])
    assert table.choose(conv, place(7, 400), place(7, 400)) == "stitch"


def test_unmeasured_batches_regroup(model: PatchedModel) -> None:
    conv, _ = model.convolutions[0]
    assert StrategyTable().choose(conv, place(3, 10), place(3, 10)) == "regroup"


def test_every_convolution_shape_is_measured_with_both_strategies(model: PatchedModel) -> None:
    points = tuning.measure(model, SIZES)
    counts = Counter(point.shape for point in points)
    assert counts.keys() == {conv.shape_key(1) for conv, _ in model.convolutions}
    assert min(counts.values()) >= len(MEASURED_ROWS)
    assert all(point.resolutions == 2 and point.stitch_us > 0 and point.regroup_us > 0 for point in points)
    assert tuning.measure(model, [(8, 8), (8, 8)]) == []  # one resolution needs no patches


def test_measurements_are_reused_only_in_the_same_circumstances(
    model: PatchedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target(fingerprint: str, sizes: list[tuple[int, int]] = SIZES) -> Tuning:
        return Tuning(sizes, tmp_path, fingerprint, list)

    first = tuning.strategy_table(model, target("a"))
    (path,) = tmp_path.glob("convolutions-*.json")
    assert json.loads(path.read_text())["context"]["fingerprint"] == "a"
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measure", lambda *_: pytest.fail("measured again"))
        again = tuning.strategy_table(model, target("a", list(reversed(SIZES))))
    assert again.points == first.points != []
    tuning.strategy_table(model, target("b"))
    assert len(list(tmp_path.glob("convolutions-*.json"))) == 2

    path.write_text(path.read_text()[:200])
    with pytest.warns(UserWarning, match=f"{path.name} is damaged .* it was put aside as"):
        measured = tuning.strategy_table(model, target("a"))
    assert len(measured.points) == len(first.points)


@pytest.mark.slow
def test_tuning_refuses_a_patch_size_that_does_not_divide(tmp_path: Path) -> None:
    for options in (EngineOptions(patch_size=3), EngineOptions(order="patch", patch_size=2)):
        served = build_model(tiny_sdxl(), name="tiny", options=options)
        with pytest.raises(UsageError, match=f"patch size {options.patch_size} does not"):
            served.tune([Resolution(32, 32), Resolution(64, 64)], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "fast"}, "engine is 'fast', but it must be one of patched, plain"),
        ({"patch_size": 0}, "patch size is 0, but it must be at least 1"),
        ({"engine": "plain", "order": "image"}, "only for --engine patched"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(**given)


def test_trailing_equal_text_tokens_are_dropped_only_if_in_all_rows() -> None:
    text = torch.randn(2, 6, 4)
    text[0, 2:] = 0
    text[1, 3:] = 7
    shorter, repeats = without_repeats(text)
    assert repeats == 3
    assert torch.equal(shorter, text[:, :4])
    text[1, 5] = 8
    shorter, repeats = without_repeats(text)
    assert (shorter.shape[1], repeats) == (6, 1)


def test_error_of_the_patched_model_is_not_hidden_by_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    served = build_model(tiny_sdxl(), name="tiny")

    def fail(self: PatchedModel, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no patches today")

    monkeypatch.setattr(PatchedModel, "__call__", fail)
    batch = [
        served.prepare(Request(number, "a car", Resolution(side, side), 2)) for number, side in enumerate((32, 64))
    ]
    failures = served.stepper.step(batch)
    assert failures == dict.fromkeys((0, 1), "denoising: RuntimeError: no patches today")


def test_too_large_batch_continues_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    served = build_model(tiny_sdxl(), name="tiny")
    original, tried = PatchedModel.__call__, []

    def fails_if_large(self: PatchedModel, patches: torch.Tensor, timesteps: torch.Tensor, **rest: Any) -> torch.Tensor:
        tried.append(len(timesteps))
        if len(timesteps) > 4:
            raise torch.OutOfMemoryError("too large")
        return original(self, patches, timesteps, **rest)

    monkeypatch.setattr(PatchedModel, "__call__", fails_if_large)
    batch = [
        served.prepare(Request(number, "a car", Resolution(side, side), 2))
        for number, side in enumerate((32, 64, 32, 64))
    ]
    assert isinstance(served.stepper, PatchedStepper)
    assert served.stepper.step(batch) == {}
    assert tried == [8, 4, 4]  # two rows a request
    assert [prepared.state.steps_done for prepared in batch] == [1] * 4
    assert served.stepper.batch_failures == Failures(1, "denoising: OutOfMemoryError: too large")


def test_norm_and_stitching_are_measured_as_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = PatchedModel(tiny_sdxl().unet, order="patch", patch_size=4)
    choose, channels = patched.context.choose, set()
    original = leaves.group_norm_silu_stitch

    def noted(x: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        channels.add(x.shape[1])
        return original(x, *args, **rest)

    monkeypatch.setattr(leaves, "group_norm_silu_stitch", noted)
    tuning.measure(patched, SIZES)
    assert channels == {conv.conv.in_channels for conv in patched.swap.norms}
    context = patched.context
    assert context.choose is choose
    assert context.level is context.packing.levels[0]
    assert not context.consume_fused("activation")
    assert not context.consume_fused("stitching")


def test_sizes_that_patches_do_not_divide_are_refused_before_serving() -> None:
    options = EngineOptions(order="patch")
    served = build_model(tiny_sdxl(), name="tiny", options=options)
    served.check_request(Request(0, "a car", Resolution(64, 32), 2))
    odd = Resolution(72, 72)  # 9 x 9 latents, where two levels need an even patch
    with pytest.raises(UsageError, match=r"patch size 9 does not fit.*use --order image"):
        served.check_request(Request(0, "a car", odd, 2))
    build_model(tiny_sdxl(), name="tiny").check_request(Request(0, "a car", odd, 2))


def test_resolutions_far_beyond_the_model_are_refused() -> None:
    served = build_model(tiny_sdxl(), name="tiny")
    largest = max(served.defaults.resolutions)
    served.check_resolution(Resolution(4 * largest.width, 4 * largest.height))
    with pytest.raises(
        UsageError, match=f"at most 64 times the pixels of the largest that tiny is made for .{largest}"
    ):
        served.check_resolution(Resolution(8 * largest.width, 8 * largest.height + 8))
