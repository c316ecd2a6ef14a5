"""Long mixed load on a running server: clients that disconnect, send errors or are slow, and well-behaved ones."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .bad_requests import BODIES

GENERATIONS = "/v1/images/generations"
KINDS = {"good": 0.91, "leaves": 0.05, "bad": 0.02, "slow": 0.02}
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process holds."""

    rss_mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, process_id: int) -> "Usage":
        process = Path("/proc") / str(process_id)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return cls(
            int(status["VmRSS"].split()[0]) / 1024, len(list((process / "fd").iterdir())), int(status["Threads"])
        )


@dataclass(slots=True)
class SoakResult:
    """Result of the load.

    Attributes:
        ended: counts of outcomes by kind of client.
        usage: resources of the server's process at the start, after half of the requests, and at the end.
        num_open: number of images that were still open at the end.
        duration_s: duration of the whole load.
    """

    ended: Counter[str] = field(default_factory=Counter)
    usage: list[Usage] = field(default_factory=list)
    num_open: float = -1.0
    duration_s: float = 0.0


async def soak(
    url: str,
    process_id: int,
    *,
    num_requests: int,
    sizes: list[str],
    num_steps: int = 4,
    at_once: int = 32,
    seed: int = 0,
    rate: float | None = None,
) -> SoakResult:
    """Send the load: as fast as `at_once` clients can, or at a rate (requests per second, open loop)."""
    result, draws, start_s = SoakResult(), random.Random(seed), time.monotonic()
    kinds = draws.choices(list(KINDS), list(KINDS.values()), k=num_requests)
    bodies = [
        {"prompt": f"a cat {number}", "size": draws.choice(sizes), "num_inference_steps": num_steps, "seed": number}
        for number in range(num_requests)
    ]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for first, last in ((0, num_requests // 2), (num_requests // 2, num_requests)):
            result.usage.append(Usage.of(process_id))
            places = asyncio.Semaphore(at_once)
            tasks: set[asyncio.Task[None]] = set()
            begin_s = time.monotonic()
            for number in range(first, last):
                if rate is not None:
                    await asyncio.sleep(max(0.0, begin_s + (number - first) / rate - time.monotonic()))
                await places.acquire()
                kind, body, draw = kinds[number], bodies[number], random.Random(number)
                task = asyncio.ensure_future(_one(client, kind, body, draw, result))
                tasks.add(task)
                task.add_done_callback(lambda done, places=places, tasks=tasks: (places.release(), tasks.discard(done)))
            await asyncio.gather(*tasks)
        await asyncio.sleep(_SETTLE_S)
        metrics = (await client.get("/metrics")).text.splitlines()
        names = ("psctl_num_requests_running", "psctl_num_requests_waiting")
        result.num_open = sum(float(line.split()[1]) for line in metrics if line.split(" ")[0] in names)
    result.usage.append(Usage.of(process_id))
    result.duration_s = time.monotonic() - start_s
    return result


async def _one(
    client: httpx.AsyncClient, kind: str, body: dict[str, Any], draw: random.Random, result: SoakResult
) -> None:
    if kind == "leaves":
        try:
            async with asyncio.timeout(draw.uniform(0.0, 0.3)):
                answer = await client.post(GENERATIONS, json=body)
            how = str(answer.status_code)
        except TimeoutError:
            how = "left"
    elif kind == "bad":
        content = draw.choice(BODIES)
        answer = await client.post(GENERATIONS, content=content, headers={"content-type": "application/json"})
        how = str(answer.status_code)
    elif kind == "slow":
        how = await _read_slowly(client, body)
    else:
        answer = await client.post(GENERATIONS, json=body)
        how = str(answer.status_code)
        if answer.status_code == 200:
            found = answer.json()
            assert found["seeds"] == [body["seed"]], "somebody else's image"
            assert found["size"] == body["size"]
    result.ended[f"{kind} {how}"] += 1


async def _read_slowly(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Read a stream slowly, piece by piece."""
    async with client.stream("POST", GENERATIONS, json={**body, "stream": True, "partial_images": 2}) as answer:
        size = 0
        async for part in answer.aiter_raw(4096):
            size += len(part)
            await asyncio.sleep(0.01)
        return f"{answer.status_code}" if size else "nothing"
