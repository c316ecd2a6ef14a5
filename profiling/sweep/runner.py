"""`psctl bench slo`: one runner for all sweeps, driven by the side that serves: engines, or the simulator. No torch."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...data.checks import require_counts
from ...data.errors import RunError
from ...data.requests import Request
from ...data.traces.traces import assign_slos
from ...serving.models.defaults import ModelDefaults
from ...serving.scheduling.systems import System, get_system
from .figures import EngineKind
from .settings import SWEEP_FILE, Served, SweepFolder, SweepSettings, read_head

Standalone = Callable[[Request], float]
"""Latency of a request that is served alone on plain diffusers, in seconds: the same for all systems."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What comes before the sweep on an engine.

    Attributes:
        num_requests: served by each engine at the middle rate before anything counts; and, if the simulator is to be
            calibrated, about as many in each run for that.
        combinations, repeats: of the latency tables, where the simulator needs one that the workspace does not have.
    """

    num_requests: int = 32
    combinations: int = 60
    repeats: int = 2

    def __post_init__(self) -> None:
        require_counts({"num requests": self.num_requests, "combinations": self.combinations, "repeats": self.repeats})


Serve = Callable[[System, Sequence[Request], Standalone], Served]
"""Serves a trace whose requests have SLOs, as they were asked for; the system adapts them."""


class Side(Protocol):
    """What a sweep is served by. `sweep` calls `check`, `head` and `begin` once each, in this order, the first two with
    a request of every resolution.
    """

    @property
    def others(self) -> Sequence[Request]:
        """Requests that are served beside the sweep's own."""
        ...

    def check(self, examples: Sequence[Request]) -> None:
        """Raise UsageError if a request cannot be served or a system lacks what it needs; nothing is written yet."""
        ...

    def head(self, examples: Sequence[Request], known_s: Mapping[str, float]) -> dict[str, Any]:
        """What the runs have in common (`SweepFolder`), with standalone latencies by resolution, of which those that
        are known from an earlier call stay.
        """
        ...

    def begin(self, folder: SweepFolder, standalone_s: Standalone) -> Mapping[EngineKind, Serve]:
        """Get ready (warm up, calibrate), and say what serves the runs of every kind of engine."""
        ...


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What a sweep gives: its result as in `result.json`, its page, its folder, and whether Ctrl-C ended it."""

    result: dict[str, Any]
    report: Path
    run_dir: Path
    was_interrupted: bool


def sweep(
    settings: SweepSettings,
    side: Side,
    defaults: ModelDefaults,
    open_folder: Callable[[], Path],
    *,
    on_run: Callable[[str], None] = lambda text: None,
    on_done: Callable[[], None] = lambda: None,
) -> SweepOutcome:
    """Serve the runs that the folder does not have yet, and write what all of them tell.

    Args:
        settings, side, defaults: what is swept, what serves, and the model's defaults.
        open_folder: gives an empty folder, or that of the sweep to continue; called once all is checked.
        on_run, on_done: of `run_sweep`.

    Raises:
        UsageError: the model or the latencies do not suit a request, or the folder is of another sweep.
        RunError: a measurement fails, or no run was finished.
        KeyboardInterrupt: on Ctrl-C before the first run was finished; later the outcome says so.
        OSError: results cannot be written.
    """
    from .report import sweep_result, write_sweep

    examples = examples_of(settings, defaults, side.others)
    side.check(examples)
    path = open_folder()
    known_s = read_head(path)["standalone_s"] if (path / SWEEP_FILE).exists() else {}
    folder = SweepFolder(path, side.head(examples, known_s))
    standalone = folder.head["standalone_s"]

    def standalone_s(request: Request) -> float:
        return standalone[str(request.resolution)]

    is_finished = folder.num_finished(settings) == settings.num_runs
    runners = {} if is_finished else side.begin(folder, standalone_s)
    was_interrupted = run_sweep(settings, runners, folder, standalone_s, defaults, on_run=on_run, on_done=on_done)
    runs = folder.finished(settings)
    if not runs:
        if was_interrupted:
            raise KeyboardInterrupt
        raise RunError("no run of the sweep was finished")
    result = sweep_result(settings, folder.head, runs, path, was_interrupted=was_interrupted)
    return SweepOutcome(result, write_sweep(result, path), path, was_interrupted)


def examples_of(settings: SweepSettings, defaults: ModelDefaults, others: Iterable[Request] = ()) -> list[Request]:
    """A request of every resolution that occurs in the sweep or among others, from small to large. Draws all traces
    once, and raises UsageError if one cannot be drawn.
    """
    found: dict[Any, Request] = {}
    traces = (settings.requests(rate, seed, defaults) for rate, seed, _ in settings.order())
    for trace in (*traces, others):
        for request in trace:
            found.setdefault(request.resolution, request)
    return [found[size] for size in sorted(found, key=lambda size: (size.pixels, size))]


def run_sweep(
    settings: SweepSettings,
    runners: Mapping[EngineKind, Serve],
    folder: SweepFolder,
    standalone_s: Standalone,
    defaults: ModelDefaults,
    *,
    on_run: Callable[[str], None] = lambda text: None,
    on_done: Callable[[], None] = lambda: None,
) -> bool:
    """Serve all runs that are not finished, those of one engine before those of the next, and keep each as it ends.

    Args:
        settings, defaults: what is swept, and the model's defaults.
        runners: for every engine; none are needed where all runs are finished.
        folder: where runs are kept.
        standalone_s: what SLOs are multiples of.
        on_run: told what is served, before each run.
        on_done: called after each, and for each that was finished before.

    Returns:
        Whether Ctrl-C ended it; the run under way then is not kept.

    Raises:
        UsageError: a trace cannot be drawn or served.
    """
    try:
        for engine, (rate, seed, names) in itertools.product(settings.engines, list(settings.order())):
            requests: list[Request] | None = None
            for name in names:
                if not folder.has(engine, name, rate, seed):
                    if requests is None:
                        drawn = settings.requests(rate, seed, defaults)
                        requests = assign_slos(drawn, standalone_s, settings.slo_scale)
                    on_run(f"{name} at {rate:g}/s, seed {seed}")
                    system = get_system(name, is_simulated=engine == "simulator")
                    served = runners[engine](system, requests, standalone_s)
                    if served.was_interrupted:
                        return True
                    folder.save(engine, name, rate, seed, served)
                on_done()
    except KeyboardInterrupt:
        return True
    return False
