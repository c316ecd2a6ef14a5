"""Profile of edits over records on one machine, which `psctl profile edits` writes and the simulator reads. No torch.

InstGenIE section 4.4 predicts compute time by a line on the FLOPs of its table 1, and load time by a line on bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.parsing import parse
from ...data.records import read_json
from ...data.run_facts import RunFacts
from ...data.templates import Keep
from ..core.record_key import RecordKey
from ..scheduling.policies.base import StepLatencyPredictor
from .step_latency import TERMS, EditStepLatency, fitted_line, on_line

KIND, VERSION = "psctl-edit-profile", 1
PATTERN = "edits-*.json"
"""Name pattern of profiles in a workspace's tables."""
LOAD_TERMS = ("record", "bytes")


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted line, with its error on held-out times.

    Attributes:
        coefficients: seconds for each term, none negative.
        num_held_out: number of held-out times.
        mape: mean of |predicted / measured - 1| over held-out times.
        r2: coefficient of determination over held-out times; None if they are all equal.

    Raises:
        UsageError: a coefficient is negative or not finite, or all are 0.
    """

    coefficients: tuple[float, ...]
    num_held_out: int
    mape: float
    r2: float | None

    def __post_init__(self) -> None:
        if not all(0 <= each < math.inf for each in self.coefficients) or not any(self.coefficients):
            raise UsageError(f"its coefficients are {self.coefficients}, but none may be below 0, nor all be 0")

    @classmethod
    def of(cls, terms: Sequence[Sequence[float]], times_s: Sequence[float], held_out: Sequence[int]) -> Self:
        """Fit a line to all times except those at the `held_out` places, of which there must be at least one."""
        kept = [place for place in range(len(times_s)) if place not in set(held_out)]
        line = fitted_line([terms[place] for place in kept], [times_s[place] for place in kept])
        measured_s = [times_s[place] for place in held_out]
        predicted_s = [on_line(line, terms[place]) for place in held_out]
        pairs = list(zip(predicted_s, measured_s, strict=True))
        mean_s = math.fsum(measured_s) / len(held_out)
        spread = math.fsum((each - mean_s) ** 2 for each in measured_s)
        missed = math.fsum((predicted - measured) ** 2 for predicted, measured in pairs)
        mape = math.fsum(abs(predicted / measured - 1) for predicted, measured in pairs) / len(held_out)
        return cls(line, len(held_out), mape, 1 - missed / spread if spread else None)


@dataclass(frozen=True, slots=True)
class EditProfile:
    """Profile of edits with one model on one machine.

    Attributes:
        facts: machine, model and settings of the measurement.
        keep: which tensors the records hold.
        up_to: largest active share at which an edit is computed in part.
        compute: fit of step latencies on `terms_of` the edits, for batches that stay the same.
        first: the same fit for the first step after the batch has changed.
        load: fit of load times of records from their files, on `LOAD_TERMS`.
        bytes_per_pixel_step: size of records per pixel and step.
        settings: settings of the measurement.
        steps, loads: measured steps and loads (`profiling.measure.edits`).
    """

    facts: RunFacts
    keep: Keep
    up_to: float
    compute: Fit
    first: Fit
    load: Fit
    bytes_per_pixel_step: float
    settings: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    loads: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        if not (0 < self.up_to <= 1 and 0 < self.bytes_per_pixel_step < math.inf):
            raise UsageError(f"up_to is {self.up_to}, bytes_per_pixel_step is {self.bytes_per_pixel_step}")
        for fit, terms in ((self.compute, TERMS), (self.first, TERMS), (self.load, LOAD_TERMS)):
            if len(fit.coefficients) != len(terms):
                raise UsageError(f"a fit has {len(fit.coefficients)} coefficients, but there must be {len(terms)}")

    def steady_latency(self, whole: StepLatencyPredictor) -> EditStepLatency:
        """Return the predictor for batches that stay the same, with edits among whole images."""
        return EditStepLatency(whole, self.compute.coefficients)

    def first_latency(self, whole: StepLatencyPredictor) -> EditStepLatency:
        """Return the predictor for batches that have changed; `whole` must predict such batches, too."""
        return EditStepLatency(whole, self.first.coefficients)

    def record_bytes(self, record: RecordKey) -> float:
        """Return the size of a record with all its steps."""
        return self.bytes_per_pixel_step * record.resolution.pixels * record.num_inference_steps

    def load_s(self, num_bytes: float) -> float:
        """Return the seconds until a record of this size is in memory."""
        return on_line(self.load.coefficients, (1.0, num_bytes))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"kind": KIND, "version": VERSION, **asdict(self), "terms": TERMS, "load_terms": LOAD_TERMS}

    def write(self, path: Path) -> None:
        """Write the profile to a file. Raises OSError."""
        write_json(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a profile from a file. Raises UsageError: the file cannot be read, or is not such a profile."""
        data = read_json(path, "a profile of edits")
        if data.get("kind") != KIND:
            raise UsageError(f"{path} is no profile of edits: psctl profile edits makes one")
        if data.get("version") != VERSION:
            raise UsageError(f"{path} is of version {data.get('version')}, but it must be {VERSION}: measure it again")
        return parse(cls, data, f"{path} is damaged", "measure it again")
