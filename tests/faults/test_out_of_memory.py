"""Memory runs out at the k-th call of each part of a model: every request ends once, and the engine continues.

A step that fails is repeated in parts, so that only requests that fail alone are failed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel

from ..support.engine_runs import serve_in_memory
from ..support.http_server import small_model

pytestmark = pytest.mark.slow
SIZES = (Resolution(32, 32), Resolution(64, 32))
REQUESTS = [Request(number, f"hat {number}", SIZES[number % 2], 3, 3.0, seed=number) for number in range(4)]
PARTS: dict[str, Callable[[ServedModel], torch.nn.Module]] = {
    "preparing": lambda model: model.pipe.text_encoder,
    "denoising": lambda model: model.denoiser,
    "postprocessing": lambda model: model.pipe.vae.decoder,
}
ERRORS: tuple[BaseException, ...] = (torch.OutOfMemoryError("CUDA out of memory"), MemoryError())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = small_model(tmp_path_factory.mktemp("model") / "tiny")
    return load_model(str(folder), "cpu", "float32")


class Failing:
    """Counter of the calls of a part of the model, one of which may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: torch.nn.Module, at: int, error: BaseException) -> None:
        kind, self.num_calls = type(part), 0
        forward = kind.forward

        def may_fail(module: Any, *given: Any, **named: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == at:
                raise error
            return forward(module, *given, **named)

        monkeypatch.setattr(kind, "forward", may_fail)


@pytest.mark.parametrize("part", PARTS)
def test_requests_end_once_and_the_engine_continues(part: str, model: ServedModel) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted = Failing(patch, PARTS[part](model), 0, MemoryError())
        whole = serve_in_memory(model, REQUESTS)
        num_calls = counted.num_calls
    assert num_calls >= 3
    for call in range(1, num_calls + 1):
        for error in ERRORS:
            with pytest.MonkeyPatch.context() as patch:
                Failing(patch, PARTS[part](model), call, error)
                found = serve_in_memory(model, REQUESTS)
            ended = {record.request_id: record for record in found.records}
            assert len(found.records) == len(ended) == len(REQUESTS)
            failed = [record for record in ended.values() if record.status == "failed"]
            assert {record.status for record in ended.values()} <= {"completed", "failed"}
            assert len(failed) <= 1, "one call fails one request at the most"
            assert all(part in (record.reason or "") or "memory" in (record.reason or "").lower() for record in failed)
            for number in ended.keys() - {record.request_id for record in failed}:
                ours, theirs = (np.asarray(each.images[number], int) for each in (found, whole))
                assert np.abs(ours - theirs).max() <= 1
    again = serve_in_memory(model, REQUESTS)
    assert {record.status for record in again.records} == {"completed"}
