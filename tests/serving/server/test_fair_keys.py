"""Requests of several keys share the batch, from the front end to the scheduler, on a virtual clock."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from patchedserve.serving.server.admission import Admission
from patchedserve.serving.server.limits import KeyLimits
from patchedserve.serving.server.protocol import Generation

from ...support.fast_loop import FastLoop
from ...support.random_engine import MachineState
from ...support.server_process import SIZES, Process

NUM_STEPS = 4


def ends_of(folder: Path, requests: str, weights: Mapping[str, float]) -> list[str]:
    """Send a request for each letter, its key, at the same time; return the keys in the order of their images."""
    order: list[str] = []

    async def work() -> None:
        process = Process(MachineState(random.Random(1)), folder, "edf")
        front_end = process.front_end
        front_end.limits = replace(
            front_end.limits,
            max_queue=200,
            request_timeout_s=1e9,
            keys={key: KeyLimits(weight=weight) for key, weight in weights.items()},
        )
        front_end.admission = Admission(front_end.limits, lambda: process.backend.load.rate, front_end._pending)
        await process.backend.start()

        async def draw(number: int, key: str) -> None:
            generation = Generation("a cat", SIZES[0], NUM_STEPS, 3.0, (number,), slo_s=1e6)
            arrival_s = asyncio.get_running_loop().time()
            await front_end.wait(await front_end.generate(generation, key=key, arrival_s=arrival_s))
            order.append(key)

        await asyncio.gather(*(draw(number, key) for number, key in enumerate(requests)))
        await process.backend.stop()

    loop = FastLoop(random.Random(0), 0.0)
    loop.run_until_complete(work())
    loop.close()
    return order


def test_key_with_many_requests_does_not_delay_others(tmp_path: Path) -> None:
    order = ends_of(tmp_path, 40 * "a" + "b", {"a": 1.0, "b": 1.0})
    assert order.index("b") < 20, "it is not served after all that came before it"


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_keys_share_the_batch_by_weight(tmp_path: Path, weight: float) -> None:
    order = ends_of(tmp_path, 40 * "a" + 40 * "b", {"a": weight, "b": 1.0})
    first = Counter(order[8:40])  # some requests are admitted while no others wait
    assert abs(first["a"] - 32 * weight / (1 + weight)) <= 4
