"""Settings of a sweep, and its folder (PatchedServe figure 11: systems x request rates x seeds). No torch.

All systems of one rate and seed serve the same requests with the same SLOs, one right after the other. The first system
changes from one rate to the next, so that drift of the machine affects all systems alike. Every run is written as soon
as it ends, and a later call continues from there.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from ...data.errors import UsageError
from ...data.files import named_by_content, write_json
from ...data.records import read_json
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.schemas import RECORDS, STEPS, about_of, read_rows, read_table, write_table
from ...data.traces.traces import TRACE_KINDS
from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow
from ...serving.families.geometry import Geometry
from ...serving.models.defaults import ModelDefaults
from ...serving.options import EngineName
from ...serving.runs.simulated.calibration import ServedRun
from ...serving.runs.trace_requests import draw_requests
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings, check_slo_scale
from ...serving.scheduling.systems import COMPARED_SYSTEMS, System, get_system
from ...serving.simulator.distrifusion import PUBLISHED
from ..experiment.turns import rotated
from .figures import EngineKind, FinishedRun

SweepEngine = Literal["real", "simulator", "both"]
SWEEP_FILE = "sweep.json"
RUN_KIND = "slo"
_VERSION = 2  # version 1 identified files by path alone, and did not record the latency predictor
IDLE = {"idle": "skipped"}
"""Setting of sweeps on engines; earlier ones waited while an engine was idle, and are not continued."""
_GROWING = ("standalone_s", "predictor")
"""Parts of a head that grow: further rates and seeds may add resolutions, and further systems may need the latency
predictor."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """Settings of a sweep.

    Attributes:
        systems, rates, seeds: every combination of them is a run; rates are in requests per second.
        engine: engine that serves: real engines, the simulator, or both.
        trace: settings of the requests; its own rate and seed are ignored.
        slo_scale: SLO of a request as a multiple of its standalone latency on plain diffusers.
        geometry: returns the geometry of the model, which edits must fit; None if the trace may not contain edits.
        max_batch_size, num_gpus: maximum number of requests in a batch, and number of GPUs of the simulator.

    Raises:
        UsageError: a value is not allowed, is given twice, or is incompatible with another.
    """

    systems: tuple[str, ...] = COMPARED_SYSTEMS
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    seeds: tuple[int, ...] = (0,)
    engine: SweepEngine = "real"
    trace: TraceSettings = field(default_factory=TraceSettings)
    slo_scale: float = DEFAULT_SLO_SCALE
    max_batch_size: int = 16
    num_gpus: int = 1
    geometry: Callable[[], Geometry] | None = None

    def __post_init__(self) -> None:
        for name, given in (("systems", self.systems), ("rates", self.rates), ("seeds", self.seeds)):
            if not given:
                raise UsageError(f"no {name} are given, but there must be at least one")
            for value in given:
                if list(given).count(value) > 1:
                    raise UsageError(f"{value} is given twice among the {name}")
        for name in self.systems:
            get_system(name, is_simulated=self.engine == "simulator")
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
        if any(system.spans_gpus for system in self.presets):
            PUBLISHED.check(self.num_gpus)
        if self.num_gpus > 1 and self.engine != "simulator":
            raise UsageError(f"--gpus is {self.num_gpus}, but only --on simulator serves on more than one")

    @property
    def engines(self) -> tuple[EngineKind, ...]:
        """Kinds of engine that serve every run."""
        return ("real", "simulator") if self.engine == "both" else (self.engine,)

    @property
    def presets(self) -> tuple[System, ...]:
        """The systems."""
        return tuple(get_system(name, is_simulated=True) for name in self.systems)

    @property
    def engine_names(self) -> tuple[EngineName, ...]:
        """The engines that the systems run on."""
        return tuple(dict.fromkeys(system.engine for system in self.presets))

    def requests(self, rate: float, seed: int, defaults: ModelDefaults) -> list[Request]:
        """Return the trace of a rate and a seed, without SLOs from standalone latencies. Raises as `draw_requests`."""
        trace = replace(self.trace, request_rate=rate, seed=seed)
        return draw_requests(trace, defaults, geometry=self.geometry, sizes_only=self.engine == "simulator")

    def order(self) -> Iterator[tuple[float, int, tuple[str, ...]]]:
        """Yield rate, seed and the systems in the order in which they run; all rates of a seed come before the next."""
        for cell, (seed, rate) in enumerate(product(self.seeds, self.rates)):
            yield rate, seed, rotated(self.systems, cell)

    def runs(self) -> Iterator[tuple[EngineKind, str, float, int]]:
        """Return an iterator over engine, system, rate and seed of all runs, in the order of the figures."""
        return product(self.engines, self.systems, self.rates, self.seeds)

    @property
    def num_runs(self) -> int:
        return len(self.systems) * len(self.rates) * len(self.seeds) * len(self.engines)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that compared runs must share: all but systems, rates and seeds. Files are identified by
        their content. Raises OSError if one cannot be read.
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
class SweepRunResult:
    """Result of one run: records, seconds until the last request ended, other figures, and whether Ctrl-C ended it."""

    records: Sequence[RequestRecord]
    duration_s: float
    figures: Mapping[str, Any]
    was_interrupted: bool = False


class SweepFolder:
    """Folder of a sweep.

    It holds `sweep.json` (the head), `runs/ENGINE-SYSTEM-RATE-SEED.parquet` (the requests of every finished run), the
    inputs of the simulator (`calibration.json` and its runs in `calibration/`, `tables/`), and the figures of all
    finished runs.

    Args:
        path: an existing folder.
        head: settings and circumstances that the runs have in common, as JSON; only runs with the same head are
            comparable. Standalone latencies and predictors that the folder does not have yet are added to its head.

    Attributes:
        head: the merged head.

    Raises:
        UsageError: the folder holds a sweep with another head.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.runs = path / "runs"
        self.head = json.loads(json.dumps({"version": _VERSION, **head}))
        stored = read_head(path) if (path / SWEEP_FILE).exists() else None
        if stored is not None:
            known = deepcopy(stored)
            own, other = self.head["settings"], known["settings"]
            for cache, found in ((own, other), (other, own)):
                # A sweep that has not used the patch engine yet has no setting of its cache.
                if "cache" in cache and cache["cache"] is None:
                    cache["cache"] = found.get("cache")
            for name in _GROWING:
                old, new = known.get(name, {}), self.head.get(name, {})
                known[name], self.head[name] = new | old, old | new
            _check_same(path, known, self.head)
        if self.head != stored:
            write_json(path / SWEEP_FILE, self.head)
        self.runs.mkdir(exist_ok=True)

    def _file(self, engine: EngineKind, system: str, rate: float, seed: int) -> Path:
        return self.runs / f"{engine}-{system}-{rate:.10g}-{seed}.parquet"

    def has(self, engine: EngineKind, system: str, rate: float, seed: int) -> bool:
        """Return whether a run is finished."""
        return self._file(engine, system, rate, seed).exists()

    def save(self, engine: EngineKind, system: str, rate: float, seed: int, served: SweepRunResult) -> None:
        """Keep a finished run. Raises OSError."""
        about = {"engine": engine, "policy": system, "request_rate": rate, "seed": seed}
        about |= {"duration_s": served.duration_s, "figures": dict(served.figures)}
        path = self._file(engine, system, rate, seed)
        write_table(path, RECORDS, [record.to_row() for record in served.records], about=about)

    def delete_runs(self, engine: EngineKind) -> None:
        """Delete all finished runs of an engine. Raises OSError."""
        for path in self.runs.glob(f"{engine}-*.parquet"):
            path.unlink()

    def _calibration(self, engine: EngineName, load: float, seed: int) -> Path:
        return self.path / "calibration" / f"{engine}-{load:g}-{seed}"

    def has_calibration(self, engine: EngineName, load: float, seed: int) -> bool:
        """Return whether a calibration run at a share of an engine's capacity is finished."""
        return (self._calibration(engine, load, seed) / "records.parquet").exists()

    def save_calibration(self, engine: EngineName, load: float, seed: int, run: ServedRun) -> None:
        """Keep a finished calibration run. Raises OSError."""
        path = self._calibration(engine, load, seed)
        path.mkdir(parents=True, exist_ok=True)
        write_table(path / "steps.parquet", STEPS, [row.to_row() for row in run.steps])
        write_table(path / "records.parquet", RECORDS, [record.to_row() for record in run.records])

    def load_calibration(self, engine: EngineName, load: float, seed: int) -> ServedRun:
        """Read a finished calibration run. Raises UsageError if a file is damaged."""
        path = self._calibration(engine, load, seed)
        records = [RequestRecord.from_row(row) for row in read_rows(path / "records.parquet", RECORDS)]
        return ServedRun(records, [StepRow(**row) for row in read_rows(path / "steps.parquet", STEPS)])

    def load(self, engine: EngineKind, system: str, rate: float, seed: int) -> FinishedRun:
        """Read the data of a finished run for figures. Raises UsageError if the file is damaged or of another run."""
        path = self._file(engine, system, rate, seed)
        table = read_table(path, RECORDS, ["width", "height", "slo_met", "latency_s", "status", "reason"])
        about = about_of(table.schema, path)
        sizes = table.group_by(["width", "height", "slo_met"], use_threads=False).aggregate([([], "count_all")])
        ends = table.group_by(["status", "reason"], use_threads=False).aggregate([([], "count_all")]).to_pylist()
        try:
            if (about["engine"], about["policy"], about["request_rate"], about["seed"]) != (engine, system, rate, seed):
                raise ValueError("it belongs to another run")
            if not len(table):
                raise ValueError("it holds no request")
            return FinishedRun(
                engine,
                system,
                rate,
                seed,
                num_met=_counts(table["slo_met"]).get(True, 0),
                statuses=_counts(table["status"]),
                reasons={each["reason"]: each["count_all"] for each in ends if each["status"] == "discarded"},
                latencies_s=table["latency_s"].drop_null().to_numpy(),
                duration_s=float(about["duration_s"]),
                figures=about["figures"],
                met_by_resolution=_met_by_resolution(sizes.to_pylist()),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: the finished run is damaged ({error}); delete it to serve it again") from error

    def finished(self, settings: SweepSettings) -> list[FinishedRun]:
        """Return all finished runs of a sweep in the order of its settings. Raises as `load`."""
        return [self.load(*key) for key in settings.runs() if self.has(*key)]

    def num_finished(self, settings: SweepSettings) -> int:
        """Return the number of finished runs of a sweep, without reading them."""
        return sum(self.has(*key) for key in settings.runs())


def _met_by_resolution(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests in time and of all requests, by resolution. Each row counts the requests of one
    size that were, or were not, in time.
    """
    found: dict[Resolution, tuple[int, int]] = {}
    for row in rows:
        size, count = Resolution(row["width"], row["height"]), row["count_all"]
        num_met, num_requests = found.get(size, (0, 0))
        found[size] = num_met + count * bool(row["slo_met"]), num_requests + count
    return {str(size): found[size] for size in sorted(found)}


def _counts(column: pa.ChunkedArray) -> dict[Any, int]:
    return {each["values"]: each["counts"] for each in column.value_counts().to_pylist()}


def read_head(path: Path) -> dict[str, Any]:
    """Read the head of a sweep's folder. Raises UsageError if there is no sweep, or it is damaged."""
    file = path / SWEEP_FILE
    if not file.is_file():
        raise UsageError(f"{path} is not a folder of psctl bench slo: it has no {SWEEP_FILE}")
    head = read_json(file, "a sweep")
    if head.get("version") != _VERSION:
        raise UsageError(f"{file} is not version {_VERSION} of a sweep")
    return head


def check_resumed(path: Path, settings: SweepSettings) -> None:
    """Raise UsageError if the sweep of a folder cannot be continued; called before a model is loaded."""
    known, fixed = read_head(path)["settings"], settings.fixed()
    if settings.engine != "simulator":
        fixed |= IDLE
    _check_same(path, {name: known.get(name) for name in fixed}, json.loads(json.dumps(fixed)), "settings ")


def _check_same(path: Path, known: Mapping[str, Any], head: Mapping[str, Any], where: str = "") -> None:
    for name in sorted({*known, *head}):
        old, new = known.get(name), head.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_same(path, old, new, f"{where}{name} ")
        elif old != new:
            raise UsageError(
                f"{path} was begun with {where}{name} {json.dumps(old)}, but it is {json.dumps(new)} now: only "
                "systems, rates and seeds may change"
            )
