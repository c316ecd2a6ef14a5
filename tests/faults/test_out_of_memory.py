"""Memory runs out at the k-th call of each part of a model: every request ends once, and the engine continues.

A step that fails is repeated in parts, so that only requests that fail alone are failed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.failures import MemoryBound
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def model(folder: str) -> ServedModel:
    return load_model(folder, "cpu", "float32")


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


@pytest.mark.product(most=1)
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


@pytest.mark.product(most=1)
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_batches_that_do_not_fit_are_not_tried_at_each_step(engine: Literal["patched", "plain"], folder: str) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(engine=engine))
    requests = [replace(each, num_inference_steps=12) for each in REQUESTS]
    whole = serve_in_memory(model, requests)
    kind, most, num_failed = type(model.denoiser), 0, 0
    forward = kind.forward

    def forward_in_little_memory(module: Any, sample: torch.Tensor, *given: Any, **named: Any) -> Any:
        nonlocal most, num_failed
        if is_measuring:
            most = max(most, sample.numel())
        elif sample.numel() > most:
            num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(module, sample, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", forward_in_little_memory)
        is_measuring = True
        serve_in_memory(model, REQUESTS[1:2])  # the larger size alone
        is_measuring = False
        found = serve_in_memory(model, requests)
    assert {record.status for record in found.records} == {"completed"}
    assert 0 < num_failed <= 6, "about one for each size of the batch, not for each of 12 steps"
    for number, image in whole.images.items():
        assert np.abs(np.asarray(image, int) - np.asarray(found.images[number], int)).max() <= 1


def test_batches_are_tried_whole_again_later() -> None:
    bound = MemoryBound()
    bound.note(RuntimeError("an illegal memory access"), 10.0)
    assert not bound.excludes(1e9)
    bound.note(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), 10.0)
    assert (bound.excludes(9.0), bound.excludes(10.0)) == (False, True)
    tries = [bound.excludes(20.0) for _ in range(1000)]
    assert tries.index(False) > 100
    assert not any(tries[tries.index(False) :])
