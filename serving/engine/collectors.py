"""Collectors: where the records of a run go. The engine itself keeps only what belongs to open requests."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.request_state import RequestRecord
from ..core.step_row import StepRow

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


class Collector(Protocol):
    """Takes what a run leaves behind, as it comes.

    The engine calls it from one thread, which is none of its stages, in the order in which things happen: no collector
    needs a lock, and a slow one delays no request, but what it has not taken yet stays in memory. Every submitted
    request is told exactly once, also after Ctrl-C. An error ends the run, which raises it.
    """

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        """A request has ended: its record, which is final, and if it has been completed its image and its final latents
        (1, channels, height / 8, width / 8).
        """

    def on_step(self, row: StepRow) -> None:
        """A denoising step has been taken."""

    def on_decision(self, decision_s: float) -> None:
        """The policy was asked, and has taken so many seconds of real time."""


class InMemory(Collector):
    """Keeps everything in memory: for runs whose length is known.

    Args:
        keep_images, keep_latents: whether images and final latents are kept, too.

    Attributes:
        records: in the order in which the requests ended.
        steps: one row per denoising step.
        decision_times_s: how long each decision of the policy took.
        images, latents: by request id, as far as they are kept.
    """

    def __init__(self, *, keep_images: bool = False, keep_latents: bool = False) -> None:
        self.records: list[RequestRecord] = []
        self.steps: list[StepRow] = []
        self.decision_times_s: list[float] = []
        self.images: dict[int, Image] = {}
        self.latents: dict[int, Tensor] = {}
        self._keep_images, self._keep_latents = keep_images, keep_latents

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        self.records.append(record)
        if self._keep_images and image is not None:
            self.images[record.request_id] = image
        if self._keep_latents and latents is not None:
            self.latents[record.request_id] = latents

    def on_step(self, row: StepRow) -> None:
        self.steps.append(row)

    def on_decision(self, decision_s: float) -> None:
        self.decision_times_s.append(decision_s)


class JsonLines(Collector):
    """Appends each record to a file as it comes: a line of JSON with the columns of the records table.

    A line is written at once, so that the file holds whole lines only, whatever ends the process. It is opened for each
    record and may be moved away meanwhile; the next record starts a new one.

    Raises:
        OSError: the file cannot be written; where, while the engine runs, ends the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):
                # The disk was full or the machine went down within the last line.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        line = json.dumps(record.to_row(), ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())


@dataclass(slots=True)
class Counters(Collector):
    """Counts and adds up, and keeps nothing else: for servers that run for ever.

    Attributes:
        ended: requests by final status.
        num_with_slo, num_slo_met: ended requests that have an SLO, and those whose image came in time.
        latency_s: sum over completed requests, from arrival to the image.
        num_steps, step_s: denoising steps, and how long they took in all.
        request_steps: sum over steps of the requests that took them.
        num_decisions, decision_s: how often the policy was asked, and how long it took in all.
    """

    ended: Counter[str] = field(default_factory=Counter)
    num_with_slo: int = 0
    num_slo_met: int = 0
    latency_s: float = 0.0
    num_steps: int = 0
    step_s: float = 0.0
    request_steps: int = 0
    num_decisions: int = 0
    decision_s: float = 0.0

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        self.ended[record.status] += 1
        self.num_with_slo += record.slo_s is not None
        self.num_slo_met += record.slo_met is True
        self.latency_s += record.latency_s or 0.0

    def on_step(self, row: StepRow) -> None:
        self.num_steps += 1
        self.step_s += row.duration_s
        self.request_steps += row.active

    def on_decision(self, decision_s: float) -> None:
        self.num_decisions += 1
        self.decision_s += decision_s
