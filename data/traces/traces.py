"""Traces: requests and their arrivals. Random traces are drawn here; `files` reads and writes trace files.

Arrivals, prompts, resolutions and seeds come from separate generators, all spawned from one seed. Request i is thus
the same image at every rate, and the arrivals at twice the rate are the same arrivals twice as fast, so that runs at
different rates can be compared request by request.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from ..checks import require_counts
from ..errors import UsageError
from ..requests import Request
from ..resolution import Resolution
from .arrivals import diurnal_arrivals, gamma_arrivals, scaled_arrivals
from .curves import Curve
from .draws import RequestDraws, TraceDefaults
from .edits import EditDraws
from .recordings import READERS

ArrivalProcess = Literal["poisson", "gamma", "diurnal", "shape", "recorded"]
TRACE_KINDS: dict[str, ArrivalProcess] = {
    "poisson": "poisson",
    "gamma": "gamma",
    "diurnal": "diurnal",
    "shape": "shape",
    "dataset-c": "poisson",
    **dict.fromkeys(READERS, "recorded"),
}
"""Arrival process of each kind of trace that users may name."""


@dataclass(frozen=True)
class TraceConfig:
    """Configuration of a random trace.

    Attributes:
        kind: "poisson" (exponential gaps), "gamma" (gaps whose coefficient of variation is `cv`), "diurnal" (a Poisson
            process whose rate varies, see `arrivals.diurnal_arrivals`), "shape" (one whose rate follows a curve) or
            "recorded" (recorded arrivals, scaled; see `recordings`).
        request_rate: mean number of arrivals per second; with infinity all arrive at 0.
        num_prompts: number of requests, or None.
        duration_s: time after which no request arrives, or None. With both limits, the first one applies; one is
            required for an endless trace.
        cv: standard deviation of the gaps over their mean; above 1 is bursty. Always 1 except for gamma.
        resolutions, mix, num_inference_steps, guidance_scale, seed, slo_s, edits: as in `TraceDefaults`. By default all
            sizes have equal weights (PatchedServe section 8) and there are no SLOs (see `assign_slos`).
        amplitude: largest deviation of a diurnal trace's rate from its mean, as a share of the mean, up to 1.
        period_s: length of a diurnal trace's day in seconds.
        arrivals_s: arrivals of a recorded trace in seconds, in order. The first `num_prompts` of them are scaled
            to the rate, with their shape kept.
        fields: fields of the requests of a recorded trace that replace drawn ones, for each of `arrivals_s`; empty for
            none.
        speed: speed of a recorded trace relative to that of its recording; None scales it to `request_rate`.
        curve: rate of a shape trace over its whole duration, in requests a second; `request_rate` is ignored.

    Raises:
        UsageError: a field is out of its range, or fields are incompatible.
    """

    kind: ArrivalProcess = "poisson"
    request_rate: float = 1.0
    num_prompts: int | None = 32
    duration_s: float | None = None
    cv: float = 1.0
    resolutions: tuple[Resolution, ...] = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256))
    mix: tuple[float, ...] | None = None
    num_inference_steps: int | tuple[int, ...] = 30
    guidance_scale: float = 4.0
    seed: int = 0
    slo_s: float | None = None
    amplitude: float = 0.8
    period_s: float = 600.0
    arrivals_s: tuple[float, ...] = ()
    fields: tuple[Mapping[str, Any], ...] = ()
    speed: float | None = None
    curve: Curve | None = None
    edits: EditDraws | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ArrivalProcess):
            allowed = ", ".join(get_args(ArrivalProcess))
            raise UsageError(f"trace kind is {self.kind!r}, but it must be one of {allowed}")
        if not self.request_rate > 0:
            raise UsageError(f"request rate is {self.request_rate:g}, but it must be more than 0 requests a second")
        require_counts({"number of prompts": self.num_prompts})
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise UsageError(f"duration is {self.duration_s:g} s, but it must be more than 0 and finite")
        is_endless = self.duration_s is None or math.isinf(self.request_rate)
        if self.num_prompts is None and is_endless and self.kind not in ("recorded", "shape"):
            raise UsageError("the trace never ends: give a number of prompts, or a duration and a finite rate")
        if not 0 < self.cv < math.inf:
            raise UsageError(f"cv is {self.cv:g}, but it must be more than 0 and finite")
        if self.kind != "gamma" and self.cv != 1:
            why = "has a cv of 1" if self.kind == "poisson" else "takes none"
            raise UsageError(f"cv is {self.cv:g}, but a {self.kind} trace {why}: use gamma for another")
        if not 0 <= self.amplitude <= 1:
            raise UsageError(f"amplitude is {self.amplitude:g}, but it must be from 0 to 1")
        if not 0 < self.period_s < math.inf:
            raise UsageError(f"period is {self.period_s:g} s, but it must be more than 0 and finite")
        if self.kind == "diurnal" and math.isinf(self.request_rate):
            raise UsageError("request rate is inf, but a diurnal trace needs a finite one")
        if self.kind == "recorded" and not self.arrivals_s:
            raise UsageError("a recorded trace needs arrivals, but there are none")
        if self.speed is not None:
            check_speed(self.speed)
        if self.kind == "shape" and self.curve is None:
            raise UsageError("a shape trace needs a curve of rates, but there is none")
        self.draws(prompts=["checked only"])

    def draws(self, prompts: Sequence[str]) -> RequestDraws:
        """Return the generators of all parameters but the arrivals, at their start."""
        steps, scale = self.num_inference_steps, self.guidance_scale
        given = prompts, self.resolutions, self.mix, steps, scale, self.seed
        return RequestDraws(TraceDefaults(*given, slo_s=self.slo_s, edits=self.edits))


def generate_trace(config: TraceConfig, prompts: Sequence[str]) -> list[Request]:
    """Draw a trace. The mean gap is exactly `1 / request_rate`; recorded arrivals start at 0, others after one gap.

    Raises UsageError if there are no prompts, or no request arrives within the duration.
    """
    draws = config.draws(prompts)
    requests: list[Request] = []
    for arrival_s in _arrivals(config):
        if len(requests) == config.num_prompts or (config.duration_s is not None and arrival_s > config.duration_s):
            break
        own = config.fields[len(requests)] if config.fields else {}
        requests.append(replace(draws.next(len(requests)), arrival_s=arrival_s, **own))
    if not requests:
        raise UsageError(
            f"no request arrives within {config.duration_s:g} s at {config.request_rate:g} requests a second: "
            "give a longer duration or a higher rate"
        )
    return requests


def _arrivals(config: TraceConfig) -> Iterable[float]:
    if config.kind == "recorded" and config.speed is not None:
        return [arrival_s / config.speed for arrival_s in config.arrivals_s]
    if config.kind == "recorded":
        return scaled_arrivals(config.arrivals_s[: config.num_prompts], config.request_rate)
    rng = np.random.default_rng(config.seed)
    if config.curve is not None:
        return config.curve.arrivals(rng)
    if config.kind == "diurnal":
        return diurnal_arrivals(rng, config.request_rate, config.amplitude, config.period_s)
    return gamma_arrivals(rng, config.request_rate, config.cv)


def limit_trace(
    requests: Sequence[Request], *, num_prompts: int | None = None, duration_s: float | None = None
) -> list[Request]:
    """Return the first `num_prompts` requests among those that arrive within `duration_s` seconds; None for no limit.

    Raises UsageError if a limit is not positive, or no request is left.
    """
    require_counts({"number of prompts": num_prompts})
    if duration_s is not None and not duration_s > 0:
        raise UsageError(f"duration is {duration_s:g} s, but it must be more than 0")
    kept = [request for request in requests if duration_s is None or request.arrival_s <= duration_s][:num_prompts]
    if not kept:
        raise UsageError(f"none of {len(requests)} requests is left within a duration of {duration_s} s")
    return kept


def retime(requests: Sequence[Request], *, speed: float = 1.0, from_zero: bool = False) -> list[Request]:
    """Return the requests, in order of arrival, arriving `speed` times as fast, with unchanged SLOs.

    With `from_zero` the first request arrives at 0, for traces stamped with clock time. Raises UsageError if `speed` is
    not positive and finite.
    """
    check_speed(speed)
    start_s = requests[0].arrival_s if from_zero and requests else 0.0
    return [replace(request, arrival_s=(request.arrival_s - start_s) / speed) for request in requests]


def check_speed(speed: float) -> None:
    """Raise UsageError unless the speed of a trace is more than 0 and finite."""
    if not 0 < speed < math.inf:
        raise UsageError(f"speed is {speed:g}, but it must be more than 0 and finite")


def assign_slos(
    requests: Sequence[Request], standalone_s: Callable[[Request], float], slo_scale: float
) -> list[Request]:
    """Set the SLO of each request without one to `slo_scale` times its standalone latency (PatchedServe section 8: 5
    times). Raises UsageError if `slo_scale` is not positive and finite.
    """
    if not 0 < slo_scale < math.inf:
        raise UsageError(f"SLO scale is {slo_scale:g}, but it must be more than 0 and finite")
    return [
        request if request.slo_s is not None else replace(request, slo_s=slo_scale * standalone_s(request))
        for request in requests
    ]
