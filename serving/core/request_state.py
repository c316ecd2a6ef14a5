"""The life of a request: what policies see of it, where it is while it is open, and its record.

All times are in seconds from the start of the trace, on the engine's (or the simulator's) clock.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self, get_args

from ...data.adapters import adapters_text
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.work import Work, work_of

Status = Literal["pending", "completed", "failed", "discarded", "cancelled"]
FINAL_STATUSES: tuple[str, ...] = tuple(status for status in get_args(Status) if status != "pending")
Stage = Literal["waiting", "joining", "active", "decoding"]
"""Where an open request is: not admitted yet, admitted but not prepared, taking steps, done with its steps."""
_DERIVED = ("deadline_s", "queueing_s", "latency_s", "slo_met")


class RecordId(NamedTuple):
    """Which record of a template an edit reads, as far as it says so without its model.

    Attributes:
        image: its name in a trace; else a checksum of its pixels and of what else tells templates apart.
        resolution, num_inference_steps: of the edit.
    """

    image: str
    resolution: Resolution
    num_inference_steps: int

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """The record of an edit; None: it reads none. Of an image with pixels, these are looked at."""
        edit = request.edit
        if request.traced is not None:
            image = request.traced.image
        elif edit is not None and edit.template is not None:
            # A generation has one guidance scale; a noised image only knows whether there is any.
            scale = request.guidance_scale
            about = edit.template, scale if edit.template.kind == "trajectory" else scale > 1
            image = hashlib.sha256(edit.image.tobytes() + repr(about).encode()).hexdigest()
        else:
            return None
        return cls(image, request.resolution, request.num_inference_steps)


class RequestView(NamedTuple):
    """What a policy may know of a request. Immutable, so no policy can change the engine's state.

    Attributes:
        request_id: number of the request.
        resolution: size of its image in pixels.
        arrival_s: when it arrived.
        deadline_s: when its image must be there; None without an SLO.
        num_steps: number of denoising steps that are computed of it in all.
        steps_done: how many of them are done; 0 while it waits.
        standalone_s: its latency when it is served alone; None when not measured.
        active_share: share of its image that steps compute; below 1 of an edit that reads the rest from a record.
        record: which record that is, where it has to be read first.
    """

    request_id: int
    resolution: Resolution
    arrival_s: float
    deadline_s: float | None
    num_steps: int
    steps_done: int = 0
    standalone_s: float | None = None
    active_share: float = 1.0
    record: RecordId | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        standalone_s: float | None = None,
        active_share: float = 1.0,
        num_computed: int | None = None,
    ) -> Self:
        """A request that has just arrived; `standalone_s` if its latency alone is known, `num_computed` of its steps
        are computed (None: all).
        """
        return cls(
            request.request_id,
            request.resolution,
            request.arrival_s,
            request.deadline_s,
            num_computed or request.num_steps,
            0,
            standalone_s,
            active_share,
            RecordId.of(request) if active_share < 1 else None,
        )

    @property
    def work(self) -> Resolution | Work:
        """What a step does for it."""
        return work_of(self.resolution, self.active_share)


@dataclass(slots=True)
class RequestRecord:
    """The record of one request: what it asked for, when each thing happened, how it ended.

    Times are filled in as things happen, and `close` is called once. What follows from them (deadline, queueing time,
    latency, whether the SLO was met) is computed, so it cannot contradict them.

    `status` is "pending" until the request has ended, then "completed" (it has an image), "failed" (`reason` is the
    error), "discarded" (`reason` says why the policy dropped it) or "cancelled" (the run was stopped first).

    Of a cascade, `served_by` is the model whose image it has, and `confidence` that of its light image, which was
    compared with `threshold`; None where nobody looked.

    Of an edit, `mask_ratio` is the share of its pixels in the mask, `active_share` that of its cells, and `reused` says
    whether the others were read from the record of its template; the latter two are known when it is prepared.

    `lora` names the adapters that it was drawn with, as `data.adapters.adapters_text` does. `steps_reused` is how many
    of its steps have reused anything, from the cache or from the record of a template, known when they are done: with 0
    the image is exact.
    """

    request_id: int
    prompt: str
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    arrival_s: float
    slo_s: float | None = None
    prepare_start_s: float | None = None
    prepare_end_s: float | None = None
    admitted_s: float | None = None
    denoise_end_s: float | None = None
    finish_s: float | None = None
    status: Status = "pending"
    reason: str | None = None
    image_path: str | None = None
    served_by: str | None = None
    confidence: float | None = None
    threshold: float | None = None
    strength: float | None = None
    mask_ratio: float | None = None
    active_share: float | None = None
    reused: bool | None = None
    lora: str | None = None
    steps_reused: int | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """A pending record of `request`, with no time filled in but its arrival."""
        edit = request.edit or request.traced
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            width=request.resolution.width,
            height=request.resolution.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            seed=request.seed,
            arrival_s=request.arrival_s,
            slo_s=request.slo_s,
            strength=None if edit is None else edit.strength,
            mask_ratio=None if edit is None else edit.mask_ratio,
            lora=adapters_text(request.adapters),
        )

    def close(self, status: Status, now_s: float, reason: str | None = None) -> None:
        """Record how and when the request ended.

        Raises:
            RuntimeError: it has ended before, or `status` is not a final one.
        """
        if self.status != "pending":
            raise RuntimeError(f"request {self.request_id} has already ended as {self.status}")
        if status not in FINAL_STATUSES:
            raise RuntimeError(f"request {self.request_id} cannot end as {status}")
        self.status, self.finish_s, self.reason = status, now_s, reason

    @property
    def resolution(self) -> Resolution:
        """Size of the image in pixels."""
        return Resolution(self.width, self.height)

    @property
    def deadline_s(self) -> float | None:
        """When the image must be there; None without an SLO."""
        return None if self.slo_s is None else self.arrival_s + self.slo_s

    @property
    def queueing_s(self) -> float | None:
        """From arrival to joining the active queue (preparation included); None if it never joined."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        """From arrival to the finished image; None if there is no image."""
        if self.status != "completed" or self.finish_s is None:
            return None
        return self.finish_s - self.arrival_s

    @property
    def prepare_s(self) -> float | None:
        """How long it was prepared; None if that has not come to its end. So are the others."""
        return _between(self.prepare_start_s, self.prepare_end_s)

    @property
    def denoise_s(self) -> float | None:
        """From joining the active queue to the last step."""
        return _between(self.admitted_s, self.denoise_end_s)

    @property
    def decode_s(self) -> float | None:
        """From the last step to the end."""
        return _between(self.denoise_end_s, self.finish_s)

    @property
    def slo_met(self) -> bool | None:
        """Whether the image came within the SLO; False if it never came, None without an SLO or while pending."""
        if self.slo_s is None or self.status == "pending":
            return None
        return self.latency_s is not None and self.latency_s <= self.slo_s

    def to_row(self) -> dict[str, Any]:
        """One row of the records table (`data.tables.RECORDS`), computed columns included.

        Raises:
            RuntimeError: the request has not ended yet.
        """
        if self.status == "pending":
            raise RuntimeError(f"request {self.request_id} has not ended, so it has no row yet")
        return {name: getattr(self, name) for name in (*(field.name for field in fields(self)), *_DERIVED)}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """The record that `to_row` made `row` of; the computed columns are computed anew."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def _between(start_s: float | None, end_s: float | None) -> float | None:
    # Threads and processes note times: they may look at the clock in another order than they write them down.
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


@dataclass(slots=True, eq=False)
class RequestState:
    """An open request: what was asked, its record, and where it is. Only the `Scheduler` changes it. No tensors.

    Attributes:
        request: what was asked.
        record: its record.
        view: what policies see of it before its first step.
        num_iterations: steps that it takes in the batch; other than what was asked for with a sampler of second order,
            where some are skipped, or where it has taken some before it had to wait again.
        stage: where it is.
        is_prepared: whether its text is encoded and its latents are drawn.
        first_step: how many steps the scheduler had counted when it became active.
    """

    request: Request
    record: RequestRecord
    view: RequestView
    num_iterations: int
    stage: Stage = "waiting"
    is_prepared: bool = False
    first_step: int = 0

    @classmethod
    def of(cls, request: Request, view: RequestView) -> Self:
        """The state of a request that has just arrived, and is seen so."""
        return cls(request, RequestRecord.of(request), view, view.num_steps)

    def view_at(self, step: int) -> RequestView:
        """What policies may see of it when the scheduler has counted `step` steps."""
        view = self.view
        if self.stage != "active" or step == self.first_step:
            return view
        return view._replace(steps_done=(step - self.first_step) * view.num_steps // self.num_iterations)

    def wait_again(self, step: int) -> None:
        """Leave the batch when the scheduler has counted `step` steps, to join it later as one of fewer steps."""
        left = self.num_iterations - (step - self.first_step)
        self.view = self.view._replace(num_steps=max(1, self.view.num_steps * left // self.num_iterations))
        self.num_iterations, self.stage = left, "waiting"


class ActiveViews(Sequence[RequestView]):
    """What policies see of admitted requests when `step` steps are counted; made only if one looks at them."""

    __slots__ = ("_states", "_step")

    def __init__(self, states: Sequence[RequestState], step: int) -> None:
        self._states = states
        self._step = step

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestView]:
        return (state.view_at(self._step) for state in self._states)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]
