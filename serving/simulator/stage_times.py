"""Durations of the stages beside denoising, for the simulator: given, or the means of a measured run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.work import work_of
from ..core.request_state import RequestRecord
from ..scheduling.policies.base import StepLatencyPredictor


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of the prepare and postprocess stages by resolution; by default they take no time.

    A resolution without a time takes as long as the nearest one in pixels.

    Attributes:
        prepare_s: text encoding and first latents.
        postprocess_s: decoding and saving.

    Raises:
        UsageError: a time is negative or not finite.
    """

    prepare_s: Mapping[Resolution, float] = field(default_factory=dict)
    postprocess_s: Mapping[Resolution, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prepare_s", "postprocess_s"):
            for resolution, time_s in getattr(self, name).items():
                if not 0 <= time_s < float("inf"):
                    raise UsageError(f"{name} of {resolution} is {time_s:g} s, but it must be finite and not negative")

    @classmethod
    def constant(cls, resolutions: Iterable[Resolution], prepare_s: float, postprocess_s: float) -> Self:
        """Return the same times for all of these resolutions."""
        sizes = tuple(resolutions)
        return cls(dict.fromkeys(sizes, prepare_s), dict.fromkeys(sizes, postprocess_s))

    @classmethod
    def measured(cls, records: Iterable[RequestRecord]) -> Self:
        """Return the means over the completed requests of a run.

        Decoding counts from the time at which both the request and the stage were ready, as images are decoded one by
        one.

        Raises:
            RunError: no request was completed.
        """
        prepare: dict[Resolution, list[float]] = {}
        postprocess: dict[Resolution, list[float]] = {}
        free_s = 0.0
        done = [record for record in records if record.status == "completed"]
        if not done:
            raise RunError("no request was completed, so there are no stage times to take from the run")
        for record in sorted(done, key=lambda record: record.finish_s or 0.0):
            times = (record.prepare_start_s, record.prepare_end_s, record.denoise_end_s, record.finish_s)
            prepare_start_s, prepare_end_s, denoise_end_s, finish_s = (time_s or 0.0 for time_s in times)
            prepare.setdefault(record.resolution, []).append(prepare_end_s - prepare_start_s)
            postprocess.setdefault(record.resolution, []).append(finish_s - max(denoise_end_s, free_s))
            free_s = finish_s
        return cls(
            {resolution: fmean(values) for resolution, values in prepare.items()},
            {resolution: fmean(values) for resolution, values in postprocess.items()},
        )

    def prepare_of(self, resolution: Resolution) -> float:
        """Return the seconds of the prepare stage."""
        return _nearest(self.prepare_s, resolution)

    def postprocess_of(self, resolution: Resolution) -> float:
        """Return the seconds of the postprocess stage."""
        return _nearest(self.postprocess_s, resolution)


def standalone_latency_s(
    request: Request, predictor: StepLatencyPredictor, times: StageTimes, *, scale: float = 1.0
) -> float:
    """Return the seconds of a request served alone: all stages in turn, with predicted steps multiplied by `scale`."""
    work = work_of(request.resolution, request.pixels_seen / request.resolution.pixels)
    steps_s = request.num_steps * (predictor.step_latency_s((work,)) * scale)
    return times.prepare_of(request.resolution) + steps_s + times.postprocess_of(request.resolution)


def _nearest(times_s: Mapping[Resolution, float], resolution: Resolution) -> float:
    if resolution in times_s or not times_s:
        return times_s.get(resolution, 0.0)
    return times_s[min(times_s, key=lambda size: (abs(size.pixels - resolution.pixels), size))]
