"""Breakdown of the time of a step on tiny models with random weights, and the attribution of operators."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.report.table import to_rich
from patchedserve.profiling.steps.attribution import CATEGORIES, HostSpan, Kernel, attribute
from patchedserve.profiling.steps.bench import step_experiment
from patchedserve.profiling.steps.breakdown import BREAKDOWN
from patchedserve.psctl.output import Output
from patchedserve.serving.models.build import build_model

from ...support.bench_cases import FAST, squares
from ...support.tiny_models import tiny_sd3, tiny_sdxl


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_breakdown_adds_up(make: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(make(), name="tiny")
    chosen = [squares(1, 1, 1), squares(0, 0, 2)]
    workspace = ModelWorkspace(tmp_path)
    experiment = step_experiment(BREAKDOWN, model, chosen, workspace, FAST)
    outcome = experiment.run(workspace)
    result = outcome.result
    assert json.loads((outcome.run_dir / "breakdown.json").read_text()) == result
    assert Image.open(outcome.run_dir / "breakdown.png").width > 500
    assert result["categories"] == CATEGORIES
    is_unet = make is tiny_sdxl
    for row in result["rows"]:
        assert set(row["sides"]) == {"patched", "same_resolution"}
        for name, side in row["sides"].items():
            assert result["figures"][f"{row['label']}.{name}.step_ms"]["value"] == side["step_ms"]
            assert sum(side["ms"].values()) == pytest.approx(side["step_ms"], rel=0.01)
            assert set(side["ms"]) == set(CATEGORIES)
            for category, ms in side["ms"].items():
                # SD3 has no GroupNorm; all other categories take time on both sides.
                assert (ms > 0) == (is_unet or category != "group_norm"), category
    Output().data(result, table=to_rich(experiment.tables(result)))
    printed = capsys.readouterr().out
    for word in ("SML", "LL", "group-norm", "stitching", "host", "same resolution"):
        assert word in printed
    # The hooks are removed.
    for module in (*model.denoiser.modules(), *model.stepper.model.model.modules()):  # type: ignore[attr-defined]
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_attribution_uses_the_innermost_labelled_range() -> None:
    spans = [
        HostSpan("psctl:step patched", 0, 100),
        HostSpan("aten::index_select", 1, 3),  # outside the model: guidance
        HostSpan("psctl:model", 10, 90),
        HostSpan("aten::add", 10, 12),
        HostSpan("psctl:convolution", 20, 50),
        HostSpan("aten::index_select", 21, 25),
        HostSpan("aten::linear", 25, 45),  # a matrix product convolves stitched taps
        HostSpan("aten::addmm", 26, 44),
        HostSpan("aten::copy_", 30, 32),
        HostSpan("aten::view", 45, 46),
        HostSpan("psctl:group_norm", 50, 60),
        HostSpan("aten::to", 50, 54),  # a conversion, not a move
        HostSpan("aten::copy_", 51, 53),
        HostSpan("psctl:attention", 60, 80),
        HostSpan("aten::scaled_dot_product_attention", 60, 66),
        HostSpan("aten::copy_", 62, 63),
        HostSpan("psctl:linear", 66, 75),
        HostSpan("aten::linear", 67, 74),
        HostSpan("aten::cat", 75, 79),
    ]
    us = attribute(reversed(spans))
    assert us == {
        "linear": 7,
        "attention": 6,
        "convolution": 20,
        "group_norm": 4,
        "stitching": 4 + 4,
        "element_wise": 2,
        "sampler": 2,
        "host": 100 - 49 + 0,
    }
    assert sum(us.values()) == 100


def test_kernels_are_attributed_by_their_launch() -> None:
    spans = [
        HostSpan("psctl:step patched", 0, 100),
        HostSpan("psctl:model", 10, 90),
        HostSpan("psctl:convolution", 20, 50),
        HostSpan("aten::conv2d", 30, 40),
        HostSpan("psctl:group_norm", 50, 60),
    ]
    kernels = [
        Kernel("nchwToNhwcKernel", 35, 7),
        Kernel("halo_gather_kernel", 22, 5),  # Triton's kernels have no operator around them
        Kernel("group_norm_stitch_kernel", 51, 11),
        Kernel("vectorized_elementwise_kernel", 70, 3),
        Kernel("vectorized_elementwise_kernel", 95, 2),
    ]
    us = attribute(spans, kernels)
    expected = {"convolution": 7, "stitching": 5, "group_norm": 11, "element_wise": 3, "sampler": 2}
    assert us == dict.fromkeys(CATEGORIES, 0) | expected
