"""Batches: through OpenAI's client, and offline in processes that are killed repeatedly."""

import json
import resource
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch

from patchedserve.data.workspace import Workspace
from patchedserve.serving.server.batches.file import BatchOutput

from ..conftest import RunPsctl
from ..support.disks import fill, tiny_disk
from ..support.http_server import HttpServer, small_model
from ..support.killed_batch import draw_and_kill
from ..support.waits import until

pytestmark = pytest.mark.slow
COUNT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "batch.jsonl"
    bodies = [
        {"prompt": f"cat {number}", "size": ("32x32", "64x32")[number % 2], "seed": number, "num_inference_steps": 10}
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


def test_openai_client_runs_a_batch(model: Path, lines: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=lines, purpose="batch")
        assert client.files.retrieve(file.id).filename == "batch.jsonl"
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
        # A single request goes before the lines of batches.
        assert client.images.generate(prompt="a dog", extra_body={"num_inference_steps": 2, "slo": 60}).data
        until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), 60)
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
        found = [*(path := next(tmp_path.rglob("batches"))).rglob("*"), path]
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600, 0o700}
        client.files.delete(file.id)


def started(server: HttpServer, lines: Path) -> tuple[openai.OpenAI, Batch]:
    """Start a batch of these lines with a client; return both."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    file = client.files.create(file=lines, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
    return client, batch


def ids_in(client: openai.OpenAI, *files: str | None) -> list[str]:
    """Return the `custom_id`s in the lines of these files."""
    texts = [client.files.content(file).text for file in files if file is not None]
    return [json.loads(line)["custom_id"] for text in texts for line in text.splitlines()]


@pytest.mark.exhaustive
def test_long_batch_does_not_block_other_requests(model: Path, tmp_path: Path) -> None:
    bodies = [{"prompt": f"cat {number}", "size": "64x32", "num_inference_steps": 200} for number in range(64)]
    long = tmp_path / "long.jsonl"
    long.write_text(
        "\n".join(json.dumps({"custom_id": f"line {number}", "body": body}) for number, body in enumerate(bodies))
    )
    with HttpServer(model, tmp_path / "workspace") as server:
        client, batch = started(server, long)
        until(lambda: httpx.get(f"{server.url}/v1/state").json()["load"]["running"] >= 8, 60)
        # The steps of all lines together would take much longer than these SLOs.
        for number in range(14):
            drawn = client.images.generate(prompt=f"dog {number}", size="64x32", extra_body={"slo": 10}, timeout=60)
            assert drawn.data
            assert drawn.metrics["slo_met"]  # type: ignore[attr-defined]
        # No line is lost; they continue.
        before = server.metric("psctl_pixel_steps_pending")
        until(lambda: server.metric("psctl_pixel_steps_pending") < before, 60)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        until(lambda: client.batches.retrieve(batch.id).status == "cancelled", 60)


@pytest.mark.exhaustive
def test_full_disk_pauses_a_batch(model: Path, lines: Path, tmp_path: Path) -> None:
    folder = Workspace(tmp_path).for_model(str(model), "cpu").root / "batches"
    with tiny_disk(folder, 2_000_000), HttpServer(model, tmp_path) as server:
        ballast = fill(folder, leave=120_000)
        client, batch = started(server, lines)

        def is_full() -> bool:
            errors = client.batches.retrieve(batch.id).errors
            return errors is not None and [each.code for each in errors.data or []] == ["disk_full"]

        until(is_full, 60)
        full = client.batches.retrieve(batch.id)
        assert full.status == "in_progress"
        assert full.request_counts is not None
        assert 0 < full.request_counts.completed < COUNT - 1
        assert client.images.generate(prompt="a dog", extra_body={"num_inference_steps": 2, "slo": 60}).data
        with pytest.raises(openai.APIStatusError, match="the server's disk is full") as refused:
            client.files.create(file=("big.jsonl", lines.read_bytes() * 100), purpose="batch")
        assert refused.value.status_code == 507
        assert len(list(client.files.list())) == 1
        ballast.unlink()
        until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), 60)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.errors) == ("completed", None)
        assert sorted(ids_in(client, batch.output_file_id, batch.error_file_id)) == sorted(
            f"line {number}" for number in range(COUNT)
        )
    assert any("the disk is full" in line for line in server.lines)


@pytest.mark.exhaustive
def test_failed_batch_reports_completed_lines(model: Path, lines: Path, tmp_path: Path) -> None:
    """The server's file size limit keeps the output file from growing."""
    with HttpServer(model, tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        client, batch = started(server, lines)
        until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), 60)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.errors is not None) == ("failed", True)
        assert batch.request_counts is not None
        drawn = ids_in(client, batch.output_file_id)
        assert 0 < len(drawn) < COUNT - 1
        assert (batch.request_counts.total, batch.request_counts.completed) == (COUNT, len(drawn))


@pytest.mark.exhaustive
def test_batch_resumes_after_a_restart(model: Path, lines: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=lines, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
        drawn_s = 0.01
        until(
            lambda: bool((counts := client.batches.retrieve(batch.id).request_counts) and counts.completed), 60, drawn_s
        )
        server.process.kill()
        server.process.wait()
        before = next(tmp_path.rglob(f"{batch.id}/output.jsonl")).read_bytes().count(b"\n")
        assert 0 < before < COUNT - 1, "it was killed while it drew"
    with HttpServer(model, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        drawn = [json.loads(each)["custom_id"] for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(drawn) == sorted({*drawn})
        assert len(drawn) == COUNT - 1


@pytest.mark.exhaustive
def test_each_line_is_drawn_once_despite_random_kills(
    model: Path, lines: Path, run_psctl: RunPsctl, tmp_path: Path
) -> None:
    found = draw_and_kill(lines, tmp_path / "drawn", str(model), kills=3)
    assert 0 < found.done_at_kills[0] < COUNT - 1, "it was killed while it drew"
    assert {*found.names.values()} == {1}
    assert len(found.names) == COUNT
    assert found.num_broken == 0
    again = run_psctl("batch", "run", lines, "-o", "drawn", "--model", model)
    assert "All 40 lines are done" in again.stderr
    assert not list((tmp_path / "drawn" / "images").glob(".*")), "nothing half written is left"
    other = tmp_path / "other.jsonl"
    other.write_text('{"custom_id": "line 1", "body": {"prompt": "a dog"}}')
    for asked, what in (((other,), "file"), ((lines, "--dtype", "float32"), "dtype")):
        refused = run_psctl("batch", "run", *asked, "-o", "drawn", "--model", model)
        assert refused.returncode == 2
        assert f"holds what was drawn of another {what}" in refused.stderr
    with closing(BatchOutput(tmp_path / "drawn")):
        refused = run_psctl("batch", "run", lines, "-o", "drawn", "--model", model)
    assert (refused.returncode, "another process draws into it" in refused.stderr) == (1, True)


def test_invalid_files_are_refused(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "twice.jsonl").write_text('{"custom_id": "a", "body": {}}\n{"custom_id": "a", "body": {}}\n')
    for name, message in (
        ("twice.jsonl", "line 2: custom_id 'a' is that of line 1"),
        ("missing.jsonl", "missing.jsonl"),
    ):
        done = run_psctl("batch", "run", name, "--model", model)
        assert done.returncode == 2
        assert message in done.stderr
