"""Runner of all sweeps of `psctl bench slo`. A side serves the runs: real engines, or the simulator. No torch."""

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
from ..experiment.experiment import Outcome
from .figures import EngineKind
from .settings import SWEEP_FILE, SweepFolder, SweepRunResult, SweepSettings, read_head

Standalone = Callable[[Request], float]
"""Returns the latency in seconds of a request that is served alone on plain diffusers, the same for all systems."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Warm-up of an engine before a sweep.

    Attributes:
        num_requests: number of requests that each engine serves at the middle rate before anything counts, and about
            the number in each calibration run of the simulator.
        combinations, repeats: settings of latency tables that the simulator needs and the workspace does not have.
    """

    num_requests: int = 32
    combinations: int = 60
    repeats: int = 2

    def __post_init__(self) -> None:
        require_counts({"num requests": self.num_requests, "combinations": self.combinations, "repeats": self.repeats})


Serve = Callable[[System, Sequence[Request], Standalone], SweepRunResult]
"""Serves a trace of submitted requests with SLOs, which the system adapts."""


class SweepSide(Protocol):
    """Side that serves the runs of a sweep. `Sweep.run` calls `check`, `head` and `begin` at most once each, in this
    order, the first two with a request of every resolution.
    """

    @property
    def extra_requests(self) -> Sequence[Request]:
        """Requests that are served in addition to the sweep's own."""
        ...

    def check(self, examples: Sequence[Request]) -> None:
        """Raise UsageError if a request cannot be served or a system lacks what it needs; nothing is written yet."""
        ...

    def head(self, examples: Sequence[Request], known_s: Mapping[str, float]) -> dict[str, Any]:
        """Return the head that the runs have in common (`SweepFolder`), with standalone latencies by resolution. Those
        in `known_s`, known from an earlier call, are kept.
        """
        ...

    def begin(self, folder: SweepFolder, standalone_s: Standalone) -> Mapping[EngineKind, Serve]:
        """Prepare (warm up, calibrate), and return the function that serves the runs of every kind of engine."""
        ...


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that is ready to run.

    Attributes:
        settings, side, defaults: settings of the sweep, the side that serves, and the model's defaults.
        open_folder: returns an empty folder, or that of the sweep to continue; called after all checks.
    """

    settings: SweepSettings
    side: SweepSide
    defaults: ModelDefaults
    open_folder: Callable[[], Path]

    def run(
        self, *, on_run: Callable[[str], None] = lambda text: None, on_done: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Serve the runs that the folder does not have yet, and write the results of all runs.

        Args:
            on_run: called with a description of each run before it.
            on_done: called after each run, and for each run that was already finished.

        Raises:
            UsageError: the model or the latencies do not suit a request, or the folder is of another sweep.
            RunError: a measurement fails, or no run was finished.
            KeyboardInterrupt: on Ctrl-C before the first run was finished; later, the outcome records the interruption.
            OSError: results cannot be written.
        """
        from .report import sweep_result, tables_of, write_sweep

        settings, side, defaults = self.settings, self.side, self.defaults
        examples = examples_of(settings, defaults, side.extra_requests)
        side.check(examples)
        path = self.open_folder()
        known_s = read_head(path)["standalone_s"] if (path / SWEEP_FILE).exists() else {}
        folder = SweepFolder(path, side.head(examples, known_s))
        standalone = folder.head["standalone_s"]

        def standalone_s(request: Request) -> float:
            return standalone[request.sizes_in_words]

        is_finished = folder.num_finished(settings) == settings.num_runs
        runners = {} if is_finished else side.begin(folder, standalone_s)
        was_interrupted = False
        try:
            self._serve(folder, runners, standalone_s, on_run, on_done)
        except KeyboardInterrupt:
            was_interrupted = True
        runs = folder.finished(settings)
        if not runs:
            if was_interrupted:
                raise KeyboardInterrupt
            raise RunError("no run of the sweep was finished")
        result = sweep_result(settings, folder.head, runs, path, was_interrupted=was_interrupted)
        hint = f"The same command with --resume {path} continues from here."
        return Outcome(result, write_sweep(result, path), tables_of, "Report", hint)

    def _serve(
        self,
        folder: SweepFolder,
        runners: Mapping[EngineKind, Serve],
        standalone_s: Standalone,
        on_run: Callable[[str], None],
        on_done: Callable[[], None],
    ) -> None:
        """Serve all unfinished runs, those of one engine before those of the next, and keep each as it ends. Raises
        KeyboardInterrupt on Ctrl-C, whose run is not kept.
        """
        settings = self.settings
        for engine, (rate, seed, names) in itertools.product(settings.engines, list(settings.order())):
            requests: list[Request] | None = None
            for name in names:
                if not folder.has(engine, name, rate, seed):
                    if requests is None:
                        drawn = settings.requests(rate, seed, self.defaults)
                        requests = assign_slos(drawn, standalone_s, settings.slo_scale)
                    on_run(f"{name} at {rate:g}/s, seed {seed}")
                    system = get_system(name, is_simulated=engine == "simulator")
                    served = runners[engine](system, requests, standalone_s)
                    if served.was_interrupted:
                        raise KeyboardInterrupt
                    folder.save(engine, name, rate, seed, served)
                on_done()


def examples_of(
    settings: SweepSettings, defaults: ModelDefaults, extra_requests: Iterable[Request] = ()
) -> list[Request]:
    """Return a request of every resolution in the sweep or in `extra_requests`, and of all sizes of its references,
    from small to large. Draws all traces once, and raises UsageError if one cannot be drawn.
    """
    found: dict[str, Request] = {}
    traces = (settings.requests(rate, seed, defaults) for rate, seed, _ in settings.order())
    for trace in (*traces, extra_requests):
        for request in trace:
            found.setdefault(request.sizes_in_words, request)
    return sorted(found.values(), key=lambda each: (each.pixels_seen, each.resolution, each.sizes_in_words))
