"""The process of a server below its HTTP layer, with the checks that its records are consistent."""

import json
from collections import Counter
from pathlib import Path

from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.batches.store import Batches
from patchedserve.serving.server.front_end import FrontEnd, Pricing
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.live import Live
from patchedserve.serving.server.metrics import Metrics
from patchedserve.serving.server.protocol import ModelFacts
from patchedserve.serving.server.request_log import RequestLog
from patchedserve.serving.server.tickets import Ticket
from patchedserve.training.latency.online_correction import OnlineCorrection

from .random_engine import STEP_S, MachineState, RandomBackend, TableOfSteps
from .scheduler_check import check_scheduler

SIZES = (Resolution(32, 32), Resolution(64, 32))


class CountingLog(RequestLog):
    """Request log that also counts how often each request was accepted and has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted, self.over = Counter[str](), Counter[str]()

    def on_accepted(self, ticket: Ticket) -> None:
        self.accepted[ticket.id] += 1

    def on_over(self, ticket: Ticket) -> None:
        self.over[ticket.id] += 1
        super().on_over(ticket)


class Process:
    """The process of a server on a virtual clock, from its start to its end: all below HTTP but the model is real.

    Args:
        machine: machine that the process runs on.
        folder: folder of its batches.
        policy: name of the policy.
    """

    def __init__(self, machine: MachineState, folder: Path, policy: str) -> None:
        facts = ModelFacts("random", ModelDefaults(4, 3.0, SIZES[0], SIZES))
        limits = Limits(max_queue=machine.rng.choice((3, 64)), request_timeout_s=machine.rng.choice((3.0, 600.0)))
        self.machine, self.predictor = machine, OnlineCorrection(TableOfSteps())
        self.backend = RandomBackend(machine, policy, self.predictor)
        pricing = Pricing(5.0, lambda request: 0.05 + STEP_S * request.num_steps, lambda _: None)
        self.front_end = FrontEnd(facts, limits, self.backend, pricing)
        self.metrics, self.live, self.ends = Metrics(SIZES, self.backend), Live(self.front_end), CountingLog()
        self.front_end.watchers += [self.metrics, self.live, self.ends]
        self.backend.on_row = lambda row: (self.metrics.on_row(row), self.live.on_row(row))[0]
        self.batches = Batches(folder, self.front_end, machine.rng.randint(1, 4))

    def check(self) -> None:
        """Check that all records of open requests are consistent. Raises AssertionError."""
        front_end, admission = self.front_end, self.front_end.admission
        if self.backend.engine is not None and self.backend.engine.crashes_with is None:
            check_scheduler(self.backend.engine.scheduler)
            assert self.backend.engine.followers.keys() == self.backend.engine.scheduler._open.keys()
        placed = [ticket for ticket in front_end.open.values() if ticket.place is not None]
        assert all(ticket.place.is_held for ticket in placed if ticket.place)
        assert admission.num_images == sum(len(ticket.generation.seeds) for ticket in placed) <= 64
        of_key = Counter[str]()
        for ticket in placed:
            of_key[ticket.key] += len(ticket.generation.seeds)
        assert admission._of_key == of_key
        assert not any(ticket.over.is_set() for ticket in front_end.open.values())
        assert front_end.open.keys() == self.ends.accepted.keys() - self.ends.over.keys()
        assert not self.ends.over or max(self.ends.over.values()) == 1

    def check_end(self, log: str) -> None:
        """Check the records of a process that has drained. Raises AssertionError."""
        assert not self.front_end.open
        events = Counter(json.loads(line)["event"] for line in log.splitlines())
        assert events["completed"] + events["failed"] + events["cancelled"] == len(self.ends.accepted)
        samples = [sample for metric in self.metrics._ended.collect() for sample in metric.samples]
        records = sum(sample.value for sample in samples if sample.name == "psctl_request_success_total")
        assert records == sum(len(ticket.records) for ticket in self.front_end.ended.values())
