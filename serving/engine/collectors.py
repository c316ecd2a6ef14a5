"""Collectors, which receive the records of a run. The engine itself keeps only the state of open requests."""

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
    """Receives the results of a run as they are produced.

    The engine calls a collector from one thread, separate from its stages, in the order of events. A collector needs no
    lock, and a slow one delays no request, although events that it has not received yet stay in memory. Every submitted
    request is reported exactly once, also after Ctrl-C. An error of the collector ends the run, which raises it.
    """

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        """Receive the final record of a request that has ended, with its image and its final latents (1, channels,
        height / 8, width / 8) if it was completed.
        """

    def on_step(self, row: StepRow) -> None:
        """Receive the row of a denoising step."""

    def on_decision(self, decision_s: float) -> None:
        """Receive the seconds of real time that a decision of the policy took."""


class InMemory(Collector):
    """Keeps everything in memory, for runs of bounded length.

    Args:
        keep_images, keep_latents: whether images and final latents are kept, too.

    Attributes:
        records: records in the order in which the requests ended.
        steps: one row per denoising step.
        decision_times_s: seconds that each decision of the policy took.
        images, latents: images and final latents by request id, if they are kept.
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
    """Appends each record to a file: a line of JSON with the columns of the records table.

    A line is written in one operation, so that the file holds only whole lines however the process ends. The file is
    opened for each record and may be moved away in between; the next record then starts a new file.

    Raises:
        OSError: the file cannot be written. While the engine runs, this ends the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):
                # The last line is incomplete: the disk was full or the machine went down.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: "Tensor | None") -> None:
        line = json.dumps(record.to_row(), ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())


@dataclass(slots=True)
class Counters(Collector):
    """Keeps only counts and sums, for long-lived servers.

    Attributes:
        ended: number of requests by final status.
        num_with_slo, num_slo_met: number of ended requests with an SLO, and of those whose image was in time.
        latency_s: sum over completed requests of the seconds from arrival to the image.
        num_steps, step_s: number of denoising steps, and their total seconds.
        request_steps: sum over steps of the number of requests in the batch.
        num_decisions, decision_s: number of decisions of the policy, and their total seconds.
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
