"""What the front end keeps of requests that have ended, on a virtual clock."""

import asyncio
import random
from pathlib import Path

import numpy as np

from patchedserve.data.edits import Reference
from patchedserve.serving.server.protocol import Generation
from patchedserve.serving.server.tickets import Ticket

from ...support.fast_loop import FastLoop
from ...support.random_engine import MachineState
from ...support.server_process import SIZES, Process


def test_pixels_of_references_are_kept_while_they_are_needed(tmp_path: Path) -> None:
    reference = Reference(np.zeros((64, 64, 3), dtype=np.uint8))
    seen: list[Ticket] = []
    kept: list[tuple[Reference, ...]] = []

    async def work() -> None:
        process = Process(MachineState(random.Random(1)), tmp_path, "edf")
        await process.backend.start()
        generation = Generation("a cat", SIZES[0], 4, 3.0, (1,), slo_s=1e6, references=(reference,), kind="image_edit")
        arrival_s = asyncio.get_running_loop().time()
        ticket = await process.front_end.generate(generation, key="", arrival_s=arrival_s)
        kept.append(ticket.generation.references)
        await process.front_end.wait(ticket)
        ended = process.front_end.ended.get(ticket.id)
        assert ended is not None
        seen.append(ended)
        await process.backend.stop()

    loop = FastLoop(random.Random(0), 0.0)
    loop.run_until_complete(work())
    loop.close()
    assert kept == [(reference,)]
    assert seen[0].generation.pixels_seen == SIZES[0].pixels + 64 * 64, "they still count"
    assert seen[0].status == "completed"
    assert (seen[0].generation.references, seen[0].generation.kind) == ((), "image_edit")
