"""Requests in time over HTTP: our server with two systems, and the server that one would write first, by turns.

    python tests/benchmarks/bench_http_slo.py [--model emoji-xl] [--rates 1,2,3,4,5,6] [--seeds 2] [--output-file FILE]

The SLO is 5 times the latency alone, which the plain server (diffusers' pipeline, one request at a time) has over HTTP.
Poisson arrivals, open loop, 30 steps. Wanted: `patchedserve` holds 95 % in time at 1.5 times the rate of `bucketed`,
and at 3 times the rate of the plain server. Nothing else may run.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from patchedserve.data.files import write_json
from patchedserve.profiling.http.load import LoadSettings, send_load
from patchedserve.profiling.http.plan import shapes_of, warm_up
from patchedserve.profiling.machine import cpu_name
from patchedserve.profiling.runs.trace_settings import TraceSettings, draw_requests
from patchedserve.profiling.sweep.held import held_rate, ratio
from patchedserve.serving.models.loading import model_defaults, resolve_model
from patchedserve.tests.support.http_server import HttpServer

_SLO_SCALE, _NUM_PROMPTS, _STEPS, _TARGET, _LOST = 5.0, 70, 30, 0.95, 0.5
_PLAIN = "fastapi + diffusers"


def plain_server(model: str, dtype: str) -> tuple[subprocess.Popen[str], str]:
    """Start it; returns its process and address."""
    script = Path(__file__).with_name("plain_server.py")
    command = [sys.executable, str(script), str(resolve_model(model)), "--port", "0", "--dtype", dtype]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(match[1] for line in process.stderr if (match := re.search(r"running on (http://\S+)", line)))
    return process, f"{url}/v1"


def means(points: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """Attainment by rate, over seeds."""
    found: dict[float, list[float]] = {}
    for point in points:
        found.setdefault(point["rate"], []).append(point["attainment"])
    return {rate: mean(each) for rate, each in found.items()}


def is_lost(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether less than half was in time at the last rate: higher ones tell nothing then."""
    return bool(points) and list(means(points).values())[-1] < _LOST


def measure(model: str, rates: list[float], num_seeds: int) -> dict[str, Any]:
    """All of it."""
    defaults = model_defaults(model)
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in ("patchedserve", "bucketed", _PLAIN)}
    with tempfile.TemporaryDirectory() as folder:
        options = ("--slo-scale", str(_SLO_SCALE), "--max-queue", "500", "--max-queue-time", "600", "--dtype", "auto")
        with (
            HttpServer(model, Path(folder), "--system", "patchedserve", *options, start_s=600) as patched,
            HttpServer(model, Path(folder), "--system", "bucketed", *options, start_s=600) as bucketed,
        ):
            [served] = httpx.get(f"{patched.url}/v1/models").json()["data"]
            process, plain_url = plain_server(model, served["dtype"])
            urls = {"patchedserve": f"{patched.url}/v1", "bucketed": f"{bucketed.url}/v1", _PLAIN: plain_url}
            trace = TraceSettings(num_prompts=_NUM_PROMPTS, num_inference_steps=_STEPS, request_rate=rates[0])
            shapes = shapes_of(draw_requests(trace, defaults))
            alone_s = warm_up(shapes, LoadSettings(plain_url), 3, None, lambda: None)
            for url in urls.values():
                warm_up(shapes, LoadSettings(url), 1, None, lambda: None)
            for rate in rates:
                asked = {name: url for name, url in urls.items() if not is_lost(points[name])}
                for seed in range(num_seeds):
                    requests = [
                        replace(each, slo_s=_SLO_SCALE * alone_s[each.resolution, each.num_inference_steps])
                        for each in draw_requests(replace(trace, request_rate=rate, seed=seed), defaults)
                    ]
                    for name, url in asked.items():
                        result = send_load(requests, LoadSettings(url))
                        met = sum(record.slo_met is True for record in result.records)
                        points[name].append(
                            {
                                "rate": rate,
                                "seed": seed,
                                "attainment": met / len(requests),
                                "codes": {str(code): count for code, count in result.codes.items()},
                                "send_lag_p99": result.send_lag_p99,
                            }
                        )
                        print(name, points[name][-1], file=sys.stderr, flush=True)
            process.kill()
            process.wait()
    held = {name: held_rate(means(found), _TARGET) for name, found in points.items()}
    own = held["patchedserve"]
    return {
        "machine": cpu_name(),
        "model": model,
        "dtype": served["dtype"],
        "slo_scale": _SLO_SCALE,
        "num_prompts": _NUM_PROMPTS,
        "num_inference_steps": _STEPS,
        "alone_s": {str(resolution): seconds for (resolution, _), seconds in alone_s.items()},
        "held": {name: asdict(rate) for name, rate in held.items()},
        "against_bucketed": ratio(own, held["bucketed"]),
        "against_plain": ratio(own, held[_PLAIN]),
        "points": points,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rates", default="1,2,3,4,5,6")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    result = measure(given.model, [float(rate) for rate in given.rates.split(",")], given.seeds)
    print(json.dumps({name: value for name, value in result.items() if name != "points"}, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
