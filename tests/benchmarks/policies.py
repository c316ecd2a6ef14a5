"""Policies on the same traces in the simulator: share of requests in time, in total and for the worst resolution.

Traces are Poisson, bursty (gamma, coefficient of variation 2.5), diurnal, recorded arrivals (`--arrivals`, Azure's LLM
traces in vidur's format) and "mixed work": the shares and steps of Dataset C in vllm-omni's performance dashboard, with
its two largest sizes as the largest of the table, and SLOs of 3 times the standalone latency. Loads are shares of the
throughput of continuous batching with a constant queue. Step times are those of a table; `--calibration`, of
`psctl bench slo --on both`, adds the overheads of a real engine. Each output line is a run.

    python tests/benchmarks/policies.py --model emoji-xl --calibration calibration.json --output-file runs.jsonl
    python tests/benchmarks/policies.py --summary runs.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution, parse
from patchedserve.data.tables.latency import read_latencies
from patchedserve.data.tables.published import published_table
from patchedserve.data.traces.recordings import read_recording
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.data.traces.workloads import DATASET_C
from patchedserve.serving.runs.simulated.calibration import Calibration
from patchedserve.serving.runs.simulated.deployment import SimulatedDeployment, SimulatedEngine
from patchedserve.serving.runs.simulated.files import calibration_of
from patchedserve.serving.runs.step_file import step_sources
from patchedserve.serving.scheduling.policies import POLICY_NAMES
from patchedserve.serving.scheduling.step_latency import TableLatency
from patchedserve.serving.scheduling.systems import SYSTEMS
from patchedserve.serving.simulator.step_durations import ProfiledSteps
from patchedserve.training.cache.schedule import CacheSchedule

KINDS = ("poisson", "bursty", "diurnal", "recorded", "mixed-work")
_PROMPT = "a hat on a green background"


@dataclass(frozen=True)
class Machine:
    """The simulated machine; `arrivals_s` are recorded arrivals, `capacity_qps` is by kind of trace."""

    name: str
    engine: SimulatedEngine
    resolutions: tuple[Resolution, ...]
    steps: int
    arrivals_s: tuple[float, ...]
    capacity_qps: dict[str, float]


def steps_of(path: Path) -> tuple[ProfiledSteps, tuple[Resolution, ...]]:
    """Return the steps of a table, or of a result of `psctl bench steps --json`, and their resolutions."""
    if path.suffix != ".json":
        steady, first = step_sources(read_latencies(path))
    else:
        rows = json.loads(path.read_text())["rows"]
        counts = [row["combination"].items() for row in rows]
        batches = [tuple(parse(size) for size, count in each for _ in range(count)) for each in counts]
        steady, first = (
            TableLatency({batch: row[name] / 1e3 for batch, row in zip(batches, rows, strict=True)})
            for name in ("patched_ms", "patched_repack_ms")
        )
    sizes = tuple(size for size in steady.resolutions if isinstance(size, Resolution))
    return ProfiledSteps(steady, first), sizes


def trace(machine: Machine, kind: str, rate: float, seed: int, count: int) -> list[Request]:
    """Return a trace of one of `KINDS`."""
    given: dict[str, Any] = {"request_rate": rate, "num_prompts": count, "seed": seed}
    given |= {"resolutions": machine.resolutions, "num_inference_steps": machine.steps}
    match kind:
        case "bursty":
            config = TraceConfig("gamma", cv=2.5, **given)
        case "diurnal":
            config = TraceConfig("diurnal", period_s=count / rate / 2, **given)
        case "recorded":
            first = seed * count % max(1, len(machine.arrivals_s) - count)
            config = TraceConfig("recorded", arrivals_s=machine.arrivals_s[first : first + count], **given)
        case _:
            config = TraceConfig("poisson", **given)
    requests = generate_trace(config, [_PROMPT])
    if kind != "mixed-work":
        return requests
    rng = np.random.default_rng(seed)
    sizes = [*machine.resolutions, machine.resolutions[-1]]
    drawn = rng.choice(len(sizes), len(requests), p=DATASET_C.weights)
    return [
        replace(request, resolution=sizes[which], num_inference_steps=DATASET_C.steps[which])
        for request, which in zip(requests, drawn, strict=True)
    ]


def run(machine: Machine, policy: str, kind: str, load: float, seed: int, count: int) -> str:
    """Simulate a trace; return its line."""
    requests = trace(machine, kind, load * machine.capacity_qps[kind], seed, count)
    system = SYSTEMS["patched-slack"].overridden(policy=policy)
    scale = 3.0 if kind == "mixed-work" else 5.0
    records = SimulatedDeployment(system, machine.engine, slo_scale=scale).run(requests)[1].records
    by_size = {
        str(size): round(fmean(bool(record.slo_met) for record in records if record.resolution == size), 3)
        for size in machine.resolutions
    }
    row = {
        "machine": machine.name,
        "kind": kind,
        "load": load,
        "seed": seed,
        "policy": policy,
        "attainment": round(fmean(bool(record.slo_met) for record in records), 4),
        "by_resolution": by_size,
        "discarded": sum(record.status == "discarded" for record in records),
        "requests": len(records),
    }
    return json.dumps(row)


def machine_of(options: argparse.Namespace) -> Machine:
    """Return the machine that the options describe."""
    path = options.table or published_table(options.model)
    if path is None:
        raise SystemExit(f"psctl brings no table of {options.model}: give --table")
    steps, sizes = steps_of(path)
    calibration = None if options.calibration is None else calibration_of(options.calibration, "patched")
    if calibration is None and options.stage_ms is not None:
        prepare_ms, *decode_ms = options.stage_ms
        calibration = Calibration(
            {str(size): prepare_ms / 1e3 for size in sizes},
            {str(size): each / 1e3 for size, each in zip(sizes, decode_ms, strict=True)},
            is_inline=True,
        )
    engine = SimulatedEngine.of(steps, calibration)
    if options.schedule is not None:
        engine = replace(engine, schedule=CacheSchedule.load(options.schedule))
    arrivals_s = () if options.arrivals is None else read_recording("azure", options.arrivals).arrivals_s
    machine = Machine(options.name or options.model, engine, sizes, options.steps, arrivals_s, {})
    for kind in options.kinds:
        requests = trace(machine, kind, 1.0, 0, 200)
        machine.capacity_qps[kind] = engine.capacity(SYSTEMS["patched-fcfs"].overridden(cache="off"), requests, 16)
    return machine


def summary(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table for each machine: attainment by policy and load, and that of the worst resolution."""
    rows = [json.loads(line) for line in lines]
    for name in dict.fromkeys(row["machine"] for row in rows):
        mine = [row for row in rows if row["machine"] == name]
        loads, policies = (list(dict.fromkeys(row[key] for row in mine)) for key in ("load", "policy"))
        num_traces = len({(row["kind"], row["load"], row["seed"]) for row in mine})
        yield f"{name}: % in time (of the worst resolution), {num_traces} traces"
        yield f"{'policy':18}" + "".join(f"{load:>14g}" for load in loads)
        for policy in policies:
            yield f"{policy:18}" + "".join(f"{cell(mine, policy, load):>14}" for load in loads)
        for kind in dict.fromkeys(row["kind"] for row in mine):
            yield f"{kind}"
            of_kind = [row for row in mine if row["kind"] == kind]
            for policy in policies:
                yield f"  {policy:16}" + "".join(f"{cell(of_kind, policy, load):>14}" for load in loads)
        first, second = policies[-1], "slack"
        if second in policies and first != second:
            yield f"{first} - {second}, points, 95 % over traces"
            yield " " * 18 + "".join(f"{paired(mine, first, second, load):>14}" for load in loads)


def cell(rows: Sequence[dict[str, Any]], policy: str, load: float) -> str:
    """Return the attainment and that of the worst resolution, over all traces together."""
    mine = [row for row in rows if row["policy"] == policy and row["load"] == load]
    worst = min(fmean(row["by_resolution"][size] for row in mine) for size in mine[0]["by_resolution"])
    return f"{100 * fmean(row['attainment'] for row in mine):.0f} ({100 * worst:.0f})"


def paired(rows: Sequence[dict[str, Any]], first: str, second: str, load: float) -> str:
    """Return the mean difference of two policies on the same traces, with its interval."""
    by_policy = [
        {(row["kind"], row["seed"]): row["attainment"] for row in rows if row["policy"] == name and row["load"] == load}
        for name in (first, second)
    ]
    off = 100 * np.array([by_policy[0][key] - by_policy[1][key] for key in by_policy[0]])
    half = stats.t.ppf(0.975, len(off) - 1) * off.std(ddof=1) / len(off) ** 0.5
    return f"{off.mean():+.1f}+-{half:.1f}"


def main() -> None:
    """Run, or print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--name", help="of the machine in the rows; default: the model")
    parser.add_argument("--table", type=Path, help="step latencies; default: the model's table in the box")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--stage-ms", type=float, nargs="+", help="without --calibration: prepare, then decode by size")
    parser.add_argument("--schedule", type=Path, help="cache-schedule.json, to serve with it")
    parser.add_argument("--policies", nargs="+", default=list(POLICY_NAMES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.3, 2.0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--arrivals", type=Path, help="CSV of recorded arrivals; without it that kind is left out")
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--summary", type=Path, nargs="+")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary([line for path in options.summary for line in path.read_text().splitlines()])))
        return
    if options.arrivals is None:
        options.kinds = [kind for kind in options.kinds if kind != "recorded"]
    machine = machine_of(options)
    print(machine.name, {kind: round(rate, 3) for kind, rate in machine.capacity_qps.items()}, file=sys.stderr)
    cases = list(product(options.kinds, options.loads, range(options.seeds), options.policies))
    lines: list[str] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        given = [(machine, policy, *case, options.num_prompts) for *case, policy in cases]
        for line in pool.map(run, *zip(*given, strict=True), chunksize=4):
            lines.append(line)
            if sys.stderr.isatty():
                print(f"\r{len(lines)} of {len(cases)}", end="", file=sys.stderr)
    if options.output_file is not None:
        options.output_file.write_text("\n".join(lines) + "\n")
    print("\n".join(summary(lines)))


if __name__ == "__main__":
    main()
