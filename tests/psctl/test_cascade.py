"""A cascade from its discriminator to a simulated trace, as users run it, on a bundled model in a few steps."""

import base64
import io
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.cascade import LEGS, PLANS
from patchedserve.data.tables.published import published_cascade
from patchedserve.data.tables.schemas import RECORDS, read_rows
from patchedserve.profiling.cascade.bank import Bank
from patchedserve.psctl.options.cascade import DEFAULT_CASCADE
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.scheduling.policies import get_policy

from ..conftest import RunPsctl
from ..support.browser import BROWSER, opened_browser
from ..support.http_server import HttpServer
from ..support.tools import missing_tools
from ..support.waits import until

CASCADE = "emoji-xl:1,emoji-xl:3"
SMALL = ("--cascade", CASCADE, "--resolutions", "64,128x64")


def result_of(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_the_discriminator_to_the_comparison_of_systems(run_psctl: RunPsctl, tmp_path: Path) -> None:
    missing = run_psctl("profile", "cascade", *SMALL, "--num-prompts", "0")
    assert missing.returncode == 2
    assert "psctl train-predictor discriminator --cascade emoji-xl:1,emoji-xl:3" in missing.stderr

    trained = result_of(
        run_psctl("train-predictor", "discriminator", *SMALL, "--num-prompts", "40", "--steps", "8", "--json")
    )
    assert trained["fit"]["num_real"] + trained["fit"]["num_drawn"] + trained["fit"]["num_held_out"] == 80
    assert Path(tmp_path, trained["file"]).is_file()

    measure = ("profile", "cascade", *SMALL, "--num-prompts", "16", "--batch-sizes", "1,2", "--json")
    profiled = result_of(run_psctl(*measure))
    for leg, steps in (("light", 1), ("heavy", 3)):
        assert profiled[leg]["num_steps"] == steps
        for times in profiled[leg]["sizes"].values():
            # Other tests run at the same time, so that a batch of one may take longer than one of two.
            assert all(number > 0 for number in (*times["latency_s"], *times["throughput"], *times["step_s"]))
    assert profiled["light"]["score_s"] > 0
    assert profiled["heavy"]["score_s"] == 0
    again = run_psctl(*measure)
    assert "Times were measured before" in again.stderr
    assert result_of(again)["bank"] == profiled["bank"]

    # Half the rate at which one GPU draws heavy images, however fast this machine is.
    rate = 0.5 / max(times["latency_s"][0] for times in profiled["heavy"]["sizes"].values())
    serve = ("simulate", "--cascade", CASCADE, "--gpus", "3", "--request-rate", f"{rate:.3g}", "--slo-scale", "3")
    unknown = run_psctl(*serve, "--reuse-light")
    assert unknown.returncode == 2
    assert "psctl profile cascade --reuse-light STRENGTH" in unknown.stderr
    left_out = run_psctl("bench", "cascade", "--cascade", CASCADE, "--systems", "diffserve,diffserve --reuse-light")
    assert left_out.returncode == 2
    assert "--systems has diffserve --reuse-light, which needs times and images of psctl" in left_out.stderr
    # Heavy images that start from light ones run two of three steps.
    started = result_of(run_psctl(*measure, "--reuse-light", "0.7"))
    assert [started[side]["strength"] for side in ("light", "heavy", "reused")] == [1, 1, 0.7]
    assert started["heavy"] == profiled["heavy"], "what was measured before stays"
    assert started["bank"]["folder"] == profiled["bank"]["folder"] + "-reuse-0.7"
    assert started["bank"]["fid_heavy"] == profiled["bank"]["fid_heavy"] != started["bank"]["fid_reused"]
    reusing = result_of(run_psctl(*serve, "--num-prompts", "80", "--reuse-light", "--json"))
    assert reusing["config"]["bank"] == started["bank"]["folder"]
    assert reusing["quality"]["fid_reused"] is not None
    assert reusing["heavy_share"] > 0
    summary = result_of(run_psctl(*serve, "--num-prompts", "80", "--json"))
    assert summary["total_requests"] == 80
    assert summary["config"]["system"] == "diffserve"
    assert summary["quality"]["num_images"] == summary["completed_requests"]
    run_dir = tmp_path / summary["run_dir"]
    assert len(read_rows(run_dir / "records.parquet", RECORDS)) == 80
    legs, plans = read_rows(run_dir / "legs.parquet", LEGS), read_rows(run_dir / "plans.parquet", PLANS)
    assert {row["request_id"] for row in legs} <= set(range(80))
    assert all(row["is_deferred"] == (row["confidence"] < row["threshold"]) for row in legs if row["confidence"])
    assert all(row["light_workers"] + row["heavy_workers"] == 3 for row in plans)
    page = (run_dir / "report.html").read_text()
    assert "Threshold" in page or "threshold of confidence" in page
    assert (run_dir / "plots" / "cascade.png").stat().st_size > 10_000
    own = ("--objective", "quality", "--skip-light", "--threshold-per-resolution")
    by_quality = result_of(run_psctl(*serve, "--num-prompts", "80", *own, "--json"))
    assert by_quality["config"]["objective"] == "quality"
    assert by_quality["total_requests"] == 80
    # The same seed gives the same run.
    other = result_of(run_psctl(*serve, "--num-prompts", "80", "--json"))
    for name in ("quality", "slo_violation_rate", "heavy_share", "switches"):
        assert other[name] == summary[name]

    compared = result_of(
        run_psctl(
            *("bench", "cascade", "--cascade", CASCADE, "--gpus", "3", "--trace", "shape", "--rate-range", "5:30"),
            *("--duration", "5", "--systems", "diffserve,proteus,clipper-light", "--num-seeds", "2", "--json"),
            *("--slo-scales", "2.5,4", "--num-resamples", "3", "--ours"),
        )
    )
    assert [row["system"] for row in compared["rows"][:3]] == ["diffserve", "proteus", "clipper-light"]
    assert compared["rows"][0]["against_base"] is None
    assert compared["rows"][1]["against_base"]["fid_difference"]["low"] is not None
    assert compared["rows"][2]["heavy_share"] == 0
    ours = {row["system"]: row for row in compared["rows"][3:9]}
    flags = ("objective quality", "on-late light", "replan-on-burst", "skip-light", "reuse-light")
    assert list(ours) == [f"diffserve --{flag}" for flag in (*flags, "threshold-per-resolution")]
    assert all(row["against_base"]["violation_difference"]["low"] is not None for row in ours.values())
    found = {
        (row["slo_scale"], row["system"]): (row["violation_rate"]["value"], row["quality"]["fid"])
        for row in compared["rows"]
    }
    assert {(each["slo_scale"], each["system"]) for each in compared["dominating"]} == {
        (scale, name)
        for (scale, name), (late, fid) in found.items()
        if late < found[scale, "diffserve"][0] and fid < found[scale, "diffserve"][1]
    }
    for name in ("over-lateness.png", "side-by-side.png", "over-slo-scales.png", "report.html", "result.json"):
        assert (tmp_path / compared["run_dir"] / name).is_file()
    shared = result_of(run_psctl(*serve, "--num-prompts", "80", "--system", "diffserve-shared", "--json"))
    assert (shared["total_requests"], shared["switches"]) == (80, 0)
    other_models = run_psctl("simulate", "--cascade", "emoji-xl:1,emoji-3:3", "--system", "diffserve-shared")
    assert other_models.returncode == 2

    near = ("--real", "near", "--num-prompts", "40", "--steps", "4", "--output-file", "near.safetensors", "--json")
    half = result_of(run_psctl("train-predictor", "discriminator", *SMALL, *near))
    # In each size, the better half of the light images counts as real; a fifth of all images is held out.
    assert (half["real"], half["fit"]["num_real"], half["fit"]["num_drawn"]) == ("near", 16, 16)
    files = trained["file"], half["file"]
    scored = result_of(
        run_psctl("eval", "discriminators", *files, "--cascade", CASCADE, "--num-resamples", "2", "--json")
    )
    assert [row["scorer"] for row in scored["rows"]] == ["mbconv gt", "mbconv near", "CLIP score (emoji-clip)"]
    ends = [scored["random"][place]["fid"] for place in (0, -1)]
    for row in scored["rows"]:
        # With no image deferred, and with every image deferred, all scorers agree.
        assert [row["curve"][place]["fid"] for place in (0, -1)] == pytest.approx(ends)
        assert [each["share"] for each in row["against_random"]] == [0.2, 0.4, 0.6]
        assert 0 <= row["easy"]["share"] <= 1
    assert scored["mean_latency_s"][0] < scored["mean_latency_s"][1]
    for name in ("over-latency.png", "easy-prompts.png", "allocations.png", "report.html"):
        assert (tmp_path / scored["run_dir"] / name).is_file()
    unknown_peak = run_psctl("serve", "--http", "--cascade", CASCADE, "--system", "diffserve-static")
    assert unknown_peak.returncode == 2
    assert "plans for the peak of a trace, and over HTTP nobody knows it" in unknown_peak.stderr
    unknown_size = run_psctl("serve", "--http", "--cascade", CASCADE, "--resolutions", "64,192")
    assert unknown_size.returncode == 2
    assert "192x192 is not profiled" in unknown_size.stderr
    serves_clients(tmp_path / "psctl-workspace")


def serves_clients(workspace: Path) -> None:
    """The same cascade over HTTP: the model that drew an image and the reason, refusals, and a killed worker."""
    options = ("--cascade", CASCADE, "--workers", "2", "--slo-scale", "100")
    folder = workspace.parent / "temporary"
    folder.mkdir()
    with (
        HttpServer(None, workspace, *options, env={"TMPDIR": str(folder)}, start_s=180) as server,
        httpx.Client(timeout=120) as client,
    ):

        def ask(**fields: Any) -> httpx.Response:
            body = {"prompt": "a red hat", "size": "64x64", **fields}
            return client.post(f"{server.url}/v1/images/generations", json=body)

        drawn = io.BytesIO()
        Image.new("RGB", (64, 64), "white").save(drawn, "PNG")
        png = drawn.getvalue()
        card = client.get(f"{server.url}/v1/models").json()["data"][0]
        assert (card["id"], card["cascade"]) == (CASCADE, CASCADE.split(","))
        assert card["sizes"] == ["64x64", "128x64"]

        with ThreadPoolExecutor(8) as pool:
            answers = [each.json()["data"][0] for each in pool.map(lambda seed: ask(seed=seed), range(16))]
        assert {each["model"] for each in answers} <= set(CASCADE.split(","))
        for seed, each in enumerate(answers):
            if each["threshold"] is not None:
                assert each["model"] == CASCADE.split(",")[each["confidence"] < each["threshold"]]
            if seed < 3:
                assert_is_image_of(each, seed)
        sure = ask(fallback="never", seed=3).json()["data"][0]
        assert (sure["model"], sure["confidence"], sure["threshold"]) == ("emoji-xl:3", None, None)
        assert_is_image_of(sure, 3)

        for name, value in (
            ("num_inference_steps", 5), ("guidance_scale", 2.0), ("quality", "high"), ("fallback", "always"),
            ("size", "128x128"),
        ):  # fmt: skip
            refused = ask(**{name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text
        partial = ask(stream=True, partial_images=1)
        assert (partial.status_code, partial.json()["error"]["param"]) == (400, "partial_images"), partial.text
        assert ask(partial_images=0).status_code == 200
        edit = client.post(
            f"{server.url}/v1/images/edits",
            data={"prompt": "a hat"},
            files=dict.fromkeys(("image", "mask"), ("a.png", png, "image/png")),
        )
        assert (edit.status_code, edit.json()["error"]["param"]) == (400, "image"), edit.text
        body = {"prompt": "a hat", "size": "64x64", "stream": True, "progress": True, "fallback": "never"}
        with client.stream("POST", f"{server.url}/v1/images/generations", json=body) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
        assert [each["steps_done"] for each in events[:-1]] == [1, 2, 3]
        assert (events[-1]["type"], events[-1]["model"]) == ("image_generation.completed", "emoji-xl:3")

        if missing_tools(*BROWSER) is None:  # the rest needs no browser
            with opened_browser() as browser:
                draws_on_its_page(browser, server.url)

        # When a client disconnects, its images are withdrawn wherever they are; none stays in the server's folder.
        with client.stream("POST", f"{server.url}/v1/images/generations", json={**body, "n": 10}) as stream:
            next(stream.iter_lines())
        until(lambda: client.get(f"{server.url}/v1/state").json()["load"]["running"] == 0)
        assert len(list(folder.glob("psctl-cascade-*"))) == 1
        until(lambda: not any(folder.glob("psctl-cascade-*/*")))
        replicas = client.get(f"{server.url}/v1/state").json()["replicas"]
        assert [each["health"] for each in replicas] == ["ready", "ready"]
        with ThreadPoolExecutor(8) as pool:
            open_ones = [pool.submit(ask, seed=seed, n=4) for seed in range(8)]
            os.kill(replicas[0]["process_id"], signal.SIGKILL)
            assert [each.result().status_code for each in open_ones] == [200] * 8
        until(lambda: any("Worker 0 serves again" in line for line in server.lines), 120)
        number = ask(n=2).json()["id"]
        assert client.get(f"{server.url}/v1/images/generations/{number}").json()["status"] == "completed"
        pids = [each["process_id"] for each in client.get(f"{server.url}/v1/state").json()["replicas"]]
        until(lambda: not any(folder.glob("psctl-cascade-*/*")))
        assert server.stop() == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
        assert not any(folder.glob("psctl-cascade-*"))


def draws_on_its_page(browser: webdriver.Chrome, url: str) -> None:
    browser.get(url)

    def text(name: str) -> str:
        return browser.find_element(By.ID, name).text

    steps = browser.find_element(By.ID, "steps")
    until(lambda: not steps.is_enabled())
    browser.find_element(By.ID, "prompt").send_keys("a red hat")
    browser.find_element(By.ID, "go").click()
    until(lambda: text("told").startswith("done in "))
    assert not browser.find_element(By.ID, "edit-drawn").is_displayed(), "a cascade takes no edits"
    assert text("told").rpartition(", by ")[2] in CASCADE.split(",")
    assert re.fullmatch(r"images of a confidence below [01]\.\d\d are drawn again by emoji-xl:3: .*", text("plan"))


def assert_is_image_of(told: dict[str, Any], seed: int) -> None:
    """Check that the image is the one that the named model draws alone, up to the rounding of other batch sizes."""
    steps = int(told["model"].rpartition(":")[2])
    with Image.open(io.BytesIO(base64.b64decode(told["b64_json"]))) as file:
        off = np.abs(np.asarray(file, dtype=int) - np.asarray(drawn_alone(steps, seed), dtype=int))
    assert off.max() <= 1


def drawn_alone(steps: int, seed: int) -> Image.Image:
    model = load_model("emoji-xl", "cpu", "float32")
    collector = InMemory(keep_images=True)
    engine = Engine(model, get_policy("fcfs"), collector=collector)
    engine.submit(Request(0, "a red hat", Resolution(64, 64), steps, model.defaults.guidance_scale, seed))
    engine.close()
    engine.run()
    return collector.images[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bundled_cascade_is_simulated(run_psctl: RunPsctl) -> None:
    """Without a profile, the bundled cascade is used to simulate and compare systems, but not to serve."""
    serve = ("simulate", "--cascade", DEFAULT_CASCADE, "--gpus", "4", "--request-rate", "4", "--num-prompts", "80")
    done = run_psctl(*serve, "--json")
    summary = result_of(done)
    assert "Times and images: those in the box (emoji-xl, " in done.stderr
    assert summary["total_requests"] == 80
    assert summary["quality"]["num_images"] == summary["completed_requests"] > 0
    assert summary["quality"]["fid_heavy"] < summary["quality"]["fid_light"]
    reusing = result_of(run_psctl(*serve, "--reuse-light", "--json"))
    assert reusing["quality"]["fid_reused"] is not None
    compared = result_of(
        run_psctl(
            *("bench", "cascade", "--gpus", "4", "--request-rate", "4", "--num-prompts", "80", "--num-seeds", "1"),
            *("--systems", "diffserve,clipper-light", "--num-resamples", "2", "--json"),
        )
    )
    assert [row["system"] for row in compared["rows"]] == ["diffserve", "clipper-light"]
    served = run_psctl("serve", "--cascade", DEFAULT_CASCADE, "--workers", "1")
    assert served.returncode == 2
    assert f"no profile of the cascade {DEFAULT_CASCADE}" in served.stderr
    folder = published_cascade(DEFAULT_CASCADE)
    assert folder is not None
    assert not [name for name in Bank.load(folder).about if name.endswith("_images")], "folders of another machine"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("simulate", "--cascade", "emoji-xl:4"), "must be two models"),
        (("simulate", "--cascade", "emoji-xl:4,emoji-xl:50"), "psctl profile cascade --cascade emoji-xl:4,emoji-xl:50"),
        (("simulate", "--cascade", CASCADE, "--max-batch-size", "3"), "--max-batch-size is for a single model"),
        (("simulate", "--cascade", CASCADE, "--system", "bucketed"), "must be one of diffserve"),
        (("simulate", "--system", "diffserve"), "--system diffserve is of two models: give --cascade"),
        (("simulate", "--balance", "random"), "--balance belongs to --cascade"),
        (("serve", "--http", "--cascade", CASCADE), "no profile of the cascade"),
        (("serve", "--http", "--cascade", CASCADE, "--request-rate", "2"), "--request-rate belongs to traces"),
        (("serve", "--http", "--cascade", CASCADE, "--num-replicas", "2"), "--num-replicas is for a single model"),
        (("serve", "--http", "--cascade", CASCADE, "--calibrate", "off"), "--calibrate is for a single model"),
        (("serve", "--cascade", CASCADE, "--port", "80"), "--port is for servers: add --http"),
        (("simulate", "--cascade", CASCADE, "--cascade-profile", "none.json"), "none.json"),
        (("bench", "cascade", "--cascade", CASCADE, "--systems", "diffserve,other"), "no profile of the cascade"),
        (("profile", "cascade", "--batch-sizes", "2,4"), "begin with 1"),
        (("profile", "cascade", "--reuse-light", "1"), "a share of the steps between 0 and 1"),
        (("profile", "cascade", "--cascade", "emoji-xl:4,nobody"), "unknown model 'nobody'"),
        (("train-predictor", "discriminator", "--cascade", "emoji-xl,emoji-xl"), "must differ"),
        (("bench", "slo", "--trace", "shape"), "has rates of its own"),
        (("simulate", "--trace", "shape"), "needs its least and greatest rate"),
        (("simulate", "--rate-range", "1:2"), "belongs to --trace shape"),
    ],
)
def test_bad_requests_give_a_one_line_error(run_psctl: RunPsctl, arguments: tuple[str, ...], reason: str) -> None:
    done = run_psctl(*arguments)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
