"""Collectors: their contents, one report per request even under Ctrl-C, and no memory of ended requests."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.schemas import RECORDS
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.core.step_row import StepRow
from patchedserve.serving.engine.collectors import Counters, InMemory, JsonLines
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.replay import replay
from patchedserve.serving.engine.reports import Reports
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import Decision, get_policy

from ...support.function_policy import FunctionPolicy
from ...support.steady_load import SIZES, SteadyLoad, num_blocks
from ...support.tiny_models import smallest_sd

SMALL = Resolution(16, 16)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return build_model(smallest_sd(), name="tiny")


def record(request_id: int, status: Any = "completed", *, latency_s: float = 2.0, **request: Any) -> RequestRecord:
    made = RequestRecord.of(Request(request_id, "a \u201chat\u201d\n\u2028", SMALL, 2, arrival_s=1.0, **request))
    made.close(status, 1.0 + latency_s, None if status == "completed" else "why")
    return made


def test_counters_add_up() -> None:
    counters = Counters()
    for each in (
        record(0),
        record(1, slo_s=3.0),
        record(2, slo_s=1.0, latency_s=4.0),
        record(3, "discarded", slo_s=9.0),
        record(4, "failed"),
    ):
        counters.on_finish(each, None, None)
    for active, duration_s in ((2, 0.5), (3, 0.25)):
        counters.on_step(StepRow.of(0, 0.0, duration_s, [SMALL] * active, 0))
    for decision_s in (0.125, 0.25):
        counters.on_decision(decision_s)
    assert counters == Counters(
        Counter(completed=3, discarded=1, failed=1),
        num_with_slo=3,
        num_slo_met=1,
        latency_s=8.0,
        num_steps=2,
        step_s=0.75,
        request_steps=5,
        num_decisions=2,
        decision_s=0.375,
    )


def test_record_file_contains_complete_lines(tmp_path: Path) -> None:
    file = tmp_path / "made" / "records.jsonl"
    records = [record(0), record(1, "failed", slo_s=0.5)]
    lines = JsonLines(file)
    for each in records:
        lines.on_finish(each, None, None)
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    assert [RequestRecord.from_row(row) for row in rows] == records
    RECORDS.require_columns(rows[0])
    # A new process appends to the file, even if a full disk has cut off the last line.
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"request_id": 2, "pro')
    JsonLines(file).on_finish(records[0], None, None)
    assert file.read_bytes() == whole + whole[: whole.index(b"\n") + 1]
    file.write_bytes(b'{"request')
    JsonLines(file)
    assert file.read_bytes() == b""
    # A user has moved the file away, to read it or because it was large.
    file.rename(tmp_path / "old.jsonl")
    lines.on_finish(records[1], None, None)
    assert json.loads(file.read_text())["request_id"] == 1
    with pytest.raises(IsADirectoryError):
        JsonLines(tmp_path)


def test_unwritable_file_ends_the_run(model: ServedModel, tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "records.jsonl")
    lines.path.unlink()
    lines.path.mkdir()
    engine = Engine(model, get_policy("fcfs"), collector=lines)
    engine.submit(Request(0, "a", SMALL, 1))
    engine.close()
    with pytest.raises(IsADirectoryError):
        engine.run()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-")]


def test_images_and_latents_are_kept_only_on_request(model: ServedModel) -> None:
    for keeps in (False, True):
        kept = InMemory(keep_images=keeps, keep_latents=keeps)
        engine = Engine(model, get_policy("fcfs"), collector=kept)
        engine.submit(Request(7, "a", SMALL, 1))
        engine.close()
        result = engine.run()
        assert (list(result.images), list(result.latents)) == (([7], [7]) if keeps else ([], []))
        assert (result.records, result.steps) == (kept.records, kept.steps)
    assert result.images[7].size == SMALL
    assert result.latents[7].shape == (1, 4, 2, 2)


def test_run_without_kept_results_states_it(model: ServedModel) -> None:
    engine = Engine(model, get_policy("continuous"), collector=Counters())
    for number in range(3):
        engine.submit(Request(number, "a", SMALL, 2))
    engine.close()
    result = engine.run()
    counters = result.collector
    assert isinstance(counters, Counters)
    assert (counters.ended, counters.request_steps) == ({"completed": 3}, 6)
    assert counters.num_decisions >= 1
    assert result.duration_s > counters.step_s > 0
    with pytest.raises(RuntimeError, match="its collector is Counters"):
        result.records  # noqa: B018


class _RecordingCollector(InMemory):
    """Collector that also records the order of its calls and their threads."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Any] = []
        self.threads: set[str] = set()

    def on_finish(self, record: RequestRecord, image: Any, latents: Any) -> None:
        super().on_finish(record, image, latents)
        self.order.append(record.request_id)
        self.threads.add(threading.current_thread().name)

    def on_step(self, row: StepRow) -> None:
        super().on_step(row)
        self.order.append(f"step {row.step}")
        self.threads.add(threading.current_thread().name)


def test_collector_is_called_in_order_by_one_thread(model: ServedModel) -> None:
    recorder = _RecordingCollector()
    late = FunctionPolicy(
        lambda now_s, waiting, active: Decision(
            admit=tuple(view.request_id for view in waiting if view.request_id != 2),
            drop=tuple((view.request_id, "two") for view in waiting if view.request_id == 2),
        )
    )
    engine = Engine(model, late, collector=recorder)
    for number, steps in enumerate((1, 3, 1)):
        engine.submit(Request(number, "a", SMALL, steps))
    engine.close()
    assert len(engine.run().records) == 3
    assert recorder.threads == {"psctl-collect"}
    steps = [each for each in recorder.order if isinstance(each, str)]
    assert steps == [f"step {number}" for number in range(len(steps))]
    assert recorder.order.index(1) > recorder.order.index(steps[-1])


def test_image_interrupted_by_ctrl_c_is_finished(tmp_path: Path) -> None:
    """Images are decoded between the steps here, so Ctrl-C may interrupt a decode."""
    model, asked = build_model(smallest_sd(), name="tiny", options=EngineOptions(stages="inline")), []

    def image_path(request: Request) -> Path:
        asked.append(request.request_id)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return tmp_path / f"{request.request_id}.png"

    engine = Engine(model, get_policy("continuous"), image_path=image_path)
    for number, steps in enumerate((1, 900)):
        engine.submit(Request(number, "a", SMALL, steps))
    engine.close()
    result = engine.run()
    assert result.was_interrupted
    assert {each.request_id: each.status for each in result.records} == {0: "completed", 1: "cancelled"}
    assert [path.name for path in tmp_path.iterdir()] == ["0.png"]


def _with_ctrl_c(original: Callable[..., Any], call: int, moment: str) -> Callable[..., Any]:
    """Wrap a function so that Ctrl-C comes before or after its call number `call`, from 1, in the denoising thread."""
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        is_due = False
        if threading.current_thread() is threading.main_thread():
            calls += 1
            is_due = calls == call
        if is_due and moment == "before":
            raise KeyboardInterrupt
        result = original(*arguments, **named)
        if is_due and moment == "after":
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    # The first report to the collector is the decision.
    [
        (Reports, "report", 1),
        (Reports, "queue_call", 1),
        (Reports, "queue_call", 2),
        (RequestRecord, "close", 1),
    ],
)
def test_every_request_is_reported_once_wherever_ctrl_c_occurs(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, moment: str
) -> None:
    """Several calls lie between the end of a request and the collector, and Ctrl-C may come between any two."""
    drop = FunctionPolicy(
        lambda now_s, waiting, active: Decision(
            admit=tuple(view.request_id for view in waiting if view.request_id > 0),
            drop=tuple((view.request_id, "late") for view in waiting if view.request_id == 0),
        )
    )
    lines = JsonLines(tmp_path / "records.jsonl")
    engine = Engine(model, drop, collector=lines)
    for number in range(3):
        engine.submit(Request(number, "a", SMALL, 400))
    monkeypatch.setattr(owner, name, _with_ctrl_c(getattr(owner, name), call, moment))
    result = engine.run()
    assert result.was_interrupted
    rows = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert sorted(row["request_id"] for row in rows) == [0, 1, 2]
    status = {row["request_id"]: row["status"] for row in rows}
    assert status == {0: status[0], 1: "cancelled", 2: "cancelled"}
    # The status depends on whether the record was closed when Ctrl-C came.
    is_open = (name, call) == ("queue_call", 1) or (name, moment) == ("close", "before")
    assert status[0] == ("cancelled" if is_open else "discarded")


@pytest.mark.parametrize(
    "interrupt",
    [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)],
    ids=["process", "another thread"],
)
def test_requests_that_had_not_arrived_are_reported(model: ServedModel, interrupt: Callable[[], None]) -> None:
    """The system may deliver Ctrl-C to any thread, and then the waiting thread keeps sleeping."""
    counters = Counters()
    engine = Engine(model, get_policy("fcfs"), collector=counters, on_finish=lambda record: interrupt())
    requests = Request(0, "a", SMALL, 1), Request(1, "b", SMALL, 1, arrival_s=600.0)
    result = replay(engine, list(map(model.checked, requests)))
    assert result.was_interrupted
    assert counters.ended == {"completed": 1, "cancelled": 1}


def test_id_is_free_after_its_request_has_ended(model: ServedModel) -> None:
    """The id is free within `on_finish`; a preparation for the ended request is not used for the new one."""
    engine: Engine
    request = Request(0, "first", SMALL, 1)

    def again(record: RequestRecord) -> None:
        if record.prompt == "first":
            engine.submit(replace(request, prompt="second", seed=1))
        else:
            engine.close()

    kept = InMemory(keep_images=True)
    engine = Engine(model, get_policy("fcfs"), collector=kept, on_finish=again)
    engine.submit(request)
    with pytest.raises(UsageError, match="request id 0 is used twice"):
        engine.submit(request)
    result = engine.run()
    assert [(each.request_id, each.prompt, each.status) for each in result.records] == [
        (0, "first", "completed"),
        (0, "second", "completed"),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("with_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_retained_of_ended_requests(with_cache: bool, tmp_path: Path) -> None:
    """`tests/benchmarks/bench_records.py` does the same for 50,000 requests."""
    leak: list[RequestRecord] = []
    leaks = False
    load = SteadyLoad(
        JsonLines(tmp_path / "records.jsonl"),
        with_cache=with_cache,
        # With few sizes, the memory of batches is soon complete.
        sizes=SIZES[:2],
        max_batch_size=2,
        on_finish=lambda record: leak.append(record) if leaks else None,
    )
    with load:
        load.feed(180)
        held = [num_blocks()]
        for _ in range(3):
            load.feed(60)
            held.append(num_blocks())
        # The minimum is taken because leaks grow every time and bounded memory does not.
        grown = min(after - before for before, after in pairwise(held))
        before, leaks = num_blocks(), True
        load.feed(60)
        shown = num_blocks() - before
    assert len((tmp_path / "records.jsonl").read_bytes().splitlines()) == 420
    # Two leaked objects a request would exceed this; a record and its times are more.
    assert grown < 100
    assert shown > 300
