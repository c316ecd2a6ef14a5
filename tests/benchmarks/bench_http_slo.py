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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.profiling.http.load import LoadSettings, send_load
from patchedserve.profiling.http.plan import shapes_of, warm_up
from patchedserve.profiling.machine import cpu_name
from patchedserve.profiling.runs.trace_settings import TraceSettings, draw_requests
from patchedserve.profiling.sweep.held import held_rate, ratio
from patchedserve.serving.models.loading import model_defaults, resolve_model
from patchedserve.tests.support.http_server import HttpServer

_SLO_SCALE, _NUM_PROMPTS, _STEPS, _TARGET = 5.0, 70, 30, 0.95
_PLAIN = "fastapi + diffusers"


def plain_server(model: str) -> tuple[subprocess.Popen[str], str]:
    """Start it; returns its process and address."""
    script = Path(__file__).with_name("plain_server.py")
    command = [sys.executable, str(script), str(resolve_model(model)), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(match[1] for line in process.stderr if (match := re.search(r"running on (http://\S+)", line)))
    return process, f"{url}/v1"


def measure(model: str, rates: list[float], num_seeds: int) -> dict[str, Any]:
    """All of it."""
    defaults = model_defaults(model)
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in ("patchedserve", "bucketed", _PLAIN)}
    with tempfile.TemporaryDirectory() as folder:
        options = ("--slo-scale", str(_SLO_SCALE), "--max-queue", "500", "--max-queue-time", "600", "--dtype", "auto")
        process, plain_url = plain_server(model)
        with (
            HttpServer(model, Path(folder), "--system", "patchedserve", *options, start_s=600) as patched,
            HttpServer(model, Path(folder), "--system", "bucketed", *options, start_s=600) as bucketed,
        ):
            urls = {"patchedserve": f"{patched.url}/v1", "bucketed": f"{bucketed.url}/v1", _PLAIN: plain_url}
            trace = TraceSettings(num_prompts=_NUM_PROMPTS, num_inference_steps=_STEPS, request_rate=rates[0])
            shapes = shapes_of(draw_requests(trace, defaults))
            alone_s = warm_up(shapes, LoadSettings(plain_url), 3, None, lambda: None)
            for url in urls.values():
                warm_up(shapes, LoadSettings(url), 1, None, lambda: None)
            for rate in rates:
                for seed in range(num_seeds):
                    requests = [
                        replace(each, slo_s=_SLO_SCALE * alone_s[each.resolution, each.num_inference_steps])
                        for each in draw_requests(replace(trace, request_rate=rate, seed=seed), defaults)
                    ]
                    for name, url in urls.items():
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
    held = {}
    for name, found in points.items():
        mean = {rate: sum(p["attainment"] for p in found if p["rate"] == rate) / num_seeds for rate in rates}
        held[name] = held_rate(mean, _TARGET)
    own = held["patchedserve"]
    return {
        "machine": cpu_name(),
        "model": model,
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
