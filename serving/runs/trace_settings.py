"""Settings of a trace. This module imports no torch."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import UsageError
from ...data.resolution import Resolution, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...data.traces.edits import EditDraws

DEFAULT_SLO_SCALE = 5.0
"""SLO scale of PatchedServe, section 8.1."""


@dataclass(frozen=True, slots=True)
class TraceEditSettings:
    """Edits among the requests of a trace.

    Attributes:
        share: share of the requests that are edits; 0 for none.
        mask_ratios: name of a published distribution, or a CSV file of ratios (`data.traces.edits.read_mask_ratios`);
            None for `production`.
        templates, template_skew, strength: as in `data.traces.edits.EditDraws`; None for its defaults.
        references: most images that an edit shows to the model in place of a mask; None for edits by masks.
    """

    share: float = 0.0
    mask_ratios: str | None = None
    templates: int | None = None
    template_skew: float | None = None
    strength: float | None = None
    references: int | None = None

    def to_draws(self) -> "EditDraws | None":
        """Return how edits are drawn; None if there are none. Raises UsageError if a setting is given without a share,
        or is out of range.
        """
        from ...data.traces.edits import EditDraws, read_mask_ratios

        by_mask = {"--mask-ratios": self.mask_ratios, "--edit-strength": self.strength}
        given = {
            "num_templates": self.templates,
            "skew": self.template_skew,
            "strength": self.strength,
            "most_references": self.references,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if not self.share:
            if given or self.mask_ratios is not None:
                raise UsageError("mask ratios, templates and their skew are of edits, and there are none: add --edits")
            return None
        if self.references is not None:
            for name, value in by_mask.items():
                if value is not None:
                    raise UsageError(f"{name} is {value}, but it is of edits by masks, not by --edit-references")
        if not 0 < self.share <= 1:
            raise UsageError(f"--edits is {self.share:g}, but it must be a share of the requests, from 0 to 1")
        return EditDraws(self.share, read_mask_ratios(self.mask_ratios or "production"), **given)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of a trace; None leaves a setting to the model or to the kind of trace.

    Attributes:
        trace: one of `TRACE_KINDS`, or the path of a trace file.
        request_rate: mean arrivals per second of a random trace.
        cv: coefficient of variation of the gaps of a gamma trace.
        num_prompts: maximum number of requests.
        duration_s: time in seconds after which no request arrives.
        resolutions, mix: as text, such as "128,192" and "1,2"; used for random traces, and for lines of a file that
            name no resolution. Sizes of a published workload are fitted to the resolutions (`workloads.fit_sizes`).
        prompts: file of prompts; None for the bundled captions.
        num_inference_steps, guidance_scale: for random traces, and for lines of a file that name none. Given
            ones, and given prompts, replace those of a published workload or a recorded trace.
        seed: seed of all random draws.
        from_zero: whether a file's first request is moved to 0, for files stamped with clock time.
        amplitude, period_s: amplitude and period of a diurnal trace (`TraceConfig`).
        arrivals: file of a recorded trace (`recordings.read_recording`).
        owners: users whose requests a recorded trace has, as names or as a number of users to draw; None for all.
        speed: speed of a recorded trace or a trace file relative to that of its recording. None for 1, and for
            `request_rate` with a recorded trace.
        curve: CSV file of the rate of a shape trace over time; None for the bundled one.
        rate_range: minimum and maximum rate of a shape trace, as "1:8"; its length is `duration_s`.
        edits: edits among the requests.
        slo: SLO in seconds of requests that have none, as text: "2.5", or "128x128=1.5,256=3" by resolution. Without
            it, and for resolutions that it does not name, the SLO is a multiple of the standalone latency.
    """

    trace: str = "poisson"
    request_rate: float = 1.0
    cv: float | None = None
    num_prompts: int | None = None
    duration_s: float | None = None
    resolutions: str | None = None
    mix: str | None = None
    prompts: Path | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    from_zero: bool = False
    amplitude: float | None = None
    period_s: float | None = None
    arrivals: Path | None = None
    curve: Path | None = None
    rate_range: str | None = None
    edits: TraceEditSettings = field(default_factory=TraceEditSettings)
    slo: str | None = None
    owners: str | None = None
    speed: float | None = None

    @property
    def dataset(self) -> str:
        """Name of the requests in summaries and reports: the trace, and the file of its prompts."""
        return self.trace if self.prompts is None else f"{self.trace}, {self.prompts.name}"

    def with_length(self, num_prompts: int) -> "TraceSettings":
        """Return the settings with this number of requests, if neither a number, a duration nor a file limits them."""
        from ...data.traces.traces import TRACE_KINDS

        is_limited = self.num_prompts is not None or self.duration_s is not None
        if is_limited or TRACE_KINDS.get(self.trace, "recorded") == "recorded":
            return self
        return replace(self, num_prompts=num_prompts)

    def to_config(self) -> dict[str, Any]:
        """Return the settings by the names of the options, as JSON, for summaries and reports."""
        given = {name.removesuffix("_s"): value for name, value in asdict(self).items() if name != "from_zero"}
        given |= {name: str(given[name]) for name in ("arrivals", "prompts", "curve") if given[name] is not None}
        if not self.edits.share:
            del given["edits"]
        for name in ("slo", "owners", "speed"):
            if given[name] is None:
                del given[name]
        # JSON has no infinity.
        return given | {"request_rate": self.request_rate if math.isfinite(self.request_rate) else "inf"}


def parse_slo(text: str | None) -> "Callable[[Resolution], float | None]":
    """Parse SLOs such as `"2.5"` or `"128x128=1.5,256=3"`. Returns a function from a resolution to seconds, None for
    resolutions that the text does not name. Raises UsageError.
    """
    by_size: dict[Resolution | None, float] = {}
    for part in () if text is None else text.split(","):
        size, _, seconds = part.rpartition("=")
        try:
            value = float(seconds)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (not size and part != text):
            raise UsageError(
                f"--slo is {text!r}, but it must be seconds above 0, as 2.5, or by resolution, as 128x128=1.5,256=3"
            )
        by_size[parse(size) if size else None] = value
    return lambda resolution: by_size.get(resolution, by_size.get(None))


def check_slo_scale(slo_scale: float) -> None:
    """Raise UsageError unless an SLO scale is more than 0 and finite."""
    if not 0 < slo_scale < math.inf:
        raise UsageError(f"SLO scale is {slo_scale:g}, but it must be more than 0 and finite")
