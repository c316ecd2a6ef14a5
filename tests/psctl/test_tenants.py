"""Several keys on one server: ownership, and that no key delays another."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from patchedserve.data.resolution import Resolution

from ..conftest import RunPsctl
from ..support.edits import file_of, image_of
from ..support.http_server import HttpServer, small_model
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import until

pytestmark = pytest.mark.slow
ASK = {"prompt": "a cat", "num_inference_steps": 3, "size": "32x32"}
GENERATIONS, BATCHES = "/v1/images/generations", "/v1/batches"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


def keys_file(path: Path, text: str) -> tuple[str, str]:
    path.write_text(text)
    return "--api-key-file", str(path)


def client_of(server: HttpServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(server: HttpServer, key: str, **change: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{GENERATIONS}", json={**ASK, **change}, headers=headers, timeout=60)


def send(client: openai.OpenAI, bodies: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    lines = [json.dumps({"custom_id": f"line {number}", "body": body}) for number, body in enumerate(bodies)]
    return client.files.create(file=("batch.jsonl", "\n".join(lines).encode()), purpose="batch", **more)


def begin(client: openai.OpenAI, file: Any) -> Any:
    return client.batches.create(input_file_id=file.id, endpoint=GENERATIONS, completion_window="24h")  # type: ignore[arg-type]


def metrics_of(server: HttpServer, key: str) -> str:
    return httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"}).raise_for_status().text


@pytest.mark.exhaustive
def test_names_keep_the_data_of_their_keys(model: Path, tmp_path: Path) -> None:
    """A key without a name is given a name, and then the name gets another key."""
    with HttpServer(model, tmp_path, *keys_file(tmp_path / "keys", "sk-old\nsk-other\n")) as server:
        client = client_of(server, "sk-old")
        file = send(client, [ASK])
        batch = begin(client, file)
        until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    named = "[red]\nkeys = [{}]\n[blue]\nkeys = ['sk-other']\n"
    for number, keys in enumerate((["sk-new", "sk-old"], ["sk-new"])):
        options = keys_file(tmp_path / f"{number}.toml", named.format(", ".join(map(repr, keys))))
        with HttpServer(model, tmp_path, *options, env={"PSCTL_API_KEY": "sk-boss"}) as server:
            until(lambda: client_of(server, "sk-new").batches.retrieve(batch.id).output_file_id is not None)
            for key in keys:
                assert [each.id for each in client_of(server, key).files.list()] == [file.id]
            with pytest.raises(openai.NotFoundError):
                client_of(server, "sk-other").batches.retrieve(batch.id)
            drawn = ask(server, keys[-1])
            assert drawn.status_code == 200
            found = httpx.get(
                f"{server.url}{GENERATIONS}/{drawn.json()['id']}", headers={"authorization": f"Bearer {keys[0]}"}
            )
            assert found.status_code == 200
            assert ask(server, "sk-other", size="64x32").status_code == 200
            until(lambda: sum('"event": "completed"' in line for line in server.lines) == 2)
            lines = [json.loads(line) for line in server.lines if line.startswith("{")]
            assert [each["key"] for each in lines if each["event"] == "completed"] == ["red", "blue"]
            red, blue = (f'psctl_key_images_total{{key="{name}"}} 1.0' for name in ("red", "blue"))
            work = {name: f'psctl_key_pixel_steps_total{{key="{name}"}}' for name in ("red", "blue")}
            boss, own = metrics_of(server, "sk-boss"), metrics_of(server, "sk-new")
            for told in (red, blue, f"{work['red']} {32 * 32 * 3}.0", f"{work['blue']} {64 * 32 * 3}.0"):
                assert told in boss
            assert red in own
            assert "blue" not in own
        assert not any("sk-" in line for line in server.lines)


@pytest.mark.exhaustive
def test_busy_key_leaves_room_for_others(model: Path, tmp_path: Path) -> None:
    options = ("--max-queue", "8", "--max-steps", "1000", *keys_file(tmp_path / "keys", "red\nblue\n"))
    long = {"num_inference_steps": 1000, "slo": 600}
    with HttpServer(model, tmp_path, *options) as server:

        def stream(key: str, n: int) -> AbstractContextManager[httpx.Response]:
            headers, body = {"authorization": f"Bearer {key}"}, {**ASK, **long, "n": n, "stream": True}
            return httpx.stream("POST", f"{server.url}{GENERATIONS}", json=body, headers=headers, timeout=60)

        with stream("red", 6) as red:
            assert red.status_code == 200
            refused = ask(server, "red", **long)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_in_flight")
            assert int(refused.headers["retry-after"]) >= 1
            with stream("blue", 2) as blue:
                assert blue.status_code == 200, "it was let in"


LIMITED = """
[red]
keys = ["sk-red"]
requests_per_minute = 0.001
max_batches = 1
max_disk_mb = 0.05

[blue]
keys = ["sk-blue"]
"""


@pytest.mark.exhaustive
def test_limits_apply_per_key(model: Path, tmp_path: Path) -> None:
    bodies = [{**ASK, "seed": number} for number in range(40)]
    with HttpServer(model, tmp_path, *keys_file(tmp_path / "keys.toml", LIMITED)) as server:
        red, blue = client_of(server, "sk-red"), client_of(server, "sk-blue")
        assert ask(server, "sk-red").status_code == 200
        refused = ask(server, "sk-red")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "0.001 requests per minute" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "120", "the client of OpenAI retries up to there"
        assert [ask(server, "sk-blue").status_code for _ in range(3)] == [200] * 3
        with pytest.raises(openai.APIStatusError, match="and they may take") as full:
            send(red, [{**ASK, "prompt": "x" * 1000}] * 60)
        assert (full.value.status_code, full.value.code) == (507, "quota_exceeded")  # type: ignore[attr-defined]
        other = begin(blue, send(blue, bodies))
        until(lambda: blue.batches.retrieve(other.id).status == "completed", 60)
        output = blue.batches.retrieve(other.id).output_file_id
        assert output is not None
        with pytest.raises(openai.NotFoundError):
            red.files.delete(output)
        assert blue.files.delete(output).deleted
        with pytest.raises(openai.NotFoundError):
            blue.files.content(output)
        assert not list(tmp_path.rglob(f"{other.id}/images"))
        file = send(red, bodies)
        batch = begin(red, file)
        with pytest.raises(openai.RateLimitError, match="1 batches of this key have not ended, and it may have 1"):
            begin(red, file)

        def errors_of() -> list[Any]:
            found = red.batches.retrieve(batch.id).errors
            return [] if found is None else [each.code for each in found.data or []]

        until(lambda: errors_of() == ["quota_exceeded"], 60)
        paused = red.batches.retrieve(batch.id)
        assert paused.request_counts is not None
        assert 0 < paused.request_counts.completed < len(bodies)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            red.files.delete(batch.id.replace("batch_", "file-") + "-output")
        assert red.batches.cancel(batch.id).status == "cancelling"
        until(lambda: red.batches.retrieve(batch.id).status == "cancelled", 60)
        assert red.files.delete(batch.id.replace("batch_", "file-") + "-output").deleted
        red.files.delete(file.id)
        send(red, bodies[:5])


def test_invalid_key_files_are_refused(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    for text, message in (
        ("[red]\nkeys = ['sesame']\n[blue]\nkeys = ['sesame']\n", "key 1 of blue is one of red, too"),
        ("[red]\nkeys = 'sesame'\n", "red has no keys"),
    ):
        done = run_psctl("serve", "--http", "--model", model, *keys_file(tmp_path / "keys.toml", text))
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert "sesame" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.exhaustive
def test_batches_of_other_keys_are_not_delayed(model: Path, tmp_path: Path) -> None:
    """Batches wait neither for another key's long lines nor for its full quota of the disk; expired ones have ended."""
    named = "[red]\nkeys = ['sk-red']\n[blue]\nkeys = ['sk-blue']\n[full]\nkeys = ['sk-full']\nmax_disk_mb = 0.02\n"
    options = keys_file(tmp_path / "keys.toml", named)
    long = [{**ASK, "num_inference_steps": 100, "seed": number} for number in range(1000)]
    with HttpServer(model, tmp_path, *options) as server:
        red, blue, full = (client_of(server, f"sk-{name}") for name in ("red", "blue", "full"))
        paused = begin(full, send(full, [{**ASK, "seed": number} for number in range(40)]))
        until(lambda: full.batches.retrieve(paused.id).errors is not None, 60)
        file = send(red, long)
        first, second = begin(red, file), begin(red, file)
        until(lambda: red.batches.retrieve(first.id).status == "in_progress")
        batch = begin(blue, send(blue, [ASK, {**ASK, "size": "huge"}, ASK]))
        until(lambda: blue.batches.retrieve(batch.id).status == "completed", 120)
        counts = blue.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (2, 1)
        assert red.batches.retrieve(first.id).status == "in_progress"
        assert red.batches.retrieve(second.id).status == "validating", "of one key, one after the other"
        assert red.files.retrieve(file.id).expires_at == file.created_at + 30 * 24 * 3600
        short = send(red, [ASK], expires_after={"anchor": "created_at", "seconds": 3600})
        assert short.expires_at == short.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="must be a whole number from 3600 to 2592000"):
            send(red, [ASK], expires_after={"anchor": "created_at", "seconds": 5})
        assert server.stop() == 0
    for name, seconds in ((first.id, 5), (second.id, 0), (file.id, 0), (short.id, 0), (paused.id, 5)):
        [path] = (*tmp_path.rglob(f"{name}/batch.json"), *tmp_path.rglob(f"{name}.json"))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"expires_at": int(time.time()) + seconds}))
    with HttpServer(model, tmp_path, *options) as server:
        red = client_of(server, "sk-red")
        assert not list(tmp_path.rglob(f"{short.id}*"))
        assert list(tmp_path.rglob(f"{file.id}*")), "a batch is drawn from it"
        assert not list(red.files.list())
        for each in (first, second):
            until(lambda each=each: red.batches.retrieve(each.id).status == "expired", 60)
            assert red.batches.retrieve(each.id).expired_at is not None
        until(lambda: client_of(server, "sk-full").batches.retrieve(paused.id).status == "expired", 60)


def test_edits_of_one_key_are_hidden_from_other_keys(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"guidance_scale": 4.0, "num_inference_steps": 4, "resolutions": ["64x64"]}
    save_tiny(tmp_path / "model", tiny_sdxl(), **settings)
    mask = np.zeros((64, 64), dtype=bool)
    mask[:32, :32] = True
    files = {"image": file_of(image_of(Resolution(64, 64), 0)), "mask": file_of(mask)}
    keys = keys_file(tmp_path / "keys", "red\nblue\n")
    with HttpServer(tmp_path / "model", tmp_path / "workspace", "--reuse-templates", *keys) as server:

        def has_reused(key: str) -> bool:
            fields = {name: (None, value) for name, value in {"prompt": "a red hat", "seed": "5", "slo": "600"}.items()}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(
                f"{server.url}/v1/images/edits", files={**files, **fields}, headers=headers, timeout=120
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["data"][0]["reused"]

        def num_recorded() -> float:
            return float(metrics_of(server, "red").partition("\npsctl_templates_recorded ")[2].partition("\n")[0])

        assert not has_reused("red")
        until(lambda: num_recorded() == 1, 60)
        assert has_reused("red")
        assert not has_reused("blue")
        until(lambda: num_recorded() == 2, 60)
        assert has_reused("blue")
