"""Requests in time over HTTP: servers take turns with the same requests.

    python tests/benchmarks/bench_http_slo.py [systems] [--model emoji-xl] [--rates 1,2,3,4,5,6] [--output-file FILE]
    python tests/benchmarks/bench_http_slo.py ranks --resolutions 256,512 --num-inference-steps 10 --rates 0.25,0.5,1

`systems`: our server with two systems, and a minimal server (diffusers' pipeline, one request at a time). Goal:
`patchedserve` holds 95 % in time at 1.5 times the rate of `bucketed`, and at 3 times that of the minimal server.
`ranks`: two ranks of half of the machine's threads each that draw every image in strips; two replicas; and ranks that
choose the images that they draw in strips. Goal: the last holds the rate of both others. The SLO is 5 times the latency
of a request alone on the minimal server over HTTP. Poisson arrivals, open loop. Nothing else may run.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from patchedserve.data.files import write_json
from patchedserve.profiling.http.load import LoadSettings, send_load
from patchedserve.profiling.http.plan import shapes_of, warm_up
from patchedserve.profiling.sweep.held import ratio, sustained_rate
from patchedserve.serving.models.loading import model_defaults, resolve_model
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.runs.trace_requests import draw_requests
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.tests.support.http_server import HttpServer

_SLO_SCALE, _TARGET, _LOST = 5.0, 0.95, 0.5
_PLAIN = "fastapi + diffusers"
_SERVERS: dict[str, dict[str, tuple[str, ...]]] = {
    "systems": {"patchedserve": ("--system", "patchedserve"), "bucketed": ("--system", "bucketed")},
    "ranks": {
        "strips": ("--engine", "parallel", "--policy", "continuous", "--parallel", "2"),
        "replicas": ("--system", "patched-fcfs", "--cache", "off", "--num-replicas", "2"),
        "both": ("--engine", "parallel", "--policy", "continuous", "--parallel", "2", "--parallel-from", "auto"),
    },
}


def plain_server(model: str, dtype: str) -> tuple[subprocess.Popen[str], str]:
    """Start the minimal server; return its process and address."""
    script = Path(__file__).with_name("plain_server.py")
    command = [sys.executable, str(script), str(resolve_model(model)), "--port", "0", "--dtype", dtype]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(match[1] for line in process.stderr if (match := re.search(r"running on (http://\S+)", line)))
    return process, f"{url}/v1"


def means(points: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """Return the mean attainment over seeds by rate."""
    found: dict[float, list[float]] = {}
    for point in points:
        found.setdefault(point["rate"], []).append(point["attainment"])
    return {rate: mean(each) for rate, each in found.items()}


def is_lost(points: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether less than half was in time at the last rate, so that higher rates add no information."""
    return bool(points) and list(means(points).values())[-1] < _LOST


def measure(what: str, model: str, trace: TraceSettings, rates: list[float], num_seeds: int) -> dict[str, Any]:
    """Run all measurements and return the result."""
    servers, defaults = _SERVERS[what], model_defaults(model)
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    options = ["--slo-scale", str(_SLO_SCALE), "--max-queue", "500", "--max-queue-time", "600", "--dtype", "auto"]
    if trace.resolutions is not None:
        options += ["--resolutions", trace.resolutions]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        urls = {
            name: f"{stack.enter_context(HttpServer(model, Path(folder), *own, *options, start_s=600)).url}/v1"
            for name, own in servers.items()
        }
        [served] = httpx.get(f"{next(iter(urls.values()))}/models").json()["data"]
        process, plain_url = plain_server(model, served["dtype"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        shapes = shapes_of(draw_requests(trace, defaults))
        alone_s = warm_up(shapes, LoadSettings(plain_url), 3, None, lambda: None)
        if what == "systems":
            urls[_PLAIN], points[_PLAIN] = plain_url, []
        for url in urls.values():
            warm_up(shapes, LoadSettings(url), 1, None, lambda: None)
        for rate, seed in product(rates, range(num_seeds)):
            if seed == 0:
                asked = {name: url for name, url in urls.items() if not is_lost(points[name])}
            requests = [
                replace(each, slo_s=_SLO_SCALE * alone_s[each.resolution, each.num_inference_steps])
                for each in draw_requests(replace(trace, request_rate=rate, seed=seed), defaults)
            ]
            for name, url in asked.items():
                result = send_load(requests, LoadSettings(url))
                points[name].append(
                    {
                        "rate": rate,
                        "seed": seed,
                        "attainment": mean(record.slo_met is True for record in result.records),
                        "latency_mean_s": mean(each.latency_s for each in result.records if each.latency_s is not None),
                        "codes": {str(code): count for code, count in result.codes.items()},
                        "send_lag_p99": result.send_lag_p99,
                    }
                )
                print(name, points[name][-1], file=sys.stderr, flush=True)
    held = {name: sustained_rate(means(found), _TARGET) for name, found in points.items()}
    own = "patchedserve" if what == "systems" else "both"
    return {
        "machine": cpu_name(),
        "model": model,
        "dtype": served["dtype"],
        "slo_scale": _SLO_SCALE,
        "num_prompts": trace.num_prompts,
        "num_inference_steps": trace.num_inference_steps,
        "alone_s": {str(resolution): seconds for (resolution, _), seconds in alone_s.items()},
        "held": {name: asdict(rate) for name, rate in held.items()},
        "against": {name: ratio(held[own], each) for name, each in held.items() if name != own},
        "points": points,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=list(_SERVERS), nargs="?", default="systems")
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rates", default="1,2,3,4,5,6")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=70)
    parser.add_argument("--num-inference-steps", type=int, default=30)
    parser.add_argument("--resolutions")
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    rates = [float(rate) for rate in given.rates.split(",")]
    trace = TraceSettings(
        num_prompts=given.num_prompts,
        num_inference_steps=given.num_inference_steps,
        resolutions=given.resolutions,
        request_rate=rates[0],
    )
    result = measure(given.what, given.model, trace, rates, given.seeds)
    print(json.dumps({name: value for name, value in result.items() if name != "points"}, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
