"""Sweeps: their order, and the continuation of an interrupted sweep."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.profiling.sweep.runner import Sweep
from patchedserve.profiling.sweep.settings import SweepFolder, SweepRunResult, SweepSettings, read_head
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.serving.scheduling.systems import System


def settings(**fields: Any) -> SweepSettings:
    trace = TraceSettings(num_prompts=4, resolutions="128", num_inference_steps=2)
    return SweepSettings(trace=trace, engine="simulator", **fields)


class InterruptedEngine:
    """A side whose engine finishes runs at once and is interrupted at its n-th run."""

    extra_requests = ()

    def __init__(self, head: dict[str, Any], after: int, *, by_signal: bool) -> None:
        self._head, self.after, self.by_signal = head, after, by_signal
        self.served: list[tuple[str, int]] = []

    def check(self, examples: Sequence[Request]) -> None:
        """Every request can be served."""

    def head(self, examples: Sequence[Request], known_s: Any) -> dict[str, Any]:
        return self._head

    def begin(self, folder: SweepFolder, standalone_s: Callable[[Request], float]) -> Any:
        return {"simulator": self.run}

    def run(
        self, system: System, requests: Sequence[Request], standalone_s: Callable[[Request], float]
    ) -> SweepRunResult:
        from patchedserve.serving.core.request_state import RequestRecord

        if len(self.served) == self.after:
            if self.by_signal:
                raise KeyboardInterrupt
            return SweepRunResult([], 1.0, {}, was_interrupted=True)
        self.served.append((system.name, len(requests)))
        records = [RequestRecord.of(request) for request in requests]
        for record in records:
            record.close("completed", record.arrival_s + 1.0)
        return SweepRunResult(records, 10.0, {"note": 1})


@pytest.mark.parametrize("by_signal", [True, False])
def test_interrupted_sweep_resumes(tmp_path: Path, by_signal: bool) -> None:
    wanted = settings(systems=("diffusers", "patchedserve", "patched-edf"), rates=(1.0, 2.0), seeds=(3,))
    head = {"settings": wanted.fixed(), "circumstances": {"model": "m"}, "standalone_s": {"128x128": 1.0}}
    first, rest = (InterruptedEngine(head, after, by_signal=by_signal) for after in (2, 99))
    outcome = Sweep(wanted, first, ModelDefaults(), lambda: tmp_path).run()
    assert (outcome.was_interrupted, outcome.result["num_finished"]) == (True, 2)
    assert str(tmp_path) in outcome.hint
    assert first.served == [("diffusers", 4), ("patchedserve", 4)]
    folder = SweepFolder(tmp_path, head)
    assert len(folder.finished(wanted)) == folder.num_finished(wanted) == 2
    done: list[int] = []
    again = Sweep(wanted, rest, ModelDefaults(), lambda: tmp_path).run(on_done=lambda: done.append(1))
    assert not again.was_interrupted
    assert again.place.is_file()
    # The second rate starts with another system.
    assert [name for name, _ in rest.served] == ["patched-edf", "patchedserve", "patched-edf", "diffusers"]
    assert len(done) == 6
    runs = folder.finished(wanted)
    assert [(run.system, run.request_rate) for run in runs] == [
        (system, rate) for system in ("diffusers", "patchedserve", "patched-edf") for rate in (1.0, 2.0)
    ]
    assert all(
        run.figures == {"note": 1} and run.duration_s == 10.0 and run.statuses == {"completed": 4} for run in runs
    )
    with pytest.raises(UsageError, match="was begun with settings slo_scale"):
        SweepFolder(tmp_path, {**head, "settings": settings(slo_scale=3.0).fixed()})


def test_head_gains_resolutions_but_does_not_change(tmp_path: Path) -> None:
    wanted = settings().fixed()
    SweepFolder(tmp_path, {"settings": wanted, "standalone_s": {"128x128": 1.0}})
    grown = SweepFolder(tmp_path, {"settings": wanted, "standalone_s": {"256x256": 3.0}})
    assert grown.head["standalone_s"] == read_head(tmp_path)["standalone_s"] == {"128x128": 1.0, "256x256": 3.0}
    with pytest.raises(UsageError, match=r"was begun with standalone_s 128x128 1.0, but it is 2.0 now"):
        SweepFolder(tmp_path, {"settings": wanted, "standalone_s": {"128x128": 2.0}})


def test_predictor_may_be_added_later_but_not_replaced(tmp_path: Path) -> None:
    SweepFolder(tmp_path, {"settings": settings().fixed(), "predictor": {}})
    SweepFolder(tmp_path, {"settings": settings().fixed(), "predictor": {"file": "a (1)"}})
    SweepFolder(tmp_path, {"settings": settings().fixed(), "predictor": {}})
    with pytest.raises(UsageError, match=r'was begun with predictor file "a \(1\)", but it is "a \(2\)" now'):
        SweepFolder(tmp_path, {"settings": settings().fixed(), "predictor": {"file": "a (2)"}})


@pytest.mark.parametrize(("option", "name"), [("prompts", "p.txt"), ("arrivals", "a.csv")])
def test_trace_files_are_compared_by_content(tmp_path: Path, option: str, name: str) -> None:
    file = tmp_path / name
    file.write_text("TIMESTAMP\n1\n")
    options: Any = {option: file}
    wanted = replace(settings(), trace=TraceSettings(**options))
    folder = tmp_path / "sweep"
    folder.mkdir()
    SweepFolder(folder, {"settings": wanted.fixed()})
    SweepFolder(folder, {"settings": wanted.fixed()})
    file.write_text("TIMESTAMP\n2\n")
    with pytest.raises(UsageError, match=f"was begun with settings {option} .*{name} "):
        SweepFolder(folder, {"settings": wanted.fixed()})


@pytest.mark.slow
def test_finished_run_is_read_as_needed_by_figures(tmp_path: Path) -> None:
    from patchedserve.data.resolution import Resolution
    from patchedserve.serving.core.request_state import RequestRecord

    wanted = settings(systems=("patchedserve",), rates=(1.0,))
    folder = SweepFolder(tmp_path, {"settings": wanted.fixed()})
    records = []
    for index in range(20_000):
        record = RequestRecord.of(Request(index, "a hat and a shoe", Resolution(64, 64), arrival_s=index, slo_s=2.0))
        if index % 4:
            record.close("completed", index + index % 4)
        else:
            record.close("discarded", index + 1.0, "too late" if index % 8 else None)
        records.append(record)
    folder.save("simulator", "patchedserve", 1.0, 0, SweepRunResult(records, 20_001.0, {"note": 1}))
    tracemalloc.start()
    (run,) = folder.finished(wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (run.num_requests, run.num_met, run.duration_s) == (20_000, 10_000, 20_001.0)
    assert run.statuses == {"completed": 15_000, "discarded": 5_000}
    assert run.reasons == {"too late": 2_500, None: 2_500}
    assert sorted(set(run.latencies_s.tolist())) == [1.0, 2.0, 3.0]
    # Rows as dicts would take 20 MB.
    assert peak < 1e6
    # Counting reads no file.
    (tmp_path / "runs" / "simulator-patchedserve-1-0.parquet").write_bytes(b"PAR1")
    assert folder.num_finished(wanted) == 1
    with pytest.raises(UsageError, match=r"simulator-patchedserve-1-0\.parquet"):
        folder.finished(wanted)


def test_systems_rotate_and_seeds_vary_slowest() -> None:
    wanted = settings(systems=("bucketed", "nirvana"), rates=(1.0, 2.0, 3.0), seeds=(0, 1))
    assert list(wanted.order())[:4] == [
        (1.0, 0, ("bucketed", "nirvana")),
        (2.0, 0, ("nirvana", "bucketed")),
        (3.0, 0, ("bucketed", "nirvana")),
        (1.0, 1, ("nirvana", "bucketed")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["simulator_side", "runner"])
def test_sweeps_of_the_simulator_import_no_torch(module: str) -> None:
    code = f"import sys, patchedserve.profiling.sweep.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
