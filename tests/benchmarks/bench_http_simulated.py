"""Load over HTTP compared with the simulator: requests in time below saturation, and a burst on two replicas.

    python tests/benchmarks/bench_http_simulated.py attainment [--rates 1,2,3,4,5] [--num-prompts 100]
    python tests/benchmarks/bench_http_simulated.py replicas [--num-prompts 200]

Both accept `--model` and `--output-file`. The simulator's inputs are measured first, with as many cores as an engine
has, in one process and without HTTP (`psctl bench slo --on both`): steps, stages, and how these slow each other down.
For two replicas, two processes measure at once: cores of a CPU share caches, memory and sometimes more, which GPUs do
not. The raw result of the burst includes the processor time by process (Linux only). Goals: the share of requests in
time within 5 points; a burst as long as on the simulator's two GPUs. Nothing else may run.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.traces.files import save_trace
from patchedserve.profiling.http.load import LoadResult, LoadSettings, send_load
from patchedserve.profiling.http.plan import shapes_of, warm_up
from patchedserve.serving.models.loading import model_defaults
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.runs.trace_requests import draw_requests
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.tests.support.http_server import HttpServer

_PSCTL = str(Path(sys.executable).parent / "psctl")
_SYSTEM = "patched-fcfs"
_SERVER = ("--system", _SYSTEM, "--cache", "off", "--dtype", "auto", "--max-queue", "1000", "--max-queue-time", "3600")
_SLO_SCALE = 5.0
_ATTAINMENT_STEPS, _REPLICA_STEPS = 30, 10
_REPLICA_RATE = 0.5
_CALIBRATED = 30
"""Requests that the engine serves first to calibrate the simulator."""


def calibrate(model: str, folders: Sequence[Path], cores: int | None, rate: float) -> None:
    """Measure the engine on `cores` cores at a rate, once for each workspace and all at the same time, and keep the
    simulator's inputs in the workspaces.
    """
    env = dict(os.environ) if cores is None else {**os.environ, "OMP_NUM_THREADS": str(cores)}
    command = [_PSCTL, "bench", "slo", "--on", "both", "--systems", _SYSTEM, "--rates", str(rate)]
    command += ["--num-prompts", str(_CALIBRATED), "--cache", "off", "--model", model]
    running = [subprocess.Popen([*command, "--workspace", str(folder)], env=env) for folder in folders]
    failed = [each.returncode for each in running if each.wait() != 0]
    if failed:
        raise SystemExit(f"psctl bench slo ended with {failed[0]}")


def simulated(requests: Sequence[Request], model: str, folder: Path, num_gpus: int) -> dict[str, Any]:
    """Return the summary of `psctl simulate` for the same requests."""
    save_trace(folder / "trace.jsonl", requests)
    command = [_PSCTL, "simulate", "--trace", str(folder / "trace.jsonl"), "--gpus", str(num_gpus), "--json"]
    # The simulator has no cache unless a calibration with one is given.
    command += ["--system", _SYSTEM, "--workspace", str(folder), "--model", model]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def summary_of(result: LoadResult) -> dict[str, float]:
    """Return the figures of the real side that the simulator's summary has, too."""
    latencies = [record.latency_s for record in result.records if record.latency_s is not None]
    met = mean(record.slo_met is True for record in result.records)
    return {
        "duration": result.duration_s,
        "latency_mean": mean(latencies),
        "completed_requests": len(latencies),
        "slo_attainment_rate": met,
    }


def attainment(model: str, rates: Sequence[float], num_prompts: int, folder: Path) -> dict[str, Any]:
    """Compare the requests in time by rate."""
    calibrate(model, [folder], None, mean(rates))
    defaults = model_defaults(model)
    points = []
    with HttpServer(model, folder, *_SERVER, start_s=600) as server:
        settings = LoadSettings(f"{server.url}/v1")
        trace = TraceSettings(num_prompts=num_prompts, num_inference_steps=_ATTAINMENT_STEPS, request_rate=rates[0])
        alone_s = warm_up(shapes_of(draw_requests(trace, defaults)), settings, 3, None, lambda: None)
        for rate in rates:
            requests = [
                replace(each, slo_s=_SLO_SCALE * alone_s[each.resolution, each.num_inference_steps])
                for each in draw_requests(replace(trace, request_rate=rate), defaults)
            ]
            result = send_load(requests, settings)
            real = summary_of(result)
            found = simulated(requests, model, folder, 1)
            points.append({
                "rate": rate,
                "real": real,
                "simulated": {name: found[name] for name in real},
                "points_apart": 100 * (found["slo_attainment_rate"] - real["slo_attainment_rate"]),
                "send_lag_p99": result.send_lag_p99,
            })  # fmt: skip
            print(points[-1], file=sys.stderr, flush=True)
        assert server.stop() == 0
    alone = {str(resolution): seconds for (resolution, _), seconds in alone_s.items()}
    return {"slo_scale": _SLO_SCALE, "alone_s": alone, "points": points}


def cpu_s() -> dict[int, tuple[str, float]]:
    """Return the role and the processor time of each process by its id, from /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_text()
            times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            who = "replicas" if "ServeReplica" in line else "server" if "psctl" in line else "others"
            found[int(folder.name)] = (who, sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
    return found


def replicas(model: str, num_prompts: int, folder: Path) -> dict[str, Any]:
    """Compare a burst on two replicas of one core each with two simulated GPUs."""
    folders = [folder / "first", folder / "second"]
    calibrate(model, folders, 1, _REPLICA_RATE)
    trace = TraceSettings(num_prompts=num_prompts, num_inference_steps=_REPLICA_STEPS, request_rate=float("inf"))
    requests = draw_requests(trace, model_defaults(model))
    with HttpServer(model, folder, "--num-replicas", "2", *_SERVER, start_s=600) as server:
        before = cpu_s()
        result = send_load(requests, LoadSettings(f"{server.url}/v1"))
        took_s = defaultdict[str, float](float)
        for number, (who, seconds) in cpu_s().items():
            took_s[who] += seconds - before.get(number, (who, 0.0))[1]
        assert server.stop() == 0
    real = summary_of(result)
    del real["slo_attainment_rate"]
    found = simulated(requests, model, folders[0], 2)
    return {
        "codes": {str(code): count for code, count in result.codes.items()},
        "cpu_s": dict(took_s),
        "real": real,
        "simulated": {name: found[name] for name in real},
        "ratio": {name: found[name] / real[name] for name in ("duration", "latency_mean")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attainment", "replicas"])
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rates", default="1,2,3,4,5", help="requests a second, between commas")
    parser.add_argument("--num-prompts", type=int, help="default: 100 a rate, 200 of the burst")
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "attainment":
            rates = [float(rate) for rate in given.rates.split(",")]
            found = attainment(given.model, rates, given.num_prompts or 100, Path(folder))
        else:
            found = replicas(given.model, given.num_prompts or 200, Path(folder))
    result = {"machine": cpu_name(), "model": given.model, "num_prompts": given.num_prompts, **found}
    print(json.dumps(result, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)


if __name__ == "__main__":
    main()
