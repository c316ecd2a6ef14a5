"""Cancellation of requests in every stage, aborted runs, and partial images."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.engine.watch import Watch
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import get_policy

from ...support.tiny_models import tiny_sd3, tiny_sdxl

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)
REASON = "the client has left"


@pytest.fixture(params=["patched", "plain"])
def model(pipe: Any, request: pytest.FixtureRequest) -> ServedModel:
    return build_model(pipe, name="tiny", options=EngineOptions(request.param, stages="threads"))


class RunningEngine:
    """Engine that runs in a thread of its own."""

    def __init__(self, model: ServedModel, **options: Any) -> None:
        self.finished: dict[int, RequestRecord] = {}
        self.engine = Engine(model, get_policy("continuous"), on_finish=self._on_finish, **options)
        self.engine.start()
        self._result: list[RunResult] = []
        self._thread = threading.Thread(target=lambda: self._result.append(self.engine.run()))
        self._thread.start()

    def _on_finish(self, record: RequestRecord) -> None:
        self.finished[record.request_id] = record

    def wait(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < end, "it never came to that"
            time.sleep(0.001)

    def end(self) -> RunResult:
        self.engine.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self._result[0]


def test_cancelled_request_leaves_the_batch_at_the_next_step(model: ServedModel) -> None:
    done: list[int] = []
    held = RunningEngine(model)
    held.engine.submit(Request(0, "stays", SMALL, 40))
    held.engine.submit(Request(1, "leaves", LARGE, 900), watch=Watch(on_step=done.append))
    held.wait(lambda: len(done) > 3)
    assert held.engine.cancel(1, REASON)
    at_most = len(done) + 3
    held.wait(lambda: 1 in held.finished)
    assert len(done) <= at_most
    record = held.finished[1]
    assert (record.status, record.reason) == ("cancelled", REASON)
    assert not held.engine.cancel(1, REASON), "it is not open any more"
    # Its id is free, and a new request may use it.
    held.engine.submit(Request(1, "another", SMALL, 3))
    result = held.end()
    assert [(each.request_id, each.status) for each in result.in_memory.records] == [
        (1, "cancelled"),
        (1, "completed"),
        (0, "completed"),
    ]


def test_requests_in_any_stage_can_be_cancelled(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    go, decode, prepare = threading.Event(), model.decode, model.prepare
    asked: list[str] = []

    def slow_decode(latents: Any) -> Any:
        asked.append("decode")
        assert go.wait(20)
        return decode(latents)

    def slow_prepare(request: Request) -> Any:
        if request.request_id == 2:
            asked.append("prepare")
            assert go.wait(20)
        return prepare(request)

    monkeypatch.setattr(model, "decode", slow_decode)
    monkeypatch.setattr(model, "prepare", slow_prepare)
    held = RunningEngine(model, max_batch_size=2)
    held.engine.submit(Request(0, "is decoded", SMALL, 2))
    held.engine.submit(Request(1, "waits for the decoder", SMALL, 3))
    held.wait(lambda: "decode" in asked)
    for number, prompt in ((2, "is prepared"), (3, "waits"), (4, "is served")):
        held.engine.submit(Request(number, prompt, SMALL, 2))
    held.wait(lambda: "prepare" in asked)
    assert all(held.engine.cancel(number, REASON) for number in range(4))
    held.wait(lambda: len(held.finished) == 4)
    assert {each.status for each in held.finished.values()} == {"cancelled"}
    go.set()
    result = held.end()
    assert [record.status for record in result.records] == ["cancelled"] * 4 + ["completed"]
    assert len(asked) == 3, "what waited for the decoder is not decoded"


def test_abort_ends_the_run_immediately(model: ServedModel) -> None:
    held = RunningEngine(model, collector=InMemory(keep_images=True))
    for number in range(3):
        held.engine.submit(Request(number, "a cat", SMALL, (2, 900, 900)[number]))
    held.wait(lambda: 0 in held.finished)
    held.engine.abort()
    result = held.end()
    assert result.was_interrupted
    assert [record.status for record in result.records] == ["completed", "cancelled", "cancelled"]
    with pytest.raises(RuntimeError, match="closed"):
        held.engine.submit(Request(9, "late", SMALL, 2))


@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3])
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_partial_images_approach_the_final_one(build: Callable[[], Any], engine: Any) -> None:
    model = build_model(build(), name="tiny", options=EngineOptions(engine))
    partials: dict[int, list[tuple[int, Image.Image]]] = {0: [], 1: []}
    steps: dict[int, list[int]] = {0: [], 1: []}
    running = Engine(model, get_policy("continuous"), collector=InMemory(keep_images=True))
    for number, size in enumerate((SMALL, LARGE)):
        watch = Watch(
            num_partials=3,
            on_step=steps[number].append,
            on_partial=lambda index, image, number=number: partials[number].append((index, image)),
        )
        running.submit(Request(number, "a cat", size, 8 + number, seed=number), watch=watch)
    running.close()
    result = running.run()
    for number, size in enumerate((SMALL, LARGE)):
        assert steps[number] == list(range(1, 9 + number))
        assert [index for index, _ in partials[number]] == [0, 1, 2]
        assert all(image.size == size for _, image in partials[number])
        last = result.images[number]
        off = [difference(image, last) for _, image in partials[number]]
        assert off[0] > off[-1] > 0
    assert not running.callback_failures.count


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the mean absolute difference between the values of two images."""
    pairs = zip(one.tobytes(), other.tobytes(), strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(one.tobytes())
