"""Reliability when processes are killed: batches drawn by a process that is killed at random, and killed replicas.

    python tests/benchmarks/kill_http.py batch [--kills 30] [--lines 200] [--model emoji-xl]
    python tests/benchmarks/kill_http.py replicas [--kills 20] [--model emoji-xl]

Goals: every line of the batch is drawn once, and its file is whole; with 2 replicas under load, one of which is killed
repeatedly, every response is 200, none is lost or duplicated, and there are two replicas again within 30 s. Exits with
1 otherwise.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from patchedserve.data.files import write_json
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.http_server import HttpServer
from patchedserve.tests.support.killed_batch import draw_and_kill

_SIZES = ("128x128", "192x192", "256x256")
_STEPS = 8


def body_of(number: int) -> dict[str, Any]:
    """Return the body of a small request."""
    size = _SIZES[number % len(_SIZES)]
    return {"prompt": f"lamp {number}", "size": size, "seed": number, "num_inference_steps": _STEPS}


def batch(model: str, kills: int, num_lines: int, folder: Path) -> dict[str, Any]:
    """Draw a file in a process that is killed repeatedly, then to its end."""
    lines = [json.dumps({"custom_id": str(number), "body": body_of(number)}) for number in range(num_lines)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    found = draw_and_kill(folder / "lines.jsonl", folder / "drawn", model, kills)
    return {
        "kills": kills,
        "lines": num_lines,
        "lines_done_at_kills": found.done_at_kills,
        "missing": num_lines - len(found.names),
        "doubled": sum(count > 1 for count in found.names.values()),
        "broken": found.num_broken,
    }


async def _under_load(server: HttpServer, kills: int) -> dict[str, Any]:
    draws, codes, reasons, again_s, wrong = random.Random(0), Counter[int](), Counter[str](), [], 0
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(first: int) -> None:
            nonlocal wrong
            number = first
            while not stop.is_set():
                answer = await client.post("/v1/images/generations", json=body_of(number))
                codes[answer.status_code] += 1
                if answer.status_code != 200:
                    reasons[answer.json()["error"]["code"]] += 1
                wrong += answer.status_code == 200 and answer.json()["seeds"] != [number]
                number += 16

        async def replicas() -> list[int]:
            state = (await client.get("/v1/state")).json()
            return [each["process_id"] for each in state["replicas"]]

        asking = [asyncio.ensure_future(ask(first)) for first in range(16)]
        for _ in range(kills):
            there = await replicas()
            while len(there) < 2:
                await asyncio.sleep(0.2)
                there = await replicas()
            await asyncio.sleep(draws.uniform(0.5, 3.0))
            victim = draws.choice(there)
            os.kill(victim, signal.SIGKILL)
            start = time.monotonic()
            while victim in there or len(there) < 2:
                await asyncio.sleep(0.1)
                there = await replicas()
            again_s.append(time.monotonic() - start)
        stop.set()
        await asyncio.gather(*asking)
    return {
        "kills": kills,
        "codes": {str(code): count for code, count in codes.items()},
        "reasons": dict(reasons),
        "wrong_image": wrong,
        "two_again_after_s": again_s,
        "longest_s": max(again_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("batch", "replicas"))
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.what == "batch":
            found = batch(given.model, given.kills or 30, given.lines, Path(name))
            is_good = not (found["missing"] or found["doubled"] or found["broken"])
        else:
            options = ("--num-replicas", "2", "--system", "patched-fcfs", "--dtype", "auto")
            with HttpServer(given.model, Path(name), *options, start_s=600) as server:
                found = asyncio.run(_under_load(server, given.kills or 20))
                assert server.stop() == 0
            is_good = [*found["codes"]] == ["200"] and not found["wrong_image"] and found["longest_s"] < 30
    found = {"machine": cpu_name(), "model": given.model, **found}
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
