"""Batches: through the real client of OpenAI, and offline, killed again and again."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from PIL import Image

from ..conftest import RunPsctl
from ..support.http_server import HttpServer
from ..support.tiny_models import save_tiny, tiny_sdxl

pytestmark = pytest.mark.slow
COUNT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return save_tiny(folder, tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "64x32"], num_inference_steps=4)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "batch.jsonl"
    bodies = [
        {"prompt": f"cat {number}", "size": ("32x32", "64x32")[number % 2], "seed": number, "num_inference_steps": 3}
        for number in range(COUNT)
    ]
    bodies[7] = {"prompt": "a cat", "size": "huge"}
    path.write_text(
        "\n".join(
            json.dumps({"custom_id": f"line {number}", "method": "POST", "url": "/v1/images/generations", "body": body})
            for number, body in enumerate(bodies)
        )
    )
    return path


def test_the_client_of_openai_runs_a_batch(model: Path, lines: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=lines, purpose="batch")
        assert client.files.retrieve(file.id).filename == "batch.jsonl"
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
        # A request that waits goes first.
        assert client.images.generate(prompt="a dog", extra_body={"num_inference_steps": 2, "slo": 60}).data
        end = time.monotonic() + 60
        while client.batches.retrieve(batch.id).status not in ("completed", "failed"):
            assert time.monotonic() < end
            time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed",
            COUNT - 1,
            1,
        )
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        drawn = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert {each["custom_id"] for each in drawn} == {f"line {number}" for number in range(COUNT)} - {"line 7"}
        assert all(each["response"]["body"]["data"][0]["b64_json"] for each in drawn)
        failed = json.loads(client.files.content(batch.error_file_id).text)
        assert (failed["custom_id"], failed["response"]["body"]["error"]["param"]) == ("line 7", "size")
        assert [each.id for each in client.batches.list()] == [batch.id]
        with pytest.raises(openai.BadRequestError):
            client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError):
            client.files.content("file-000")
        client.files.delete(file.id)


def test_a_batch_goes_on_after_a_restart(model: Path, lines: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=lines, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
        while not (client.batches.retrieve(batch.id).request_counts or batch).completed:  # type: ignore[union-attr]
            time.sleep(0.01)
        server.process.kill()
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        end = time.monotonic() + 60
        while client.batches.retrieve(batch.id).status != "completed":
            assert time.monotonic() < end
            time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        drawn = [json.loads(each)["custom_id"] for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(drawn) == sorted({*drawn})
        assert len(drawn) == COUNT - 1


def test_killed_at_random_every_line_is_drawn_once(
    model: Path, lines: Path, run_psctl: RunPsctl, tmp_path: Path
) -> None:
    command = [
        str(Path(sys.executable).parent / "psctl"),
        "batch",
        "run",
        str(lines),
        "-o",
        "drawn",
        "--model",
        str(model),
    ]
    draws = random.Random(1)
    for _ in range(4):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(draws.uniform(3, 7))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run_psctl("batch", "run", lines, "-o", "drawn", "--model", model, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"total": COUNT, "completed": COUNT - 1, "failed": 1, "output_dir": "drawn"}
    told = [json.loads(each) for each in (tmp_path / "drawn" / "output.jsonl").read_text().splitlines()]
    names = [each["custom_id"] for each in told]
    assert len(names) == len({*names}) == COUNT - 1
    for each in told:
        with Image.open(tmp_path / "drawn" / "images" / each["response"]["body"]["data"][0]["file"]) as image:
            image.load()
    again = run_psctl("batch", "run", lines, "-o", "drawn", "--model", model)
    assert "All 40 lines are done" in again.stderr


def test_wrong_files(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "twice.jsonl").write_text('{"custom_id": "a", "body": {}}\n{"custom_id": "a", "body": {}}\n')
    for name, message in (
        ("twice.jsonl", "line 2: custom_id 'a' is that of line 1"),
        ("missing.jsonl", "missing.jsonl"),
    ):
        done = run_psctl("batch", "run", name, "--model", model)
        assert done.returncode == 2
        assert message in done.stderr
