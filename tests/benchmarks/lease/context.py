"""Context of a part of a lease: sizes, the worker's model, the remaining time. Imports no torch by itself."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .scale import Scale

if TYPE_CHECKING:
    import torch

    from patchedserve.data.resolution import Resolution
    from patchedserve.profiling.steps.combinations import Combination
    from patchedserve.serving.core.captured import Recorder
    from patchedserve.serving.models.served import ServedModel

Row = dict[str, Any]
"""A result. Its `label` is unique within the part; a row with an `error` has no other fields."""
Task = tuple[str, Callable[[], Row]]
_LEAST_TASK_S = 1.0


class Bench:
    """The model of a worker, built on first use."""

    def __init__(self, name: str, scale: Scale) -> None:
        self.name, self.scale = name, scale

    @cached_property
    def model(self) -> "ServedModel":
        """The model on the patch engine, eager."""
        from .models import drawn_model

        return drawn_model(self.name, self.scale)


@dataclass(slots=True)
class Context:
    """One part's run.

    Attributes:
        bench: model of the worker.
        folder: state folder, whose tables are kept between runs.
        known: labels of rows that an earlier run has measured.
        end_s: time on the monotonic clock at which the part has to stop.
        notes: facts that are stored with the rows, by name.
        stopped: reason for missing rows; "" if none is missing.
    """

    bench: Bench
    folder: Path
    known: frozenset[str]
    end_s: float
    notes: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""

    @property
    def scale(self) -> Scale:
        return self.bench.scale

    @property
    def model(self) -> "ServedModel":
        """The worker's model, on the patch engine, eager."""
        return self.bench.model

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.scale.device)

    @property
    def seconds_left(self) -> float:
        return self.end_s - time.monotonic()

    @property
    def tables(self) -> Path:
        """Folder of tuning results."""
        folder = self.folder / "tables" / self.bench.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def make_recorder(self, device: "torch.device") -> "Recorder":
        """Return the recorder of passes for this device."""
        if self.scale.is_rehearsal:
            from patchedserve.tests.support.tape import Tape

            return Tape()
        from patchedserve.serving.core.cuda_graphs import CudaRecorder

        return CudaRecorder(device)

    @property
    def tuned(self) -> "list[Resolution]":
        """Sizes for which strategies and formats are measured first."""
        from patchedserve.data.resolution import Resolution

        return [Resolution(side, side) for side in self.scale.sides[: self.scale.num_tuned]]

    def combinations(self, counts: Iterable[tuple[int, ...]]) -> "list[Combination]":
        """Return combinations with these counts of the scale's sizes."""
        from patchedserve.data.resolution import Resolution
        from patchedserve.profiling.steps.combinations import Combination

        sizes = tuple(Resolution(side, side) for side in self.scale.sides)
        return [Combination(sizes, each) for each in counts]

    def measured(self, tasks: Iterable[Task]) -> Iterator[Row]:
        """Yield the rows of tasks that no earlier run has measured, while there is time for a task as long as the
        longest so far. A task that raises yields a row with its error, and the others continue.
        """
        longest_s, missing = _LEAST_TASK_S, list[str]()
        for label, run in tasks:
            if label in self.known:
                continue
            if self.seconds_left < longest_s:
                missing.append(label)
                continue
            start_s = time.monotonic()
            try:
                row = {"label": label} | run() | {"seconds": time.monotonic() - start_s}
            except Exception as error:  # noqa: BLE001  the other rows are as good without this one
                traceback.print_exc(file=sys.stderr)
                row = {"label": label, "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
            longest_s = max(longest_s, time.monotonic() - start_s)
            yield row
        if missing:
            self.stopped = f"no time for {', '.join(missing)}"
