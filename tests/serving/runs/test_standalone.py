"""Standalone latencies are those of plain diffusers for every engine, and are stored with their conditions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.runs import standalone
from patchedserve.serving.runs.contention import Contention
from patchedserve.serving.runs.standalone import (
    MAX_SAMPLES,
    TABLE_FILE,
    RequestShape,
    doubt_standalone,
    read_standalone,
    standalone_latencies,
)

from ...support.tiny_models import tiny_sdxl

SHAPE = RequestShape(Resolution(32, 32), 2, is_guided=True)
REQUEST = Request(0, "a fox", Resolution(32, 32), num_inference_steps=2, guidance_scale=3.0)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_sdxl()


class _FakeContention:
    """Shares that `Contention` reports, set by the tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: float | None = 0.0
        self.now: float | None = 1.0
        monkeypatch.setattr(standalone, "contention_now", lambda: self.now)
        monkeypatch.setattr(Contention, "share", property(lambda _: self.measured, lambda _, share: None))


@pytest.fixture(autouse=True)
def contention(monkeypatch: pytest.MonkeyPatch) -> _FakeContention:
    """No thread waited for a core, but the machine is busy now, so doubted values are not measured again."""
    return _FakeContention(monkeypatch)


def served(pipe: Any, options: EngineOptions, name: str = "tiny", fingerprint: str = "f") -> ServedModel:
    return build_model(pipe, name=name, fingerprint=fingerprint, defaults=ModelDefaults(), options=options)


def num_measured(model: ServedModel, tables: Path) -> int:
    measured: list[Any] = []
    standalone_latencies(model, [REQUEST], tables, on_measure=measured.append)
    return len(measured)


@pytest.mark.slow
def test_standalone_latency_is_always_measured_with_plain_diffusers(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: list[str] = []
    serve_alone = standalone._serve_alone
    monkeypatch.setattr(
        standalone,
        "_serve_alone",
        lambda model, *rest: steppers.append(model.stepper.name) or serve_alone(model, *rest),
    )
    settings = [
        EngineOptions(cache=CacheOptions("interval", patch_size=4)),
        EngineOptions(),
        EngineOptions("plain"),
        EngineOptions(order="patch", strategy="stitch"),
    ]
    assert [num_measured(served(pipe, options), tmp_path) for options in settings] == [1, 0, 0, 0]
    assert set(steppers) == {"plain"}
    # It runs in the faster of its memory formats.
    assert len(list(tmp_path.glob("plain-*.json"))) == 1
    # The same files under another name are the same model; other files under the same name are not.
    assert num_measured(served(pipe, EngineOptions(), name="./tiny"), tmp_path) == 0
    assert num_measured(served(pipe, EngineOptions(), fingerprint="g"), tmp_path) == 1
    assert len(read_standalone(tmp_path / TABLE_FILE)) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_standalone_latency_depends_on_the_thread_count(pipe: Any, tmp_path: Path) -> None:
    model, threads = served(pipe, EngineOptions("plain")), torch.get_num_threads()
    assert num_measured(model, tmp_path) == 1
    torch.set_num_threads(threads + 1)
    try:
        assert num_measured(model, tmp_path) == 1
    finally:
        torch.set_num_threads(threads)
    assert num_measured(model, tmp_path) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_older_table_is_remeasured_and_newer_one_is_quarantined(pipe: Any, tmp_path: Path) -> None:
    model, table = served(pipe, EngineOptions("plain")), tmp_path / TABLE_FILE
    for version in (1, 2, 3):
        old = {"version": version, "rows": [{"key": {}, "latency_s": 1.0, "samples_s": [1.0], "is_doubted": False}]}
        table.write_text(json.dumps(old))
        assert num_measured(model, tmp_path) == 1
        assert len(read_standalone(table)) == 1
    table.write_text(json.dumps({"version": 99, "rows": []}))
    with pytest.warns(UserWarning, match=r"damaged \(version 99\); it was put aside"):
        assert num_measured(model, tmp_path) == 1


def scripted(monkeypatch: pytest.MonkeyPatch, *samples_s: float) -> Callable[[], int]:
    """Make requests alone take these times, repeating the last; return a counter of requests without the warm-up."""
    taken = list[float]()

    def serve_alone(model: Any, request: Request, num_steps: int) -> float:
        # The first call is the warm-up.
        taken.append(samples_s[min(max(len(taken) - 1, 0), len(samples_s) - 1)])
        return taken[-1]

    monkeypatch.setattr(standalone, "_serve_alone", serve_alone)
    return lambda: len(taken) - 1


@pytest.mark.parametrize(
    ("samples_s", "num_taken", "latency_s", "doubt"),
    [
        ([1.0, 1.05, 1.02], 3, 1.02, None),
        ([3.0, 1.0, 2.0, 1.05, 1.02], 5, 1.02, None),
        ([0.001, 0.008, 0.004], 3, 0.004, None),
        ([1.0 + number for number in range(MAX_SAMPLES)], MAX_SAMPLES, 2.0, "it took 1 to 9 s"),
    ],
)
def test_measurement_repeats_until_samples_agree(
    pipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samples_s: list[float],
    num_taken: int,
    latency_s: float,
    doubt: str | None,
) -> None:
    num_served, doubts = scripted(monkeypatch, *samples_s), list[str]()
    model = served(pipe, EngineOptions("plain"))
    assert standalone_latencies(model, [REQUEST], tmp_path, on_doubt=doubts.append) == {SHAPE: latency_s}
    assert num_served() == num_taken
    [kept] = read_standalone(tmp_path / TABLE_FILE).values()
    assert (list(kept.samples_s), kept.doubt) == (samples_s, doubt)
    told = [] if doubt is None else [f"the standalone latency of 32x32 may be too long, and with it SLOs: {doubt}"]
    assert doubts == told


def test_contended_measurements_are_repeated_on_a_quiet_machine(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contention: _FakeContention
) -> None:
    model, doubts = served(pipe, EngineOptions("plain")), list[str]()

    def latency_s() -> float:
        doubts.clear()
        return standalone_latencies(model, [REQUEST], tmp_path, on_doubt=doubts.append)[SHAPE]

    scripted(monkeypatch, 4.0)
    contention.measured = 0.45
    assert latency_s() == 4.0
    assert doubts[0].endswith("other work had the processor for 45% of the time")
    scripted(monkeypatch, 0.4)
    contention.measured, contention.now = 0.0, 0.6
    assert latency_s() == 4.0
    assert doubts, "it is told until it is measured again"
    contention.now = 0.01
    assert latency_s() == 0.4
    assert not doubts
    # If the system does not report contention, only the samples count.
    contention.measured = None
    assert standalone_latencies(model, [REQUEST], tmp_path, remeasure=True) == {SHAPE: 0.4}


def test_latencies_far_above_served_times_are_remeasured_once(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contention: _FakeContention
) -> None:
    contention.now = 0.0
    model = served(pipe, EngineOptions(cache=CacheOptions("interval", patch_size=4)))
    num_served = scripted(monkeypatch, 2.0)
    standalone_latencies(model, [REQUEST], tmp_path)
    assert num_served() == 3
    assert doubt_standalone(model, tmp_path, {SHAPE: 1.4}) == {}
    unknown = RequestShape(Resolution(64, 64), 2, is_guided=True)
    assert doubt_standalone(model, tmp_path, {SHAPE: 1.2, unknown: 0.1}) == {SHAPE: 2.0}
    standalone_latencies(model, [REQUEST], tmp_path)
    assert num_served() > 4
    taken = num_served()
    # The latency was confirmed.
    assert doubt_standalone(model, tmp_path, {SHAPE: 1.2}) == {}
    assert standalone_latencies(model, [REQUEST], tmp_path) == {SHAPE: 2.0}
    assert num_served() == taken
