"""`psctl bench steps` and what is behind it, on tiny models with random weights: sides, rows, breakdown, bad input."""

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.attribution import CATEGORIES, Kernel, Span, attribute
from patchedserve.profiling.breakdown import run_breakdown
from patchedserve.profiling.combinations import (
    Combination,
    default_combinations,
    parse_combinations,
    random_combinations,
)
from patchedserve.profiling.step_bench import BenchSettings, StepBench, run_step_bench, summarize
from patchedserve.profiling.step_sides import EngineSide, PlainSide, RequestPool, plain_denoisers
from patchedserve.psctl.bench import breakdown_tables
from patchedserve.psctl.output import Output
from patchedserve.serving.model import ServedModel
from patchedserve.serving.stepper import EngineOptions

from .conftest import RunPsctl
from .helpers import largest_error, save_tiny, tiny_sd, tiny_sd3, tiny_sdxl

SIZES = parse_list("32,48,64")
FAST = BenchSettings(repeats=2, warmup=1)
ROW = {
    *("combination", "label", "requests", "is_mixed", "one_by_one_ms", "same_resolution_ms", "same_resolution_format"),
    *("patched_ms", "patched_p10_ms", "patched_p90_ms", "patched_repack_ms", "ratio_one_by_one"),
    *("ratio_same_resolution", "patched_is_plain", "repeats"),
}
HEAD = {
    *("model", "dtype", "device", "device_name", "cpu", "threads", "torch", "guidance_scale", "is_guided"),
    *("resolutions", "mean_ratio_one_by_one_mixed", "mean_ratio_same_resolution_mixed", "min_ratio_one_by_one"),
    *("min_ratio_same_resolution", "is_plain_for_one_resolution", "was_interrupted", "run_dir", "rows"),
}


def squares(*counts: int) -> Combination:
    return Combination(SIZES, counts)


def with_scheduler(pipe: Any, scheduler: Any, **config: Any) -> Any:
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **config)
    return pipe


@pytest.fixture(scope="module")
def sdxl() -> ServedModel:
    return ServedModel(tiny_sdxl(), name="tiny")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "48", "64"])
    return {"PSCTL_MODEL": str(folder / "sdxl"), "PSCTL_WORKSPACE": str(folder / "workspace"), "PSCTL_DTYPE": "float32"}


@pytest.mark.parametrize(
    ("counts", "label"),
    [
        ((1, 0, 0), "S"),
        ((0, 1, 0), "M"),
        ((2, 2, 2), "SSMMLL"),
        ((0, 3, 3), "MMMLLL"),
        ((4, 4, 4), "4S 4M 4L"),
        ((0, 0, 16), "16L"),
    ],
)
def test_label_of_squares(counts: tuple[int, ...], label: str) -> None:
    assert squares(*counts).label == label


def test_letters_follow_size_not_order() -> None:
    assert Combination(parse_list("64,32"), (2, 1)).label == "SLL"
    assert Combination(parse_list("64,32"), (2, 1)).by_resolution == {"64x64": 2, "32x32": 1}
    assert Combination(parse_list("64x32,32"), (2, 1)).label == "32x32 + 2*64x32"
    assert Combination(parse_list("32,48,64,80"), (0, 0, 0, 3)).label == "3*80x80"


def test_default_combinations_cover_all_kinds() -> None:
    chosen = default_combinations(SIZES)
    labels = [combination.label for combination in chosen]
    assert len(chosen) == 21
    assert len(set(chosen)) == 21
    assert set(labels) >= {"S", "LLLL", "16M", "SM", "SL", "ML", "SML", "SSMMLL", "3S 3M 3L", "4S 4M 4L", "5S 5M 6L"}
    assert set(labels) >= {"8S 1M 1L", "2S 2M 12L"}
    for number in range(1, 21):
        some = default_combinations(tuple(Resolution(8 * side, 8) for side in range(1, number + 1)))
        assert len(set(some)) == len(some)
        assert {combination.is_mixed for combination in some} == ({False} if number == 1 else {False, True})


def test_random_combinations_are_seeded_and_differ() -> None:
    drawn = random_combinations(SIZES, 40, seed=3)
    assert drawn == random_combinations(SIZES, 40, seed=3)
    assert drawn != random_combinations(SIZES, 40, seed=4)
    assert len(set(drawn)) == 40
    assert {combination.num_requests for combination in drawn} <= set(range(1, 17))
    # All that there are, each once.
    assert len(set(random_combinations(SIZES[:2], 152, seed=0))) == 152
    with pytest.raises(UsageError, match=r"153 random combinations .* 1 to 152"):
        random_combinations(SIZES[:2], 153, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,1", r"'1,1' has 2 numbers, but it must have 3, one for each of 32x32, 48x48, 64x64"),
        ("1,1,1;1,1,1,1", "has 4 numbers"),
        ("1,1,1;", "has 0 numbers"),
        ("", "has 0 numbers"),
        ("1,-1,1", "'1,-1,1' has a negative number"),
        ("0,0,0", "holds 0 requests"),
        ("0,0,257", "holds 257 requests, but it must hold 1 to 256"),
        ("1,x,1", "'1,x,1' has 'x'"),
        ("1,,1", "has ''"),
        ("1,1.5,1", "has '1.5'"),
        ("1,99999999999,1", "has '99999999999'"),
    ],
)
def test_bad_combinations(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_combinations(text, SIZES)
    assert parse_combinations(" 1, 0,1 ; 2,2,2", SIZES) == (squares(1, 0, 1), squares(2, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--combinations", "1,1"], "one for each of 32x32, 48x48, 64x64"),
        (["--combinations", "1,1,1", "--random", "3"], "--combinations and --random"),
        (["--random", "969"], "1 to 968"),
        (["--resolutions", "32,huge"], "'huge'"),
        (["--resolutions", "32,36"], "multiple of 8"),
        (["--repeats", "0"], "--repeats"),
        (["--model", "emoji-xxl"], "emoji-xl, emoji-3"),
    ],
)
def test_bad_usage_is_one_line(
    run_psctl: RunPsctl, environment: dict[str, str], arguments: list[str], message: str
) -> None:
    done = run_psctl("bench", "steps", *arguments, "--quiet", "--json", **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(Path(environment["PSCTL_WORKSPACE"]).glob("*/cpu/runs/*"))


@pytest.mark.parametrize("run", [run_step_bench, run_breakdown])
def test_what_does_not_fit_the_model_leaves_no_run(run: Callable[..., Any], tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path)
    model = ServedModel(tiny_sd3(), name="tiny", options=EngineOptions(order="patch", patch_size=3))
    with pytest.raises(UsageError, match="patch size 3 does not fit"):
        run(model, [squares(1, 1, 1)], workspace, FAST)
    with pytest.raises(UsageError, match="24x24: width and height must be multiples of 16"):
        run(model, [Combination(parse_list("32,24"), (1, 0))], workspace, FAST)
    assert workspace.latest_run("bench-steps") is None


def test_group_without_a_command_shows_its_commands(run_psctl: RunPsctl) -> None:
    done = run_psctl("bench")
    assert done.returncode == 2
    assert "steps" in done.stdout


@pytest.mark.parametrize(
    "make",
    [tiny_sdxl, tiny_sd, tiny_sd3, lambda: with_scheduler(tiny_sdxl(), DDIMScheduler)],
    ids=["sdxl-euler", "sd-ddim", "sd3-flow", "sdxl-ddim"],
)
def test_all_sides_take_the_same_steps(make: Callable[[], Any]) -> None:
    model = ServedModel(make(), name="tiny")
    requests = RequestPool(model).take(squares(2, 1, 2))
    # Grouped by resolution, as they are given: so the latents of all sides come in one order.
    plain = [PlainSide(model, requests, batched=False)]
    for name, denoiser in plain_denoisers(model).items():
        plain.append(PlainSide(model, requests, batched=True, denoiser=denoiser, memory_format=name))
    patched = EngineSide(model, requests)
    for side in (*plain, patched):
        side.begin()
        for _ in range(3):
            side.step()
        assert side.steps_left == 247
    stepped = patched._active
    patched.begin()
    patched.step()  # another batch: the latents of the one before are handed back
    found = [prepared.latents for prepared in stepped]
    for side in plain:
        latents = [latent[None] for batch in side._batches for latent in batch._latents]
        assert largest_error(latents, found) < 1e-4
    moved = [float((prepared.latents - each).abs().max()) for prepared, each in zip(requests, found, strict=True)]
    assert min(moved) > 1e-3


def test_channels_last_copy_shares_what_has_no_layout(sdxl: ServedModel) -> None:
    copied = plain_denoisers(sdxl)["channels-last"]
    for (name, one), other in zip(sdxl.denoiser.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one is other) == (one.dim() != 4)
    for model, layout in ((copied, torch.channels_last), (sdxl.denoiser, torch.contiguous_format)):
        assert dict(model.named_parameters())["conv_in.weight"].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("scheduler", [DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler])
def test_requests_start_anew_when_their_schedule_ends(scheduler: Any) -> None:
    # Ten steps, of which five are left in the middle.
    model = ServedModel(with_scheduler(tiny_sdxl(), scheduler, num_train_timesteps=20), name="tiny")
    row = StepBench(model, BenchSettings(repeats=8, warmup=2)).measure(squares(1, 1, 0))
    assert row["repeats"] == 8
    assert min(row["one_by_one_ms"], row["same_resolution_ms"], row["patched_ms"]) > 0


def test_rows_and_summary(sdxl: ServedModel, tmp_path: Path) -> None:
    seen: list[str] = []
    outcome = run_step_bench(
        sdxl,
        [squares(2, 0, 0), squares(1, 1, 1), squares(2, 0, 1)],
        ModelWorkspace(tmp_path),
        FAST,
        on_start=lambda combination: seen.append(combination.label),
    )
    result = outcome.result
    assert seen == ["SS", "SML", "SSL"]
    assert not outcome.was_interrupted
    assert set(result) >= HEAD
    assert json.loads((outcome.run_dir / "steps.json").read_text()) == result
    assert Image.open(outcome.run_dir / "steps.png").width > 500
    single, *mixed = result["rows"]
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["patched_p10_ms"] <= row["patched_ms"] <= row["patched_p90_ms"]
        assert row["ratio_one_by_one"] == row["one_by_one_ms"] / row["patched_ms"]
        assert row["ratio_same_resolution"] == row["same_resolution_ms"] / row["patched_ms"]
        assert row["same_resolution_format"] in ("default", "channels-last")
    assert (single["patched_is_plain"], single["combination"]) == (True, {"32x32": 2, "48x48": 0, "64x64": 0})
    assert [row["patched_is_plain"] for row in mixed] == [False, False]
    mean = statistics.geometric_mean(row["ratio_one_by_one"] for row in mixed)
    assert result["mean_ratio_one_by_one_mixed"] == pytest.approx(mean)
    assert result["min_ratio_same_resolution"] == min(row["ratio_same_resolution"] for row in result["rows"])
    assert result["is_plain_for_one_resolution"] is True
    # Without mixed rows there is no mean, without single ones no answer.
    assert summarize([single])["mean_ratio_one_by_one_mixed"] is None
    assert summarize(mixed)["is_plain_for_one_resolution"] is None
    # The convolutions' strategies were measured, and are kept.
    assert list((tmp_path / "tables").glob("convolutions-*.json"))


@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_breakdown_adds_up(make: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ServedModel(make(), name="tiny")
    chosen = [squares(1, 1, 1), squares(0, 0, 2)]
    outcome = run_breakdown(model, chosen, ModelWorkspace(tmp_path), FAST)
    result = outcome.result
    assert json.loads((outcome.run_dir / "breakdown.json").read_text()) == result
    assert Image.open(outcome.run_dir / "breakdown.png").width > 500
    assert result["categories"] == CATEGORIES
    is_unet = make is tiny_sdxl
    for row in result["rows"]:
        assert set(row["sides"]) == {"patched", "same_resolution"}
        for side in row["sides"].values():
            assert sum(side["ms"].values()) == pytest.approx(side["step_ms"], rel=0.01)
            assert set(side["ms"]) == set(CATEGORIES)
            for category, ms in side["ms"].items():
                # SD3 has no GroupNorm; all else takes time on both sides.
                assert (ms > 0) == (is_unet or category != "group_norm"), category
    Output().data(result, table=breakdown_tables(result))
    printed = capsys.readouterr().out
    for word in ("SML", "LL", "group-norm", "stitching", "host", "same resolution"):
        assert word in printed
    # The hooks are gone.
    for module in (*model.denoiser.modules(), *model.stepper.model.model.modules()):  # type: ignore[attr-defined]
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_attribution_takes_the_innermost_that_says_what_it_does() -> None:
    spans = [
        Span("psctl:step patched", 0, 100),
        Span("aten::index_select", 1, 3),  # outside the model: guidance
        Span("psctl:model", 10, 90),
        Span("aten::add", 10, 12),
        Span("psctl:convolution", 20, 50),
        Span("aten::index_select", 21, 25),
        Span("aten::linear", 25, 45),  # stitched taps are convolved by a product
        Span("aten::addmm", 26, 44),
        Span("aten::copy_", 30, 32),
        Span("aten::view", 45, 46),
        Span("psctl:group_norm", 50, 60),
        Span("aten::to", 50, 54),  # a conversion, not a move
        Span("aten::copy_", 51, 53),
        Span("psctl:attention", 60, 80),
        Span("aten::scaled_dot_product_attention", 60, 66),
        Span("aten::copy_", 62, 63),
        Span("psctl:linear", 66, 75),
        Span("aten::linear", 67, 74),
        Span("aten::cat", 75, 79),
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


def test_attribution_of_kernels_goes_by_their_launch() -> None:
    spans = [
        Span("psctl:step patched", 0, 100),
        Span("psctl:model", 10, 90),
        Span("psctl:convolution", 20, 50),
        Span("aten::conv2d", 30, 40),
        Span("psctl:group_norm", 50, 60),
    ]
    kernels = [
        Kernel("nchwToNhwcKernel", 35, 7),
        Kernel("halo_gather_kernel", 22, 5),  # Triton's: no operator around it
        Kernel("group_norm_stitch_kernel", 51, 11),
        Kernel("vectorized_elementwise_kernel", 70, 3),
        Kernel("vectorized_elementwise_kernel", 95, 2),
    ]
    us = attribute(spans, kernels)
    expected = {"convolution": 7, "stitching": 5, "group_norm": 11, "element_wise": 3, "sampler": 2}
    assert us == dict.fromkeys(CATEGORIES, 0) | expected


def test_breakdown_command_prints_only_its_json(
    run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path
) -> None:
    options = ("--repeats", "2", "--warmup", "1", "--output-file", "result.json", "--quiet", "--json")
    done = run_psctl("bench", "steps", "--breakdown", *options, **environment)
    # The profiler's library would write to stderr.
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [row["label"] for row in result["rows"]] == ["SSMMLL"]
    assert (result["guidance_scale"], result["dtype"]) == (3.0, "float32")


def test_ctrl_c_keeps_what_is_measured(psctl_script: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = [psctl_script, "bench", "steps", "--combinations", ";".join(["1,1,1"] * 200), "--repeats", "3"]
    process = subprocess.Popen(
        [*command, "--workspace", str(tmp_path / "own"), "--output-file", "result.json"],
        cwd=tmp_path,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("own/*/cpu/runs/*/steps.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.endswith("Error: interrupted\n")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["was_interrupted"]
    for word in ("SML", "S 32x32, M 48x48, L 64x64", "geometric mean", "vs same resolution", "float32"):
        assert word in stdout
    assert 1 <= len(result["rows"]) < 200
    assert all(set(row) == ROW for row in result["rows"])
    assert json.loads((Path(result["run_dir"]) / "steps.json").read_text()) == result
    assert (Path(result["run_dir"]) / "steps.png").exists()
