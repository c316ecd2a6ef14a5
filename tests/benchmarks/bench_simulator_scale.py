"""Scale and overload: 100,000 simulated requests on one core, and minutes at 5 times capacity.

    python tests/benchmarks/bench_simulator_scale.py [--model emoji-xl] [--real] [--profile]

Three parts:

* `scale`: 100,000 requests under `slack`, near capacity and at twice capacity; seconds on one core (goal: below 60).
* `overload`: 5 times capacity for 10 simulated minutes under `slack`; resident memory at the start, the middle and the
  end, the longest latency of an admitted request against the longest SLO, discards by reason, waiting requests.
* `--real`: 5 times capacity for a minute on the engine (the model of --model, with its workspace's predictor).

Capacity is the number of requests per second that full batches of an equal mix finish. The simulator's step latencies
are those of --latency (a table of psctl profile latency, or a fitted predictor). Results: Markdown on stdout, and all
figures in tests/benchmarks/results/simulator-scale-MODEL.json or --output-file.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.traces import TraceConfig, assign_slos, generate_trace
from patchedserve.data.workspace import DEFAULT_WORKSPACE, Workspace
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.models.loading import model_defaults
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.runs.step_file import load_step_file
from patchedserve.serving.scheduling.policies import StepLatencyPredictor, get_policy
from patchedserve.serving.simulator.simulator import SimulationResult, simulate
from patchedserve.serving.simulator.stage_times import StageTimes, standalone_latency_s

RESULTS = Path(__file__).with_name("results")
BATCH_SIZE = 16
OVERLOAD = 5
PREPARE_S, POSTPROCESS_S = 0.005, 0.02
"""Seconds of preparing and postprocessing in the simulator."""


def resident_mb() -> float:
    """Return the resident memory of this process in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Memory:
    """Recorder of the resident memory, each time another share of the requests has ended."""

    def __init__(self, total: int, shares: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 1.0)) -> None:
        self.start_mb = resident_mb()
        self.noted_mb: dict[str, float] = {}
        self._left = [(max(1, round(share * total)), f"{share:.0%}") for share in shares]
        self._ended = 0

    def on_finish(self, record: RequestRecord) -> None:
        self._ended += 1
        while self._left and self._ended >= self._left[0][0]:
            self.noted_mb[self._left.pop(0)[1]] = resident_mb()


def capacity(latency: StepLatencyPredictor, sizes: Sequence[Resolution], num_steps: int) -> float:
    """Return the requests per second of a full batch of an equal mix."""
    batch = [sizes[index % len(sizes)] for index in range(BATCH_SIZE)]
    return BATCH_SIZE / (num_steps * latency.step_latency_s(batch))


def trace_of(
    sizes: Sequence[Resolution], num_steps: int, alone_s: Callable[[Request], float], **how: Any
) -> list[Request]:
    config = TraceConfig(resolutions=tuple(sizes), num_inference_steps=num_steps, **how)
    return assign_slos(generate_trace(config, ["a hat"]), alone_s, 5.0)


def outcome_of(records: Sequence[RequestRecord], memory: Memory) -> dict[str, Any]:
    """Return the effects of an overloaded run on its requests and on memory."""
    latencies = [record.latency_s for record in records if record.latency_s is not None]
    slos = [record.slo_s for record in records if record.slo_s is not None]
    return {
        "requests": len(records),
        "completed": len(latencies),
        "in_time": sum(record.slo_met is True for record in records),
        "discarded_by_reason": dict(Counter(record.reason for record in records if record.status == "discarded")),
        "longest_latency_s": max(latencies, default=None),
        "longest_slo_s": max(slos),
        "memory_mb": {"start": memory.start_mb, **memory.noted_mb},
    }


class Simulated:
    """Server of random traces under `slack` on the virtual clock."""

    def __init__(self, latency: StepLatencyPredictor, sizes: Sequence[Resolution], num_steps: int) -> None:
        self.latency, self.sizes, self.num_steps = latency, sizes, num_steps
        self.times = StageTimes.constant(sizes, PREPARE_S, POSTPROCESS_S)
        self._alone_s = {
            size: standalone_latency_s(Request(0, "", size, num_steps), latency, self.times) for size in sizes
        }

    def alone_s(self, request: Request) -> float:
        return self._alone_s[request.resolution]

    def trace(self, load: float, **how: Any) -> list[Request]:
        rate = load * capacity(self.latency, self.sizes, self.num_steps)
        return trace_of(self.sizes, self.num_steps, self.alone_s, request_rate=rate, **how)

    def serve(self, requests: Sequence[Request], **how: Any) -> SimulationResult:
        return simulate(
            requests,
            get_policy("slack"),
            self.latency,
            max_batch_size=BATCH_SIZE,
            times=self.times,
            standalone_s=self.alone_s,
            **how,
        )


def run_scale(simulated: Simulated, num: int) -> list[dict[str, Any]]:
    rows = []
    for load in (0.8, 2.0):
        requests = simulated.trace(load, num_prompts=num)
        start = time.process_time()
        result = simulated.serve(requests)
        rows.append(
            {
                "load": load,
                "requests": num,
                "seconds": time.process_time() - start,
                "attainment": sum(record.slo_met is True for record in result.records) / num,
                "steps": result.num_steps,
                "simulated_s": result.duration_s,
            }
        )
    return rows


def run_overload(simulated: Simulated, minutes: float) -> dict[str, Any]:
    requests = simulated.trace(OVERLOAD, duration_s=60 * minutes, num_prompts=None)
    memory = Memory(len(requests))
    result = simulated.serve(requests, keep_steps=True, on_finish=memory.on_finish)
    return outcome_of(result.records, memory) | {
        "request_rate": len(requests) / (60 * minutes),
        "most_waiting": max((row.waiting for row in result.steps), default=0),
        "most_prepared": result.max_prepared,
    }


def run_real(options: argparse.Namespace, sizes: Sequence[Resolution], steps: int) -> dict[str, Any]:
    """Measure overload on the engine: the same policy, real latencies, real memory."""
    from patchedserve.serving.engine.engine import Engine
    from patchedserve.serving.engine.replay import replay
    from patchedserve.serving.models.loading import load_model
    from patchedserve.serving.runs.machine import run_facts
    from patchedserve.serving.runs.standalone import shape_of, standalone_latencies
    from patchedserve.training.latency.online_correction import OnlineCorrection
    from patchedserve.training.latency.predictor import load_workspace_predictor

    model = load_model(options.model, options.device, os.environ.get("PSCTL_DTYPE", "auto"))
    workspace = Workspace(options.workspace).for_model(options.model, str(model.device))
    predictor = load_workspace_predictor(workspace, expect=run_facts(model))
    model.tune(sizes, workspace.tables)
    scale = model.defaults.guidance_scale
    examples = [Request(index, "a hat", size, steps, guidance_scale=scale) for index, size in enumerate(sizes)]
    alone = standalone_latencies(model, examples, workspace.tables)
    rate = OVERLOAD * capacity(predictor, sizes, steps)

    def alone_s(request: Request) -> float:
        return alone[shape_of(model, request)]

    def serve(how: dict[str, Any]) -> dict[str, Any]:
        requests = trace_of(sizes, steps, alone_s, guidance_scale=scale, **how)
        memory = Memory(len(requests))
        correction = OnlineCorrection(predictor)
        engine = Engine(
            model,
            get_policy("slack"),
            predictor=correction,
            max_batch_size=BATCH_SIZE,
            on_finish=memory.on_finish,
        )
        result = replay(engine, [model.checked(request, alone_s(request)) for request in requests])
        return outcome_of(result.records, memory) | {
            "request_rate": rate,
            "most_waiting": max((row.waiting for row in result.steps), default=0),
            "most_prepared": result.max_prepared,
            "predictor_scale": correction.scale,
        }

    # The buffers of full batches exist before memory is measured.
    serve({"request_rate": rate, "num_prompts": 2 * BATCH_SIZE})
    return serve({"request_rate": rate, "duration_s": 60 * options.real_minutes, "num_prompts": None})


def print_overload(title: str, found: dict[str, Any]) -> None:
    memory = ", ".join(f"{name} {mb:.0f}" for name, mb in found["memory_mb"].items())
    reasons = "; ".join(f"{count} because {reason}" for reason, count in found["discarded_by_reason"].items())
    print(f"\n{title}, {found['request_rate']:.3g} requests/s:")
    print(f"- {found['requests']} requests, {found['completed']} completed, {found['in_time']} in time")
    print(f"- discarded: {reasons or 'none'}")
    longest_s, slo_s = found["longest_latency_s"], found["longest_slo_s"]
    print(f"- longest latency of a completed request {longest_s:.2f} s, longest SLO {slo_s:.2f} s")
    print(f"- at most {found['most_waiting']} waited, {found['most_prepared']} were prepared")
    print(f"- resident memory in MB by share of requests ended: {memory}")


def table_of(options: argparse.Namespace) -> Path:
    """Return the table of step latencies: the given one, else the workspace's newest, else a small one measured now."""
    if options.latency is not None:
        return options.latency
    from patchedserve.profiling.measure.latency import LatencySettings, profile_latency
    from patchedserve.serving.models.loading import load_model

    model = load_model(options.model, options.device, os.environ.get("PSCTL_DTYPE", "auto"))
    workspace = Workspace(options.workspace).for_model(options.model, str(model.device))
    found = workspace.newest_table("latency-*.parquet")
    if found is None:
        print("Measuring a table of step latencies ...", file=sys.stderr)
        settings = LatencySettings(model.defaults.resolutions, combinations=24, repeats=1)
        found = profile_latency(model, settings, workspace).table_file
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workspace", type=Path, default=Path(DEFAULT_WORKSPACE))
    parser.add_argument("--latency", type=Path, help="default: the newest table of the workspace")
    parser.add_argument("--num-prompts", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--real", action="store_true", help="overload the engine, too")
    parser.add_argument("--real-minutes", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="show where the simulator's time goes")
    parser.add_argument("--output-file", type=Path, help="write the figures as JSON here instead")
    options = parser.parse_args()
    defaults = model_defaults(options.model)
    steps = options.steps or defaults.num_inference_steps
    path = table_of(options)
    simulated = Simulated(load_step_file(path).steady, defaults.resolutions, steps)
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(run_scale, simulated, options.num_prompts)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
        return
    scale = run_scale(simulated, options.num_prompts)
    print(f"{options.model}, {steps} steps, latencies of {path.name}, one core of {cpu_name()}\n")
    print("| load | requests | seconds on one core | attainment | simulated |")
    print("|---|---|---|---|---|")
    for row in scale:
        cells = (f"{row['load']:g} x capacity", row["requests"], f"{row['seconds']:.1f}")
        print(
            "|", *(f"{cell} |" for cell in (*cells, f"{row['attainment']:.1%}", f"{row['simulated_s'] / 60:.0f} min"))
        )
    found: dict[str, Any] = {
        "machine": cpu_name(),
        "options": {k: str(v) for k, v in vars(options).items() if k != "output_file"},
        "scale": scale,
    }
    found["overload"] = run_overload(simulated, options.minutes)
    print_overload(f"Simulated overload, {OVERLOAD} times capacity for {options.minutes:g} minutes", found["overload"])
    if options.real:
        found["real"] = run_real(options, defaults.resolutions, steps)
        print_overload(
            f"Overload on the engine, {OVERLOAD} times capacity for {options.real_minutes:g} minutes", found["real"]
        )
    target = options.output_file or RESULTS / f"simulator-scale-{options.model}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
