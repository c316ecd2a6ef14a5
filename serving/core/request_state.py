"""The life of a request: the view that policies see, the state while it is open, and its record.

All times are in seconds from the start of the trace, on the engine's (or the simulator's) clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from ...data.adapters import adapters_text
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.work import Work, work_of
from .record_key import RecordKey

Status = Literal["pending", "completed", "failed", "discarded", "cancelled"]
FINAL_STATUSES: tuple[str, ...] = tuple(status for status in get_args(Status) if status != "pending")
Stage = Literal["waiting", "joining", "active", "decoding"]
"""Stage of an open request: not admitted yet; admitted but not prepared; taking steps; done with its steps."""
_TIMES = ("arrival_s", "prepare_start_s", "prepare_end_s", "admitted_s", "denoise_end_s", "finish_s")
_DERIVED = ("deadline_s", "queueing_s", "latency_s", "slo_met")


class RequestView(NamedTuple):
    """View of a request for policies. Immutable, so that no policy can change the engine's state.

    Attributes:
        request_id: number of the request.
        resolution: size of its image in pixels.
        arrival_s: time of its arrival.
        deadline_s: time by which its image must be finished; None without an SLO.
        num_steps: total number of denoising steps that are computed for it.
        steps_done: number of these steps that are done; 0 while it waits.
        standalone_s: its latency when served alone; None when not measured.
        active_share: pixels that a step computes as a share of those of its image: below 1 for an edit that reads the
            rest from a record, above 1 for a request with references.
        record: key of that record, which has to be loaded first; None if it reads none.
    """

    request_id: int
    resolution: Resolution
    arrival_s: float
    deadline_s: float | None
    num_steps: int
    steps_done: int = 0
    standalone_s: float | None = None
    active_share: float = 1.0
    record: RecordKey | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        standalone_s: float | None = None,
        active_share: float = 1.0,
        num_computed: int | None = None,
    ) -> Self:
        """Return the view of a request that has just arrived.

        Args:
            request: the request.
            standalone_s: its latency when served alone; None if not known.
            active_share: share of its image that steps compute.
            num_computed: number of its steps that are computed; None for all.
        """
        return cls(
            request.request_id,
            request.resolution,
            request.arrival_s,
            request.deadline_s,
            num_computed or request.num_steps,
            0,
            standalone_s,
            active_share * request.pixels_seen / request.resolution.pixels,
            RecordKey.of(request) if active_share < 1 else None,
        )

    @property
    def work(self) -> Resolution | Work:
        """Work of a step of the request."""
        return work_of(self.resolution, self.active_share)


@dataclass(slots=True)
class RequestRecord:
    """Record of one request: its parameters, the times of its events, and how it ended.

    Times are filled in as events happen, and `close` is called once. Derived values (deadline, queueing time, latency,
    whether the SLO was met) are computed from them, so they cannot contradict the times.

    `status` is "pending" until the request has ended, then "completed" (it has an image), "failed" (`reason` is the
    error), "discarded" (`reason` is the policy's reason for dropping it) or "cancelled" (the run was stopped first).

    For a cascade, `served_by` is the model whose image was returned, and `confidence` the confidence of the light image
    (None if it was not assessed), which was compared with `threshold`.

    For an edit, `mask_ratio` is the share of its pixels in the mask, `active_share` the share of its cells that are
    computed, and `reused` whether the other cells were read from the record of its template. The latter two are known
    once the request is prepared.

    `lora` names the adapters that were used, as `data.adapters.adapters_text` formats them. `steps_reused` is the
    number of its steps that have reused anything, from the cache or from the record of a template; it is known when
    all steps are done. If it is 0, the image is exact. `references` are the sizes of the images that it saw.
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
    references: str | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return a pending record of `request`, in which the only time is its arrival."""
        edit = request.edited
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
            references=" ".join(str(each.resolution) for each in request.references) or None,
        )

    def close(self, status: Status, now_s: float, reason: str | None = None) -> None:
        """Record how and when the request ended.

        Raises:
            RuntimeError: the request has already ended, or `status` is not final.
        """
        if self.status != "pending":
            raise RuntimeError(f"request {self.request_id} has already ended as {self.status}")
        if status not in FINAL_STATUSES:
            raise RuntimeError(f"request {self.request_id} cannot end as {status}")
        self.status, self.finish_s, self.reason = status, now_s, reason

    def shifted(self, ahead_s: float) -> Self:
        """Return the record on the clock of another process, which is `ahead_s` ahead of this one's."""
        known = {name: time_s for name in _TIMES if (time_s := getattr(self, name)) is not None}
        return replace(self, **{name: time_s + ahead_s for name, time_s in known.items()})

    @property
    def resolution(self) -> Resolution:
        """Size of the image in pixels."""
        return Resolution(self.width, self.height)

    @property
    def deadline_s(self) -> float | None:
        """Time by which the image must be finished; None without an SLO."""
        return None if self.slo_s is None else self.arrival_s + self.slo_s

    @property
    def queueing_s(self) -> float | None:
        """Seconds from arrival to joining the active queue (preparation included); None if it never joined."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the finished image; None if there is no image."""
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
        """Whether the image was finished within the SLO; False if there is no image, None without an SLO or while
        pending.
        """
        if self.slo_s is None or self.status == "pending":
            return None
        return self.latency_s is not None and self.latency_s <= self.slo_s

    def to_row(self) -> dict[str, Any]:
        """Return a row of the records table (`data.tables.RECORDS`), computed columns included.

        Raises:
            RuntimeError: the request has not ended yet.
        """
        if self.status == "pending":
            raise RuntimeError(f"request {self.request_id} has not ended, so it has no row yet")
        return {name: getattr(self, name) for name in (*(field.name for field in fields(self)), *_DERIVED)}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """Restore a record from its `to_row`; computed columns are ignored."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def _between(start_s: float | None, end_s: float | None) -> float | None:
    # Threads and processes note times: they may look at the clock in another order than they write them down.
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


@dataclass(slots=True, eq=False)
class RequestState:
    """An open request with its record and its stage. Only the `Scheduler` modifies it. No tensors.

    Attributes:
        request: the request.
        record: its record.
        view: its view for policies before its first step.
        num_iterations: number of steps that it takes in the batch. It differs from the requested number with a sampler
            of second order, if some steps are skipped, or if it took some before it had to wait again.
        stage: its current stage.
        is_prepared: whether its text is encoded and its latents are drawn.
        first_step: number of steps that the scheduler had counted when the request became active.
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
        """Return the state of a request that has just arrived, with its view."""
        return cls(request, RequestRecord.of(request), view, view.num_steps)

    def view_at(self, step: int) -> RequestView:
        """Return its view for policies when the scheduler has counted `step` steps."""
        view = self.view
        if self.stage != "active" or step == self.first_step:
            return view
        return view._replace(steps_done=(step - self.first_step) * view.num_steps // self.num_iterations)

    def return_to_waiting(self, step: int) -> None:
        """Leave the batch when the scheduler has counted `step` steps, to join it later with the remaining steps."""
        left = self.num_iterations - (step - self.first_step)
        self.view = self.view._replace(num_steps=max(1, self.view.num_steps * left // self.num_iterations))
        self.num_iterations, self.stage = left, "waiting"


class ActiveViews(Sequence[RequestView]):
    """Views of admitted requests when the scheduler has counted `step` steps, created only on access."""

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
