"""`psctl bench serve` against our server, whose counters must agree, and against a server as users would write it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from patchedserve.profiling.http.load import LoadResult

from ..conftest import RunPsctl
from ..support.http_server import HttpServer, small_model
from ..support.waits import until

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
LOAD = ("--num-prompts", "4", "--request-rate", "20", "--resolutions", "32,64x32", "--num-inference-steps", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with HttpServer(model, tmp_path_factory.mktemp("workspace"), "--slo-scale", "100") as running:
        yield running


@contextmanager
def started(script: str, *arguments: str) -> Iterator[str]:
    """Run a server of a script on a free port, and yield its URL."""
    command = [sys.executable, str(REPOSITORY / script), *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield next(match[1] for line in process.stderr if (match := re.search(r"running on (http://\S+)", line)))
    finally:
        process.kill()
        process.wait()


def received_by(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/received").raise_for_status().json()


def bench(run_psctl: RunPsctl, url: str, *options: str, load: Sequence[str] = LOAD) -> subprocess.CompletedProcess[str]:
    return run_psctl("bench", "serve", "--base-url", f"{url}/v1", *load, *options)


def metrics_of(server: HttpServer) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def require_sent(done: subprocess.CompletedProcess[str]) -> None:
    """Check that the load was sent, or that the command reports that the machine was too busy to send it in time."""
    assert done.returncode == 0 or "too busy to send this load" in done.stderr, done.stderr


def test_late_sending_invalidates_the_measurement() -> None:
    assert LoadResult(send_lag_s=[0.001] * 99 + [0.2]).is_valid
    assert not LoadResult(send_lag_s=[0.001] * 9 + [0.2] * 3).is_valid


@pytest.mark.exhaustive
def test_client_and_server_counts_agree(server: HttpServer, run_psctl: RunPsctl, tmp_path: Path) -> None:
    before = metrics_of(server)
    load = (
        "--trace",
        "poisson",
        "--request-rate",
        "30",
        "--num-prompts",
        "40",
        "--seed",
        "3",
        "--disconnect-rate",
        "0.1",
    )
    done = run_psctl(
        "bench", "serve", "--base-url", f"{server.url}/v1", *load, "--slo", "--slo-scale", "200",
        "--output-file", "found.json", "--save-dir", "images", "--json",
    )  # fmt: skip
    require_sent(done)
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["completed_requests"] == len(list((tmp_path / "images").glob("*.png")))
    left = found["cancelled_requests"]
    assert left > 0
    assert found["is_valid"] is (found["send_lag_p99"] <= 0.05)
    assert found["slo_scale"] == 200
    for name in ("duration", "throughput_qps", "latency_p99", "slo_attainment_rate", "send_lag_p99", "by_code"):
        assert found[name] is not None

    def grown(name: str) -> float:
        return metrics_of(server).get(name, 0.0) - before.get(name, 0.0)

    ended, warm_up = 'psctl_request_success_total{finished_reason="%s"}', 2 * 2
    # Requests of disconnected clients may stay open for a moment.
    until(lambda: grown(ended % "completed") + grown(ended % "cancelled") == 40 + warm_up)
    completed = grown(ended % "completed")
    # A client that disconnects may miss an image that was completed at that moment.
    assert found["completed_requests"] + warm_up <= completed <= found["completed_requests"] + warm_up + left
    assert grown('psctl_http_requests_total{code="200",route="/v1/images/generations"}') >= found["by_code"]["200"]


def test_streams_report_the_time_to_the_first_image(server: HttpServer, run_psctl: RunPsctl) -> None:
    config = '[{"width": 32, "height": 32, "num_inference_steps": 8, "weight": 3}, {"width": 64, "height": 32}]'
    done = run_psctl(
        "bench", "serve", "--base-url", f"{server.url}/v1", "--num-prompts", "10", "--request-rate", "20",
        "--random-request-config", config, "--stream", "--max-concurrency", "4", "--json",
    )  # fmt: skip
    require_sent(done)
    found = json.loads(done.stdout)
    assert found["completed_requests"] == 10
    assert 0 < found["time_to_first_image_mean"] < found["latency_mean"]


def test_gates_read_the_results(server: HttpServer, run_psctl: RunPsctl, tmp_path: Path) -> None:
    done = run_psctl(
        "bench", "serve", "--base-url", f"{server.url}/v1", "--num-prompts", "5", "--request-rate", "10",
        "--output-file", "found.json",
    )  # fmt: skip
    require_sent(done)
    (tmp_path / "gates.toml").write_text('[[gate]]\nfile = "found.json"\nmetric = "failed_requests"\nmax = 0\n')
    gated = run_psctl("gate", "gates.toml")
    assert gated.returncode == 0, gated.stderr


@pytest.mark.exhaustive
def test_plain_diffusers_server_can_be_measured(model: Path, run_psctl: RunPsctl) -> None:
    with started("tests/benchmarks/plain_server.py", str(model), "--dtype", "float32") as url:
        load = ("--num-prompts", "6", "--request-rate", "20", "--resolutions", "32,64x32", "--num-inference-steps", "3")
        done = bench(run_psctl, url, "--json", load=load)
        require_sent(done)
        assert json.loads(done.stdout)["completed_requests"] == 6
        untold = bench(run_psctl, url, load=())
        assert untold.returncode == 2
        assert "give --resolutions and --num-inference-steps" in untold.stderr


def test_parameters_that_a_server_lacks_are_not_sent(run_psctl: RunPsctl, tmp_path: Path) -> None:
    with started("tests/support/images_server.py", "vllm-omni") as url:
        done = bench(run_psctl, url, "--slo", "--stream", "--json", "--save-dir", "images")
        require_sent(done)
        found = json.loads(done.stdout)
        assert (found["completed_requests"], found["model"]) == (4, "vllm-omni-model")
        assert found["slo_attainment_rate"] is not None, "SLOs count without being sent"
        noted = [line for line in done.stderr.splitlines() if "/openapi.json" in line]
        assert len(noted) == 1
        assert f"{url}/v1/images/generations: omits partial_images, slo, stream, as the server's" in noted[0]
        for body in received_by(url):
            assert body.keys() == {
                "prompt", "size", "num_inference_steps", "guidance_scale", "seed", "response_format",
            }  # fmt: skip
    assert len(list((tmp_path / "images").glob("*.png"))) == 4


@pytest.mark.exhaustive
def test_dataset_c_needs_only_the_sizes_of_a_server(run_psctl: RunPsctl) -> None:
    load = ("--trace", "dataset-c", "--num-prompts", "30", "--request-rate", "100", "--resolutions", "64,96,128,192")
    with started("tests/support/images_server.py", "sglang") as url:
        done = bench(run_psctl, url, "--warmup-requests", "0", load=load)
        require_sent(done)
        shapes = {(body["size"], body["num_inference_steps"]) for body in received_by(url)}
    # The largest size counts as that of the model, which is 1024 in the published mix.
    assert shapes == {("96x96", 20), ("128x128", 20), ("192x192", 25), ("192x192", 35)}


def test_parameters_with_other_names_are_found(run_psctl: RunPsctl, tmp_path: Path) -> None:
    with started("tests/support/images_server.py", "other") as url:
        done = bench(run_psctl, url, "--json", "--save-dir", "images")
        require_sent(done)
        assert json.loads(done.stdout)["completed_requests"] == 4
        assert (
            "sends guidance_scale as cfg_scale, num_inference_steps as steps, size as width and height and omits "
            "response_format, seed"
        ) in done.stderr
        assert {(body["width"], body["height"], body["steps"]) for body in received_by(url)} == {
            (32, 32, 3),
            (64, 32, 3),
        }
    # The answers are addresses of images, which the client has read.
    assert len(list((tmp_path / "images").glob("*.png"))) == 4


def test_a_profile_has_the_last_word(run_psctl: RunPsctl, tmp_path: Path) -> None:
    profile = tmp_path / "sglang.toml"
    profile.write_text(
        '[fields]\nguidance_scale = "true_cfg_scale"\nseed = ""\n[extra]\ngenerator_device = "cpu"\n'
        'response_format = "url"\n'
    )
    with started("tests/support/images_server.py", "sglang") as url:
        done = bench(run_psctl, url, "--json", "--server-profile", str(profile), "--save-dir", "images")
        require_sent(done)
        assert json.loads(done.stdout)["completed_requests"] == 4
        for body in received_by(url):
            assert (body["generator_device"], body["response_format"]) == ("cpu", "url")
            assert "true_cfg_scale" in body
            assert not {"guidance_scale", "seed"} & body.keys()
    assert len(list((tmp_path / "images").glob("*.png"))) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[fields]\nsteps = "n"\n', "'steps' is no parameter; they are prompt, model, size"),
        ("[fields\n", "is not valid TOML"),
        ("[names]\n", "unknown key 'names'"),
        ("[fields]\nseed = 5\n", "fields.seed is 5, but it must be text"),
    ],
)
def test_bad_profiles_are_refused(run_psctl: RunPsctl, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "profile.toml").write_text(text)
    done = run_psctl("bench", "serve", "--server-profile", "profile.toml")
    assert done.returncode == 2
    assert f"profile.toml: {message}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_our_server_takes_all_parameters(server: HttpServer, run_psctl: RunPsctl) -> None:
    done = bench(run_psctl, server.url, "--slo", "--slo-scale", "200", "--stream", "--json", load=LOAD[:4])
    require_sent(done)
    assert "openapi.json" not in done.stderr


@pytest.mark.exhaustive
def test_two_servers_are_compared_on_the_same_traces(run_psctl: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "gates.toml").write_text(
        '[[gate]]\nfile = "two.json"\nmetric = "second.failed_requests"\nmax = 0\n'
        '[[gate]]\nfile = "two.json"\nmetric = "first.failed_requests"\nmax = 0\n'
        '[[gate]]\nfile = "two.json"\nmetric = "ssim"\nmin = 0.9\n'
        '[[gate]]\nfile = "two.json"\nmetric = "ssim"\nstatistic = "min"\nmin = 0.8\n'
    )
    script = "tests/support/images_server.py"
    slow = ("--step-s", "0.5", "--noise", "1")
    with started(script, "vllm-omni", "--step-s", "0.05") as one, started(script, "sglang", *slow) as other:
        two = (
            "--against",
            f"{other}/v1",
            "--num-seeds",
            "2",
            "--compare-images",
            "--slo",
            "--slo-scale",
            "3",
            "--json",
        )
        load = (*LOAD[:2], "--request-rate", "4", *LOAD[4:], "--warmup-requests", "1")
        done = bench(run_psctl, one, *two, "--output-file", "two.json", load=load)
        require_sent(done)
        found = json.loads(done.stdout)
        bodies = [received_by(url) for url in (one, other)]
        gated = run_psctl("gate", "gates.toml")
    assert found["servers"] == {"first": f"{one}/v1", "second": f"{other}/v1"}
    assert [each["first"]["model"] for each in found["traces"]] == ["vllm-omni-model"] * 2
    assert [each["second"]["completed_requests"] for each in found["traces"]] == [4, 4]

    def asked(bodies: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
        return sorted((each["prompt"], each["seed"], each["size"]) for each in bodies)

    assert asked(bodies[0]) == asked(bodies[1]), "the same requests"
    assert len(bodies[0]) == 2 * 4 + 2, "two traces, and a request of each size before"
    figures = found["figures"]
    for name in ("latency_mean", "latency_p95", "slo_attainment", "throughput", "goodput"):
        one, other, off = (figures[key] for key in (f"first.{name}", f"second.{name}", f"{name}.difference"))
        assert off["value"] == pytest.approx(other["value"] - one["value"])
        assert off["n"] == 2
        assert off["low"] <= off["value"] <= off["high"]
    # Three steps take 1.5 s instead of 0.15 s.
    assert figures["latency_mean.difference"]["value"] > 0.5
    assert figures["slo_attainment.difference"]["value"] < 0, "SLOs are those of the first server"
    assert len(found["per_image"]["ssim"]) == 8
    assert 0.9 < figures["ssim"]["value"] < 1, "the noise of the second"
    assert gated.returncode == 0, gated.stdout + gated.stderr


@pytest.mark.exhaustive
def test_equal_images_are_equal(run_psctl: RunPsctl, tmp_path: Path) -> None:
    script = "tests/support/images_server.py"
    with started(script, "vllm-omni") as one, started(script, "sglang") as other:
        done = bench(
            run_psctl, one, "--against", f"{other}/v1", "--compare-images", "--num-seeds", "1", "--save-dir", "kept"
        )
        require_sent(done)
    assert re.search(r"SSIM of images\W+1\W+1 to 1", done.stdout), done.stdout
    compared = run_psctl("eval", "compare", "kept/first", "kept/second", "--metrics", "psnr")
    assert compared.returncode == 0, compared.stderr


@pytest.mark.exhaustive
def test_our_server_against_plain_diffusers(server: HttpServer, model: Path, run_psctl: RunPsctl) -> None:
    with started("tests/benchmarks/plain_server.py", str(model), "--dtype", "float32") as url:
        done = bench(run_psctl, server.url, "--against", f"{url}/v1", "--compare-images", "--num-seeds", "2", "--json")
        require_sent(done)
        found = json.loads(done.stdout)
    assert [found["figures"][f"{side}.completed_requests"]["value"] for side in ("first", "second")] == [8, 8]
    assert found["figures"]["ssim"]["value"] > 0.999, "exact in a mixed batch"


@pytest.mark.exhaustive
def test_servers_that_cannot_be_compared(run_psctl: RunPsctl) -> None:
    with started("tests/support/images_server.py", "vllm-omni") as one:
        for options, code, message in (
            (("--compare-images",), 2, "--compare-images is for two servers: name the second one with --against"),
            (("--num-seeds", "2"), 2, "--num-seeds is for two servers"),
            (("--against", "localhost:1"), 2, "must begin with http:// or https://"),
            (("--against", "http://127.0.0.1:9/v1"), 1, "http://127.0.0.1:9/v1 does not answer"),
        ):
            done = bench(run_psctl, one, *options)
            assert done.returncode == code, done.stderr
            assert message in done.stderr
            assert "Traceback" not in done.stderr
        with started("tests/support/images_server.py", "other") as other:
            done = bench(run_psctl, one, "--against", f"{other}/v1", "--compare-images")
            assert done.returncode == 2
            assert "takes no seed, so its images have no partners" in done.stderr


def test_bad_usage_is_refused(run_psctl: RunPsctl, server: HttpServer) -> None:
    for options, code, message in (
        (("--base-url", "localhost:8000"), 2, "must begin with http:// or https://"),
        (("--base-url", "http://127.0.0.1:9/v1"), 1, "does not answer"),
        (("--disconnect-rate", "1.5"), 2, "must be from 0 to 1"),
        (("--slo", "--warmup-requests", "0"), 2, "--slo needs --warmup-requests"),
        (("--random-request-config", "[]"), 2, "needs at least one size"),
        (("--random-request-config", "{"), 2, "is not a list of sizes"),
    ):
        done = run_psctl("bench", "serve", "--base-url", f"{server.url}/v1", *options)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
