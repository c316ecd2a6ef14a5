"""State that the live page receives: computed once for all viewers, at a cost independent of the ended requests."""

import asyncio
import json
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, cast

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.core.step_row import StepRow
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.server.backend import Load, ReplicaState
from patchedserve.serving.server.front_end import FrontEnd, Pricing
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.live import Live
from patchedserve.serving.server.local import LocalBackend, LocalSetup
from patchedserve.serving.server.protocol import ModelFacts, parse_generation
from patchedserve.serving.server.tickets import FinishedImage, Ticket

SIZE = Resolution(64, 64)
FACTS = ModelFacts("tiny", ModelDefaults(6, 3.0, SIZE, (SIZE,)))


class Counted(LocalBackend):
    """Backend that draws nothing and counts the reads of its replicas' state."""

    num_looks = 0

    @property
    def load(self) -> Load:
        return Load(num_running=1)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        self.num_looks += 1
        return super().replicas


def live_page() -> tuple[Live, Counted]:
    backend = Counted(LocalSetup(cast(Any, None), get_system("patched-fcfs")))
    return Live(FrontEnd(FACTS, Limits(), backend, Pricing(None, lambda _: None, lambda _: None))), backend


def step(number: int) -> StepRow:
    return StepRow.of(number, 0.0, 0.1, [SIZE], 0)


def ended(number: int, latency_s: float = 1.0, key: str = "") -> Ticket:
    wanted = parse_generation({"prompt": "a cat"}, FACTS, Limits())
    record = RequestRecord.of(Request(number, "a cat", SIZE, slo_s=2.0))
    record.close("completed", latency_s)
    ticket = Ticket(wanted, None, lambda number, reason: None, cast(Any, None), lambda ticket: None, key)
    ticket.records.append(record)
    ticket.drawn[0] = FinishedImage(b"", record)
    return ticket


def test_state_is_computed_once_for_all_viewers() -> None:
    num_viewers, last = 32, 20

    async def use() -> None:
        live, backend = live_page()
        has_begun = [asyncio.Event() for _ in range(num_viewers)]

        async def view(number: int) -> list[dict[str, Any]]:
            told = list[dict[str, Any]]()
            async for event in live.stream(f"key {number % 3}"):
                told.append(json.loads(event.removeprefix(b"data: ")))
                has_begun[number].set()
                if told[-1]["batch"] and told[-1]["batch"]["step"] == last:
                    break
            return told

        live.on_over(ended(1, key="key 1"))
        viewers = [asyncio.ensure_future(view(number)) for number in range(num_viewers)]
        for begun in has_begun:
            await begun.wait()
        before = backend.num_looks
        for number in range(last + 1):
            live.on_row(step(number))
            live.state("key 4")  # other viewers read the state, too
        looked = backend.num_looks
        told = await asyncio.gather(*viewers)
        assert looked - before == last + 1
        # One read, and a few more if this process has to wait for the CPU.
        assert backend.num_looks - looked < num_viewers / 4
        for number, states in enumerate(told):
            assert [len(state["images"]) for state in states] == [int(number % 3 == 1)] * len(states)
        assert told[0][-1] == told[3][-1] == {**told[1][-1], "images": []}

    asyncio.run(asyncio.wait_for(use(), 60))


def test_state_cost_is_independent_of_ended_requests() -> None:
    async def lines_run(num_ended: int) -> tuple[int, dict[str, Any]]:
        live, _ = live_page()
        for number in range(num_ended):
            live.on_over(ended(number, 3.0 if number % 4 == 0 else 1.0))
        num_lines, before = 0, sys.gettrace()

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal num_lines
            num_lines += event == "line"
            return count

        sys.settrace(count)
        try:
            state = live.state("")
        finally:
            sys.settrace(before)
        return num_lines, json.loads(state)

    few, _ = asyncio.run(lines_run(2_000))
    many, state = asyncio.run(lines_run(12_000))
    # On a slow machine the requests spread over a few more time bins.
    assert many < 1.2 * few
    assert state["attainment"] == {name: {"share": 0.75, "n": 12_000} for name in ("60", "300", "3600")}
    assert state["latencies"] == {"64x64": {"latencies_s": [3.0, 1.0, 1.0, 1.0] * 125, "slo_s": 2.0}}


def test_state_is_current() -> None:
    async def use() -> None:
        live, _ = live_page()
        assert json.loads(live.state(""))["batch"] is None
        live.on_row(step(3))
        assert json.loads(live.state(""))["batch"]["step"] == 3
        live.on_over(ended(1))
        assert len(json.loads(live.state(""))["images"]) == 1
        live.front_end.is_draining = True
        live.on_row(step(4))
        told = [json.loads(event.removeprefix(b"data: ")) async for event in live.stream("")]
        assert [(state["status"], state["batch"]["step"]) for state in told] == [("draining", 4)]

    asyncio.run(use())
