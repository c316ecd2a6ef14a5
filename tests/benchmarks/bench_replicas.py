"""A burst of mixed requests on two replicas of one core each, beside the simulator's two GPUs.

    python tests/benchmarks/bench_replicas.py [--model emoji-xl] [--num-prompts 200] [--output-file FILE]

The simulator knows steps by a table that was profiled on one core (`psctl profile latency --quick`), and stages by the
replicas' own records. Nothing else may run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from patchedserve.data.files import write_json
from patchedserve.data.traces.files import save_trace
from patchedserve.profiling.http.load import LoadSettings, send_load
from patchedserve.profiling.machine import cpu_name
from patchedserve.profiling.runs.trace_settings import TraceSettings, draw_requests
from patchedserve.serving.models.loading import model_defaults
from patchedserve.tests.support.http_server import HttpServer

_STEPS = 10
_PROBES = 6


def stages_of(url: str, body: dict[str, Any]) -> dict[str, float]:
    """Milliseconds that a replica prepares and decodes, on the mean of some requests."""
    found = [
        httpx.post(f"{url}/v1/images/generations", json=body, timeout=60).json()["metrics"] for _ in range(_PROBES)
    ]
    return {name: 1e3 * mean(each[name] for each in found) for name in ("prepare_s", "decode_s")}


def measure(model: str, num_prompts: int, folder: Path) -> dict[str, Any]:
    """Both sides."""
    psctl = str(Path(sys.executable).parent / "psctl")
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    where = ("--workspace", str(folder), "--model", model)
    subprocess.run([psctl, "profile", "latency", "--quick", *where], check=True, env=one_core)
    trace = TraceSettings(num_prompts=num_prompts, num_inference_steps=_STEPS, request_rate=float("inf"))
    requests = draw_requests(trace, model_defaults(model))
    save_trace(folder / "burst.jsonl", requests)
    options = ("--num-replicas", "2", "--system", "patched-fcfs", "--cache", "off", "--dtype", "auto")
    options += ("--max-queue", str(2 * num_prompts), "--max-queue-time", "3600")
    with HttpServer(model, folder, *options, start_s=600) as server:
        body = {"prompt": "a lamp", "num_inference_steps": _STEPS}
        stages = stages_of(server.url, body)
        result = send_load(requests, LoadSettings(f"{server.url}/v1"))
        assert server.stop() == 0
    asked = [psctl, "simulate", "--trace", str(folder / "burst.jsonl"), "--gpus", "2", "--system", "patched-fcfs"]
    asked += ["--prepare-ms", str(stages["prepare_s"]), "--postprocess-ms", str(stages["decode_s"]), "--json", *where]
    simulated = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    latencies = [record.latency_s for record in result.records if record.latency_s is not None]
    real = {"duration": result.duration_s, "latency_mean": mean(latencies), "completed_requests": len(latencies)}
    return {
        "machine": cpu_name(),
        "model": model,
        "num_prompts": num_prompts,
        "num_inference_steps": _STEPS,
        "codes": {str(code): count for code, count in result.codes.items()},
        "real": real,
        "simulated": {name: simulated[name] for name in real},
        "ratio": {name: simulated[name] / real[name] for name in ("duration", "latency_mean")},
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.model, given.num_prompts, Path(folder))
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
