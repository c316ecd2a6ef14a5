"""`psctl profile parallel`: its output, where configurations come from, bad input."""

import json
from pathlib import Path

import pytest

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "sdxl", tiny_sdxl())
    save_tiny(folder / "sd3", tiny_sd3())
    (folder / "broken.json").write_text("{")
    config = json.loads((folder / "sdxl" / "unet" / "config.json").read_text())
    (folder / "zero.json").write_text(json.dumps(config | {"norm_num_groups": 0}))
    return folder


def test_result_as_json_and_in_a_file(run_psctl: RunPsctl, models: Path) -> None:
    given = ("--config", models / "sd3", "--resolutions", "128,64x112", "--num-ranks", "3,1,2")
    link = ("--sync-ms", "1", "--bandwidth", "0.001", "--displaced-share", "0.5")
    file = models / "new" / "result.json"
    done = run_psctl("profile", "parallel", *given, *link, "--output-file", file, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(file.read_text())
    assert result["class"] == "SD3Transformer2DModel"
    assert result["settings"]["link"] == {"sync_s": 0.001, "bytes_per_s": 1e6, "displaced_share": 0.5}
    found = {(each["quantity"], each["resolution"], each["num_ranks"]): each for each in result["figures"]}
    assert {ranks for _, _, ranks in found} == {1, 2, 3}
    assert {size for _, size, _ in found} == {"128x128", "64x112"}
    for (quantity, size, ranks), each in found.items():
        assert each["paper"] is None
        if each["counted"] is not None:
            assert each["ours"] == pytest.approx(each["counted"])
        if quantity == "waiting_sync_ms":
            received = (
                2e9 * found["received_g", size, ranks]["ours"] + 1e6 * found["statistics_mb", size, ranks]["ours"]
            )
            assert each["ours"] == pytest.approx(1 + received / 1e3)
            assert found["waiting_displaced_ms", size, ranks]["ours"] == pytest.approx(each["ours"] / 2)


def test_table_is_printed_without_json(run_psctl: RunPsctl, models: Path) -> None:
    config = models / "sdxl" / "unet" / "config.json"
    done = run_psctl("profile", "parallel", "--config", config, "--resolutions", "64", "--num-ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "MACs of a step, G" in done.stdout
    assert "torch counts the same within 0.00%" in done.stdout
    assert "paper" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "sdxxl"], "--config sdxxl is none of sdxl, sd3-medium, and no model either: unknown model"),
        (["--config", "{models}/broken.json"], "broken.json: not valid JSON"),
        (["--config", "{models}/sdxl/vae/config.json"], "is of AutoencoderKL, but it must be of UNet2DConditionModel"),
        (["--config", "{models}/zero.json"], "zero.json: diffusers makes no UNet2DConditionModel of it"),
        (["--config", "{models}/sdxl/vae"], "is not a diffusers directory"),
        (["--config", "{models}/sdxl", "--resolutions", "64", "--num-ranks", "3"], "resolution 64x64: 3 ranks are too"),
        (["--num-ranks", "2,x"], "--num-ranks is '2,x', but it must be whole numbers of at least 1"),
        (["--num-ranks", "0"], "--num-ranks is '0'"),
        (["--num-ranks", ""], "--num-ranks is ''"),
        (["--resolutions", "100"], "multiple of 8"),
        (["--bandwidth", "0"], "--bandwidth is 0 GB/s, but it must be positive"),
        (["--sync-ms", "-1"], "--sync-ms is -1"),
        (["--displaced-share", "2"], "--displaced-share is 2"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, models: Path, arguments: list[str], message: str
) -> None:
    given = (each.format(models=models) for each in arguments)
    done = run_psctl("profile", "parallel", *given, "--json", "--quiet")
    assert (done.returncode, done.stdout) == (1 if "not valid JSON" in message else 2, ""), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
