"""A served trace: requests are checked once, as adapted by the system, and SLOs derive from the requested steps."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.report.html import write_report
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.serve import ServeOutcome, ServePlan, run_serve
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.serving.scheduling.systems import System

from ...support.tiny_models import tiny_sdxl

SIZE = Resolution(32, 32)
HALF = System("half", "half of the steps", "plain", "continuous", steps_share=0.5)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny")


def served(model: ServedModel, requests: Sequence[Request], folder: Path) -> ServeOutcome:
    place = Workspace(folder).for_model(model.name, "cpu")
    plan = ServePlan(TraceSettings(), HALF, save_dir=folder / "images")
    return run_serve(model, requests, plan, place, write_report=write_report)


def test_requests_are_checked_once_with_the_steps_of_the_system(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, checked = ServedModel.check_request, list[tuple[int, int]]()

    def noted(self: ServedModel, request: Request) -> None:
        checked.append((request.request_id, request.num_inference_steps))
        check(self, request)

    monkeypatch.setattr(ServedModel, "check_request", noted)
    requests = [Request(number, "a hat", SIZE, 4 + 2 * number, slo_s=600.0) for number in range(3)]
    outcome = served(model, requests, tmp_path)
    assert checked == [(0, 2), (1, 3), (2, 4)]
    assert [record.num_inference_steps for record in outcome.records] == [2, 3, 4]
    assert [(record.status, record.slo_s) for record in outcome.records] == [("completed", 600.0)] * 3
    report = outcome.run_dir / "report.html"
    assert report.read_text().count("a hat (32x32)") == 3, "a caption for each image"
    assert (tmp_path / "images" / "report.html").read_text() == report.read_text()
    assert (outcome.correction, outcome.was_interrupted) == (None, False)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_slos_derive_from_requested_steps_not_those_of_the_system(model: ServedModel, tmp_path: Path) -> None:
    outcome = served(model, [Request(0, "a hat", SIZE, 4)], tmp_path)
    [(shape, alone_s)] = outcome.summary["standalone_latency"].items()
    assert shape == "32x32, 4 steps"
    [record] = outcome.records
    assert record.num_inference_steps == 2
    assert record.slo_s == pytest.approx(5 * alone_s)


def test_unsupported_request_stops_the_run_before_measurements(model: ServedModel, tmp_path: Path) -> None:
    requests = [Request(0, "a hat", SIZE, 4), Request(1, "a hat", SIZE, 4, adapters=(("sketch", 1.0),))]
    with pytest.raises(UsageError, match="sketch"):
        served(model, requests, tmp_path)
    assert not list(tmp_path.rglob("standalone.json"))
    assert not list(tmp_path.rglob("trace.jsonl"))
