"""A server under load of all kinds for hours; `make soak`.

    python tests/benchmarks/soak.py [--model emoji-xl] [--num-requests 10000] [--hours 2] [--output-file soak.json]

First `--num-requests` requests of 4 steps as fast as 32 clients send them, then for `--hours` hours requests of 30
steps at 80 % of the rate at which 64 of them are drawn at once. Of the clients, 5 % disconnect, 2 % send requests that
are refused, 2 % read slowly. Goals: every request gets a response; in the second half of each part the process grows by
at most 40 MB; files, threads and open requests do not grow. Exits with 1 otherwise.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.http_server import HttpServer
from patchedserve.tests.support.soak import SoakResult, soak

_STEPS, _PROBE = 30, 64
_MOST_MB, _MOST_FILES = 40.0, 4


def faults(result: SoakResult, count: int) -> list[str]:
    """Return the goals that a run misses."""
    _, half, end = result.usage
    found = []
    if sum(result.ended.values()) != count:
        found.append(f"{count - sum(result.ended.values())} requests were lost")
    if end.rss_mb - half.rss_mb > _MOST_MB:
        found.append(f"the process grew by {end.rss_mb - half.rss_mb:.0f} MB in the second half")
    if end.threads > half.threads or end.files > half.files + _MOST_FILES:
        found.append(f"threads or files grew: {half}, then {end}")
    if result.num_open:
        found.append(f"{result.num_open:g} requests are still open")
    return found


def result_json(result: SoakResult) -> dict[str, Any]:
    """Return the result as JSON values."""
    return asdict(result) | {"ended": dict(result.ended)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    sizes = ["128x128", "192x192", "256x256"]
    with (
        tempfile.TemporaryDirectory() as folder,
        HttpServer(given.model, Path(folder), "--system", "patched-fcfs", "--dtype", "auto") as server,
    ):
        process_id = server.process.pid
        burst = asyncio.run(soak(server.url, process_id, num_requests=given.num_requests, sizes=sizes))
        wrong = faults(burst, given.num_requests)
        found: dict[str, Any] = {"machine": cpu_name(), "model": given.model, "burst": result_json(burst)}
        print(json.dumps(found["burst"]), flush=True)
        if given.hours > 0:
            probe = asyncio.run(soak(server.url, process_id, num_requests=_PROBE, sizes=sizes, num_steps=_STEPS))
            rate = 0.8 * _PROBE / (probe.duration_s - 5.0)
            count = int(rate * given.hours * 3600)
            steady = asyncio.run(
                soak(
                    server.url,
                    process_id,
                    num_requests=count,
                    sizes=sizes,
                    num_steps=_STEPS,
                    at_once=10_000,
                    rate=rate,
                )
            )
            wrong += faults(steady, count)
            found |= {"rate": rate, "steady": result_json(steady)}
    found["faults"] = wrong
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
