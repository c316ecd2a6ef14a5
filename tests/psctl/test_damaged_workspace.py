"""A server starts and draws with a workspace in which every file is damaged."""

import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from patchedserve.data.resolution import Resolution

from ..support.edits import file_of, image_of
from ..support.http_server import HttpServer, small_model
from ..support.waits import until

pytestmark = pytest.mark.slow
NOT_READ = {".lock", ".jsonl", ".png"}
"""Suffixes of locks and of files that clients download unchanged."""


def use(server: HttpServer) -> None:
    """Draw, edit and run a batch."""
    mask = np.zeros((32, 64), dtype=bool)
    mask[:8, :8] = True
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert client.images.generate(prompt="a dog", extra_body={"slo": 60}).data
    edited = httpx.post(
        f"{server.url}/v1/images/edits",
        files={"image": file_of(image_of(Resolution(64, 32), 1)), "mask": file_of(mask), "prompt": (None, "a hat")},
        headers={"x-slo-seconds": "60"},
        timeout=60,
    )
    assert edited.status_code == 200, edited.text
    body = {"prompt": "a cat", "size": "32x32", "num_inference_steps": 20}
    lines = "\n".join(json.dumps({"custom_id": str(number), "body": body}) for number in range(3))
    file = client.files.create(file=("batch.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), 60)
    assert client.batches.retrieve(batch.id).status == "completed"
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert file.id in [each.id for each in client.files.list()]


@pytest.mark.exhaustive
def test_server_starts_with_any_damaged_workspace_file(tmp_path: Path) -> None:
    model, workspace = small_model(tmp_path / "tiny"), tmp_path / "workspace"
    damaged: list[Path] = []
    for damage in (lambda content: content[: len(content) // 2], lambda content: b"[]", None):
        # Every start measures all that is missing, or files of what it did not come to would not be read.
        with HttpServer(model, workspace, "--reuse-templates", "--calibrate-time", "120") as server:
            use(server)
            until(lambda: any(workspace.rglob("manifest.json")), 60)
            assert server.stop() == 0
        said = "\n".join(server.lines)
        assert "Traceback" not in said
        for path in damaged:
            assert (path.parent if path.parent.parent.name == "templates" else path).name in said
        if damage is not None:
            files = [path for path in workspace.rglob("*") if path.is_file() and ".bad" not in str(path)]
            damaged = [path for path in files if not NOT_READ & {path.name, path.suffix}]
            wanted = {"batch.json", "corrections.json", "standalone.json", "manifest.json"}
            assert wanted <= {path.name for path in damaged}
            for path in damaged:
                path.write_bytes(damage(path.read_bytes()))
