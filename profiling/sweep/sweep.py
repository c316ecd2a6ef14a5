"""The sweep of figure 11 of PatchedServe: policies x request rates x seeds, on the engine or in the simulator.

All policies of one rate and seed serve the same requests with the same SLOs, one right after the other; which goes
first changes from one rate to the next, so that drift of the machine meets all alike. Every run is written down as soon
as it has ended, and a later call goes on from there. This module imports no torch. What a run folder holds:

    sweep.json              what was measured, and the standalone latencies that SLOs are multiples of
    runs/ENGINE-POLICY-RATE-SEED.parquet   the requests of one finished run
    calibration.json, tables/              what drives the simulator (`--on both`)
    result.json, *.png, report.html        the figures of all finished runs
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa

from ...data.errors import UsageError
from ...data.files import named_by_content, write_json
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.schemas import RECORDS, about_of, read_table, write_table
from ...data.traces.traces import TRACE_KINDS, assign_slos
from ...serving.core.request_state import RequestRecord
from ...serving.engine.stepper import EngineName
from ...serving.models.defaults import ModelDefaults
from ...serving.scheduling.systems import get_system
from ...serving.simulator.distrifusion import speedup
from ..runs.trace_settings import TraceSettings, check_slo_scale, draw_requests
from .figures import EngineKind, FinishedRun

SweepEngine = Literal["real", "simulator", "both"]
SWEEP_FILE, RESULT_FILE = "sweep.json", "result.json"
RUN_KIND = "slo"
DEFAULT_POLICIES = ("diffusers", "bucketed", "nirvana", "patched-fcfs", "patchedserve")
_VERSION = 3  # version 2 had policies in place of systems; version 1 told files by their path alone
_GROWING = ("standalone_s", "predictor")
"""Parts of a head that grow: other rates and seeds may ask for resolutions that nobody has asked for before, and other
policies for the latency predictor."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What is swept.

    Attributes:
        policies, rates, seeds: every combination of them is a run; rates in requests per second.
        engine: what serves.
        trace: what requests ask for; its own rate and seed do not count.
        slo_scale: SLO of a request: this many times its standalone latency on plain diffusers.
        max_batch_size: requests denoised together.
        num_gpus: of the simulator.

    Raises:
        UsageError: a value is not allowed, is given twice, or does not fit another.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    seeds: tuple[int, ...] = (0,)
    engine: SweepEngine = "real"
    trace: TraceSettings = field(default_factory=TraceSettings)
    slo_scale: float = 5.0
    max_batch_size: int = 16
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if self.engine not in get_args(SweepEngine):
            raise UsageError(f"engine is {self.engine!r}, but it must be one of {', '.join(get_args(SweepEngine))}")
        for name, given in (("policies", self.policies), ("rates", self.rates), ("seeds", self.seeds)):
            if not given:
                raise UsageError(f"no {name} are given, but there must be at least one")
            for value in given:
                if list(given).count(value) > 1:
                    raise UsageError(f"{value} stands twice among the {name}")
        for policy in self.policies:
            get_system(policy, is_simulated=self.engine == "simulator")
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise UsageError(f"a request rate is {rate:g}, but it must be more than 0 and finite")
        if min(self.seeds) < 0:
            raise UsageError(f"a seed is {min(self.seeds)}, but it must be 0 or more")
        if self.trace.trace not in TRACE_KINDS:
            kinds = ", ".join(TRACE_KINDS)
            raise UsageError(
                f"trace is {self.trace.trace!r}, but a sweep draws its own at every rate and seed: one of {kinds}"
            )
        check_slo_scale(self.slo_scale)
        if any(get_system(name, is_simulated=True).spans_gpus for name in self.policies):
            speedup(Resolution(1024, 1024), self.num_gpus)
        if self.num_gpus > 1 and self.engine != "simulator":
            raise UsageError(f"--gpus is {self.num_gpus}, but only --on simulator serves on more than one")

    @property
    def engines(self) -> tuple[EngineKind, ...]:
        """Which engines serve every run."""
        return ("real", "simulator") if self.engine == "both" else (self.engine,)

    @property
    def engine_names(self) -> tuple[EngineName, ...]:
        """The engines that the policies run on."""
        return tuple(dict.fromkeys(get_system(policy, is_simulated=True).engine for policy in self.policies))

    def requests(self, rate: float, seed: int, defaults: ModelDefaults) -> list[Request]:
        """The trace of a rate and a seed, without SLOs. Raises UsageError as `draw_requests`."""
        return draw_requests(replace(self.trace, request_rate=rate, seed=seed), defaults)

    def order(self) -> Iterator[tuple[float, int, tuple[str, ...]]]:
        """Rate, seed and the policies in the order in which they run; all rates of a seed come before the next."""
        cell = 0
        for seed in self.seeds:
            for rate in self.rates:
                first = cell % len(self.policies)
                yield rate, seed, (*self.policies[first:], *self.policies[:first])
                cell += 1

    def runs(self) -> Iterator[tuple[EngineKind, str, float, int]]:
        """Engine, policy, rate and seed of all runs, as figures are told: by engine, policy, rate and seed."""
        return product(self.engines, self.policies, self.rates, self.seeds)

    @property
    def num_runs(self) -> int:
        return len(self.policies) * len(self.rates) * len(self.seeds) * len(self.engines)

    def fixed(self) -> dict[str, Any]:
        """What must be the same for runs that are compared: everything but policies, rates and seeds. Files count by
        their content. Raises OSError: one cannot be read.
        """
        trace = self.trace.to_config()
        for name, path in (("prompts", self.trace.prompts), ("arrivals", self.trace.arrivals)):
            trace[name] = None if path is None else named_by_content(path)
        return {
            **{name: trace[name] for name in trace if name not in ("request_rate", "seed")},
            "engine": self.engine,
            "slo_scale": self.slo_scale,
            "max_batch_size": self.max_batch_size,
            "gpus": self.num_gpus,
        }


@dataclass(frozen=True, slots=True)
class Served:
    """What one run gave: records, seconds until the last request ended, other figures, and whether Ctrl-C ended it."""

    records: Sequence[RequestRecord]
    duration_s: float
    figures: Mapping[str, Any]
    was_interrupted: bool = False


class Runner(Protocol):
    """Serves traces under any policy of the sweep."""

    def run(self, policy: str, requests: Sequence[Request], standalone_s: Callable[[Request], float]) -> Served:
        """Serve a trace whose requests have SLOs."""
        ...


class SweepFolder:
    """The folder of a sweep.

    Args:
        path: an existing folder.
        head: what the runs have in common, as JSON: they may be compared only if it is the same. Standalone latencies
            and predictors that the folder does not have yet are added to it.

    Attributes:
        head: what is known by now.

    Raises:
        UsageError: the folder holds a sweep with another head, or no sweep though something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.runs = path / "runs"
        self.head = json.loads(json.dumps({"version": _VERSION, **head}))
        stored = read_head(path) if (path / SWEEP_FILE).exists() else None
        if stored is not None:
            known = dict(stored)
            for name in _GROWING:
                old, new = known.get(name, {}), self.head.get(name, {})
                known[name], self.head[name] = new | old, old | new
            _check_same(path, known, self.head)
        if self.head != stored:
            write_json(path / SWEEP_FILE, self.head)
        self.runs.mkdir(exist_ok=True)

    def _file(self, engine: EngineKind, policy: str, rate: float, seed: int) -> Path:
        return self.runs / f"{engine}-{policy}-{rate:.10g}-{seed}.parquet"

    def has(self, engine: EngineKind, policy: str, rate: float, seed: int) -> bool:
        """Whether a run is finished."""
        return self._file(engine, policy, rate, seed).exists()

    def save(self, engine: EngineKind, policy: str, rate: float, seed: int, served: Served) -> None:
        """Keep a finished run. Raises OSError."""
        about = {
            "engine": engine,
            "policy": policy,
            "request_rate": rate,
            "seed": seed,
            "duration_s": served.duration_s,
            "figures": dict(served.figures),
        }
        path = self._file(engine, policy, rate, seed)
        write_table(path, RECORDS, [record.to_row() for record in served.records], about=about)

    def load(self, engine: EngineKind, policy: str, rate: float, seed: int) -> FinishedRun:
        """Read what figures need of a finished run. Raises UsageError: the file is damaged or of another run."""
        path = self._file(engine, policy, rate, seed)
        table = read_table(path, RECORDS, ["slo_met", "latency_s", "status", "reason"])
        about = about_of(table.schema, path)
        ends = table.group_by(["status", "reason"], use_threads=False).aggregate([([], "count_all")]).to_pylist()
        try:
            if (about["engine"], about["policy"], about["request_rate"], about["seed"]) != (engine, policy, rate, seed):
                raise ValueError("it is of another run")
            if not len(table):
                raise ValueError("it holds no request")
            return FinishedRun(
                engine,
                policy,
                rate,
                seed,
                num_met=_counts(table["slo_met"]).get(True, 0),
                statuses=_counts(table["status"]),
                reasons={each["reason"]: each["count_all"] for each in ends if each["status"] == "discarded"},
                latencies_s=table["latency_s"].drop_null().to_numpy(),
                duration_s=float(about["duration_s"]),
                figures=about["figures"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: the finished run is damaged ({error}); delete it to serve it again") from error

    def finished(self, settings: SweepSettings) -> list[FinishedRun]:
        """All finished runs of a sweep: by policy, rate and seed. Raises as `load`."""
        return [self.load(*key) for key in settings.runs() if self.has(*key)]

    def num_finished(self, settings: SweepSettings) -> int:
        """How many runs of a sweep are finished; looks into none of them."""
        return sum(self.has(*key) for key in settings.runs())


def _counts(column: pa.ChunkedArray) -> dict[Any, int]:
    return {each["values"]: each["counts"] for each in column.value_counts().to_pylist()}


def read_head(path: Path) -> dict[str, Any]:
    """Read what the runs of a sweep's folder have in common. Raises UsageError: there is no sweep, or it is damaged."""
    file = path / SWEEP_FILE
    if not file.is_file():
        raise UsageError(f"{path} is no folder of psctl bench slo: it has no {SWEEP_FILE}")
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("version") != _VERSION:
        raise UsageError(f"{file} is not version {_VERSION} of a sweep")
    return head


def check_resumed(path: Path, settings: SweepSettings) -> None:
    """Say early, before a model is loaded, that the sweep of a folder cannot be gone on with. Raises UsageError."""
    known, fixed = read_head(path)["settings"], settings.fixed()
    _check_same(path, {name: known.get(name) for name in fixed}, json.loads(json.dumps(fixed)), "settings ")


def _check_same(path: Path, known: Mapping[str, Any], head: Mapping[str, Any], where: str = "") -> None:
    for name in sorted({*known, *head}):
        old, new = known.get(name), head.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_same(path, old, new, f"{where}{name} ")
        elif old != new:
            raise UsageError(
                f"{path} was begun with {where}{name} {json.dumps(old)}, but it is {json.dumps(new)} now: only "
                "policies, rates and seeds may change"
            )


def run_sweep(
    settings: SweepSettings,
    runners: Mapping[EngineKind, Runner],
    folder: SweepFolder,
    standalone_s: Callable[[Request], float],
    defaults: ModelDefaults,
    *,
    on_run: Callable[[str], None] | None = None,
    on_done: Callable[[], None] | None = None,
) -> bool:
    """Serve all runs that are not finished, and keep each as it ends.

    Args:
        settings: what is swept.
        runners: for every engine of it.
        folder: where runs are kept.
        standalone_s: latency of a request when served alone, the same for all policies.
        defaults: of the model.
        on_run: told what is served, before each run.
        on_done: called after each, and for each that was finished before.

    Returns:
        Whether Ctrl-C ended it; the run under way then is not kept.

    Raises:
        UsageError: a trace cannot be drawn or served.
    """
    try:
        for rate, seed, policies in settings.order():
            requests: list[Request] | None = None
            for policy in policies:
                for engine in settings.engines:
                    if not folder.has(engine, policy, rate, seed):
                        if requests is None:
                            drawn = settings.requests(rate, seed, defaults)
                            requests = assign_slos(drawn, standalone_s, settings.slo_scale)
                        if on_run is not None:
                            on_run(f"{policy} at {rate:g}/s, seed {seed}")
                        served = runners[engine].run(policy, requests, standalone_s)
                        if served.was_interrupted:
                            return True
                        folder.save(engine, policy, rate, seed, served)
                    if on_done is not None:
                        on_done()
    except KeyboardInterrupt:
        return True
    return False
