"""Cost of a wrong table of step latencies for `slack` from the second minute on, in the simulator or on the engine.

One trace per seed is served with the right table and with each wrong one, with corrections learnt as in `psctl serve`
and as one factor of all steps. Each output line is a run; the last lines are means over seeds and their differences
from the right table. The simulator's step times are those of the model's published table; the engine's table is
profiled first.
"""

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.latency import LatencyTable, read_latencies
from patchedserve.data.tables.published import published_table
from patchedserve.data.work import Work, resolution_of
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.runs.step_file import step_sources
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.step_latency import MemoisedLatency, TableLatency
from patchedserve.serving.simulator.simulator import simulate
from patchedserve.serving.simulator.step_durations import ProfiledSteps, StepDurations
from patchedserve.training.latency.online_correction import OnlineCorrection

KINDS = ("right", "pure", "half", "double", "mixing", "noise", "another")
_PROMPT = "a hat on a green background"
_SLO_SCALE = 5.0
_MOST = 16


class FactorAlone(OnlineCorrection):
    """Correction that learns one factor of all steps."""

    def _corrected(self, table_s: float, active: Sequence[Resolution | Work]) -> float:
        return table_s


SIDES = {"learnt": OnlineCorrection, "factor": FactorAlone}


def published(model: str) -> LatencyTable:
    """Return the bundled table of a bundled model. Ends the script if there is none."""
    path = published_table(model)
    if path is None:
        raise SystemExit(f"psctl brings no table of {model}")
    return read_latencies(path)


def table_of(kind: str, right: LatencyTable, other: LatencyTable) -> TableLatency:
    """Return the right table or one with an error: no batch of several resolutions; all steps half or double; each
    further resolution in a batch adds the time of the fastest batch; 30 % of noise in every row; another model's table.
    """
    if kind == "another":
        return step_sources(other)[0]
    rows = {
        tuple(size for size, count in row.counts.items() for _ in range(count)): row.median_ms / 1e3
        for row in right.rows
    }
    generator = random.Random(5)
    match kind:
        case "pure":
            rows = {batch: seconds for batch, seconds in rows.items() if len({*batch}) == 1}
        case "half" | "double":
            rows = {batch: seconds * (0.5 if kind == "half" else 2.0) for batch, seconds in rows.items()}
        case "mixing":
            alone_s = min(rows.values())
            rows = {batch: seconds + alone_s * (len({*batch}) - 1) for batch, seconds in rows.items()}
        case "noise":
            rows = {batch: seconds * math.exp(generator.gauss(0, 0.3)) for batch, seconds in rows.items()}
    return TableLatency(rows)


def trace(right: TableLatency, rate: float, minutes: float, steps: int, seed: int) -> list[Request]:
    """Return Poisson arrivals of uniformly drawn resolutions, with SLOs by the right table."""
    generator, now_s, requests = random.Random(seed), 0.0, list[Request]()
    while (now_s := now_s + generator.expovariate(rate)) < 60 * minutes:
        size = resolution_of(generator.choice(right.resolutions))
        slo_s = _SLO_SCALE * steps * right.step_latency_s((size,))
        requests.append(Request(len(requests), _PROMPT, size, steps, arrival_s=now_s, slo_s=slo_s))
    return requests


def attainment(records: Sequence[RequestRecord]) -> float:
    """Return the share in time of the requests that arrived from the second minute on, or of all if none did."""
    later = [record for record in records if record.arrival_s >= 60]
    return fmean(bool(record.slo_met) for record in later or records)


def simulated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the simulator."""
    tables = published(options.model), published(options.other)
    right = table_of("right", *tables)
    for kind, rate, seed, side in cases(options):
        told = SIDES[side](MemoisedLatency(table_of(kind, *tables)))
        requests = trace(right, rate, options.minutes, options.steps, seed)
        result = simulate(
            requests,
            get_policy("slack"),
            told,
            durations=StepDurations(ProfiledSteps(MemoisedLatency(right))),
            max_batch_size=_MOST,
            standalone_s=lambda request: options.steps * right.step_latency_s((request.resolution,)),
        )
        yield row(kind, rate, seed, side, result.records, told)


def served(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the engine."""
    from patchedserve.data.workspace import Workspace
    from patchedserve.profiling.measure.latency import LatencySettings, profile_latency
    from patchedserve.serving.engine.engine import Engine
    from patchedserve.serving.engine.replay import replay
    from patchedserve.serving.models.loading import load_model

    model = load_model(options.model, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder)).for_model(model.name, "cpu")
        settings = LatencySettings(tuple(model.defaults.resolutions), options.combinations, _MOST, repeats=2)
        profiled = profile_latency(model, settings, workspace).table
    tables = profiled, published(options.other)
    right = table_of("right", *tables)
    for kind, rate, seed, side in cases(options):
        told = SIDES[side](table_of(kind, *tables))
        requests = trace(right, rate, options.minutes, options.steps, seed)
        engine = Engine(model, get_policy("slack"), predictor=told, max_batch_size=_MOST)
        alone_s = [options.steps * right.step_latency_s((request.resolution,)) for request in requests]
        result = replay(engine, list(map(model.checked, requests, alone_s)))
        yield row(kind, rate, seed, side, result.records, told)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, float, int, str]]:
    """Yield table, rate, seed and side of every run; all tables of one seed are adjacent."""
    for rate in options.rates:
        for seed in range(options.seeds):
            for kind in options.tables:
                for side in options.sides:
                    yield kind, rate, seed, side


def row(
    kind: str, rate: float, seed: int, side: str, records: Sequence[RequestRecord], told: OnlineCorrection
) -> dict[str, Any]:
    """Return the row of a run."""
    drift = told.drift()
    return {
        "table": kind,
        "side": side,
        "rate": rate,
        "seed": seed,
        "attainment": attainment(records),
        "first_error": drift.first_error,
        "last_error": drift.mean_error,
    }


def main() -> None:
    """Serve and print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--other", default="emoji-3", help="whose published table is another's")
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rates", nargs="+", type=float, default=[5.0, 7.0], help="requests per second")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", action="store_true", help="serve with the real engine")
    parser.add_argument("--combinations", type=int, default=60, help="batches of the engine's right table")
    options = parser.parse_args()
    print(json.dumps(vars(options)))
    by_case: dict[tuple[str, str, float], list[float]] = {}
    for each in (served if options.engine else simulated)(options):
        by_case.setdefault((each["table"], each["side"], each["rate"]), []).append(each["attainment"])
        print(json.dumps(each), flush=True)
    means = {case: 100 * fmean(values) for case, values in by_case.items()}
    for (kind, side, rate), mean in means.items():
        beside = means.get(("right", side, rate))
        off = None if beside is None else round(mean - beside, 1)
        print(json.dumps({"table": kind, "side": side, "rate": rate, "mean": round(mean, 1), "points_off_right": off}))


if __name__ == "__main__":
    main()
