"""`psctl bench slo`: what its sweeps have in common, whether an engine serves or the simulator (`slo_bench_*`)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.checks import require_counts
from ...data.errors import RunError
from ...data.requests import Request
from ...serving.models.defaults import ModelDefaults
from .figures import EngineKind
from .report import sweep_result, write_sweep
from .sweep import Runner, SweepFolder, SweepSettings, run_sweep


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What comes before the sweep on an engine.

    Attributes:
        num_requests: served by each engine at the middle rate before anything counts; twice if the simulator is to be
            calibrated, by the second time.
        combinations, repeats: of the latency tables, where the simulator needs one that the workspace does not have.
    """

    num_requests: int = 32
    combinations: int = 60
    repeats: int = 2

    def __post_init__(self) -> None:
        require_counts({"num requests": self.num_requests, "combinations": self.combinations, "repeats": self.repeats})


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What a sweep gives: its result as in `result.json`, its page, its folder, and whether Ctrl-C ended it."""

    result: dict[str, Any]
    report: Path
    run_dir: Path
    was_interrupted: bool


def examples_of(settings: SweepSettings, defaults: ModelDefaults, others: Iterable[Request] = ()) -> list[Request]:
    """A request of every resolution that occurs in the sweep, from small to large; draws all traces once.

    Args:
        settings: what is swept.
        defaults: of the model.
        others: requests that are served beside the sweep's.

    Raises:
        UsageError: a trace cannot be drawn.
    """
    found: dict[Any, Request] = {}
    for rate, seed, _ in settings.order():
        for request in settings.requests(rate, seed, defaults):
            found.setdefault(request.resolution, request)
    for request in others:
        found.setdefault(request.resolution, request)
    return [found[size] for size in sorted(found, key=lambda size: (size.pixels, size))]


def sweep_and_report(
    settings: SweepSettings,
    runners: Mapping[EngineKind, Runner],
    folder: SweepFolder,
    defaults: ModelDefaults,
    *,
    on_run: Callable[[str], None],
    on_done: Callable[[], None],
) -> SweepOutcome:
    """Serve the runs that the folder does not have yet, and write what all of them tell.

    Args:
        settings: what is swept.
        runners: what serves, by kind.
        folder: of the sweep.
        defaults: of the model.
        on_run, on_done: of `run_sweep`.

    Raises:
        UsageError: the model or the latencies do not suit a request.
        RunError: no run was finished.
        KeyboardInterrupt: on Ctrl-C before the first run was finished.
        OSError: results cannot be written.
    """
    alone_s = standalone_lookup(folder.head["standalone_s"])
    was_interrupted = run_sweep(settings, runners, folder, alone_s, defaults, on_run=on_run, on_done=on_done)
    runs = folder.finished(settings)
    if not runs:
        if was_interrupted:
            raise KeyboardInterrupt
        raise RunError("no run of the sweep was finished")
    result = sweep_result(settings, folder.head, runs, folder.path, was_interrupted=was_interrupted)
    return SweepOutcome(result, write_sweep(result, folder.path), folder.path, was_interrupted)


def standalone_lookup(standalone_s: Mapping[str, float]) -> Callable[[Request], float]:
    """Standalone latency of a request, by the name of its resolution as in the head of a sweep."""
    return lambda request: standalone_s[str(request.resolution)]
