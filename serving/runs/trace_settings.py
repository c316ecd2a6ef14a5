"""Settings of a trace, and the requests drawn from them. This module imports no torch."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution, parse, parse_list
from ..models.defaults import ModelDefaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...data.edits import Reference
    from ...data.traces.curves import Curve
    from ...data.traces.edits import EditDraws
    from ...data.traces.recordings import Recording
    from ..families.geometry import Geometry

_DEFAULT_NUM_PROMPTS = 32
_DEFAULT_GAMMA_CV = 2.0


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


def draw_requests(
    settings: TraceSettings,
    defaults: ModelDefaults,
    *,
    geometry: "Callable[[], Geometry] | None" = None,
    name: str = "the model",
) -> list[Request]:
    """Draw or read the trace.

    Args:
        settings: settings of the trace.
        defaults: defaults of the model.
        geometry: returns the geometry that edits must fit, whose images and masks are then read; None if the trace may
            not contain edits.
        name: name of the model.

    Raises:
        UsageError: if a setting is out of its range or a file is malformed (file and line are named), or an edit does
            not fit or is not allowed.
    """
    requests = draw_trace(settings, defaults)
    traced = next((request for request in requests if request.traced is not None), None)
    if traced is None:
        return requests
    if geometry is None:
        raise UsageError(
            f"request {traced.request_id} of the trace is an edit, and only psctl serve, simulate and bench slo take "
            "those, without a cascade"
        )
    from ...data.traces.edits import image_of, with_pixels

    known = geometry()
    requests = list(map(with_pixels, with_references(requests, known, name, image_of)))
    for request in requests:
        known.check_edit(request)
    return requests


def draw_for_simulation(
    settings: TraceSettings, defaults: ModelDefaults, geometry: "Callable[[], Geometry]", name: str = "the model"
) -> list[Request]:
    """Draw or read the trace, with references that have sizes alone: its images are not read. Raises as
    `draw_requests`, except for masks.
    """
    requests = draw_trace(settings, defaults)
    if all(request.traced is None for request in requests):
        return requests
    return with_references(requests, geometry(), name, blank_image)


def with_references(
    requests: "Sequence[Request]",
    geometry: "Geometry",
    name: str,
    image_of: "Callable[[str, Resolution], NDArray[np.uint8]]",
) -> list[Request]:
    """Return the requests of a trace with the images that they show to the model.

    Args:
        requests: requests of a trace.
        geometry, name: geometry and name of the model.
        image_of: reads an image that the trace names, for a request of this resolution.

    Raises:
        UsageError: the model does not take the references, or a file cannot be read.
    """
    rule, multiple = geometry.references, geometry.size_multiple

    @cache
    def fitted(image: str, resolution: Resolution) -> "Reference":
        assert rule is not None
        return rule.fitted(image_of(image, resolution), multiple)

    def seen_by(request: Request) -> "tuple[Reference, ...]":
        traced, size = request.traced, request.resolution
        if traced is None or (rule is None and traced.mask and not traced.references):
            return ()
        if rule is None:
            raise UsageError(f"request {request.request_id} is drawn from references, but {name} takes none")
        others = tuple(fitted(image, size) for image in traced.references)
        if traced.mask:
            return rule.beside(image_of(traced.image, size), others)
        return fitted(traced.image, size), *others

    found = [replace(request, references=seen_by(request)) for request in requests]
    for request in found:
        geometry.check_references(request, name)
    return found


def blank_image(image: str, resolution: Resolution) -> "NDArray[np.uint8]":
    """Return a black image of the size of an image that a trace names, for what depends on sizes alone. Raises
    UsageError if a file cannot be read.
    """
    import numpy as np

    from ...data.traces.edits import size_of_image

    width, height = size_of_image(image, resolution)
    return np.broadcast_to(np.uint8(0), (height, width, 3))


def draw_trace(settings: TraceSettings, defaults: ModelDefaults) -> list[Request]:
    """Draw or read the trace, with edits as the trace names them, without their pixels. Raises as `draw_requests`,
    except for edits.
    """
    slo_of = parse_slo(settings.slo)
    return [
        request if request.slo_s is not None else replace(request, slo_s=slo_of(request.resolution))
        for request in _without_slos(settings, defaults)
    ]


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


def _without_slos(settings: TraceSettings, defaults: ModelDefaults) -> list[Request]:
    """Draw or read the trace without adding SLOs; only lines of a file that name one have it."""
    # Imported here, because the command line reads the settings' defaults, and its help must not wait for numpy.
    from ...data.prompts.captions import load_prompts
    from ...data.traces import files, traces
    from ...data.traces.draws import TraceDefaults, parse_mix
    from ...data.traces.workloads import DATASET_C

    resolutions = defaults.resolutions if settings.resolutions is None else parse_list(settings.resolutions)
    mix = None if settings.mix is None else parse_mix(settings.mix, resolutions)
    steps: int | tuple[int, ...] | None = settings.num_inference_steps
    scale = defaults.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
    for option, value, wanted in (
        ("--cv", settings.cv, "gamma"),
        ("--amplitude", settings.amplitude, "diurnal"),
        ("--period", settings.period_s, "diurnal"),
        ("--curve", settings.curve, "shape"),
        ("--rate-range", settings.rate_range, "shape"),
    ):
        if value is not None and settings.trace != wanted:
            raise UsageError(f"{option} is {value}, but it belongs to --trace {wanted}, not {settings.trace}")
    kind = traces.TRACE_KINDS.get(settings.trace)
    for option, value in (("--arrivals", settings.arrivals), ("--owners", settings.owners)):
        if value is not None and kind != "recorded":
            raise UsageError(f"{option} is {value}, but it belongs to recorded traces, not to --trace {settings.trace}")
    if settings.speed is not None and kind not in (None, "recorded"):
        raise UsageError(f"--speed is {settings.speed:g}, but it belongs to recorded traces and trace files")
    if settings.trace == "dataset-c":
        if mix is not None:
            raise UsageError(f"--mix is {settings.mix}, but --trace dataset-c has its own: omit it")
        resolutions = DATASET_C.sizes_on(resolutions, defaults.default_resolution)
        mix = DATASET_C.weights
        steps = DATASET_C.steps if steps is None else steps
    steps = defaults.num_inference_steps if steps is None else steps
    prompts, edits = load_prompts(settings.prompts), settings.edits.to_draws()
    if kind is None:
        file_defaults = TraceDefaults(prompts, resolutions, mix, steps, scale, settings.seed, edits=edits)
        requests = files.load_trace(settings.trace, defaults=file_defaults)
        if settings.from_zero or settings.speed is not None:
            speed = 1.0 if settings.speed is None else settings.speed
            requests = traces.retime(requests, speed=speed, from_zero=settings.from_zero)
        return traces.limit_trace(requests, num_prompts=settings.num_prompts, duration_s=settings.duration_s)
    swing = {"amplitude": settings.amplitude, "period_s": settings.period_s}
    recording = _recording(settings, resolutions, defaults) if kind == "recorded" else None
    config = traces.TraceConfig(
        kind=kind,
        request_rate=settings.request_rate,
        num_prompts=settings.with_length(_DEFAULT_NUM_PROMPTS).num_prompts,
        duration_s=settings.duration_s,
        cv=1.0 if kind != "gamma" else _DEFAULT_GAMMA_CV if settings.cv is None else settings.cv,
        resolutions=resolutions,
        mix=mix,
        num_inference_steps=steps,
        guidance_scale=scale,
        seed=settings.seed,
        arrivals_s=() if recording is None else recording.arrivals_s,
        fields=() if recording is None else recording.fields,
        speed=settings.speed,
        curve=_curve(settings) if kind == "shape" else None,
        edits=edits,
        **{name: value for name, value in swing.items() if value is not None},
    )
    return traces.generate_trace(config, prompts)


def _recording(settings: TraceSettings, served: "Sequence[Resolution]", defaults: ModelDefaults) -> "Recording":
    """Read a recorded trace, with its sizes fitted to the served ones."""
    from ...data.traces.recordings import Selection, read_recording
    from ...data.traces.workloads import DIFFUSIONDB_NATIVE, fit_sizes

    if settings.arrivals is None:
        raise UsageError(f"--trace {settings.trace} replays recorded arrivals: name their file with --arrivals")
    selection = Selection(settings.owners, settings.num_prompts, settings.seed)
    recording = read_recording(settings.trace, settings.arrivals, selection)
    given = {
        "prompt": settings.prompts,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
    }
    replaced = {name for name, value in given.items() if value is not None}
    sizes = [each["resolution"] for each in recording.fields if "resolution" in each]
    if sizes and settings.mix is not None:
        raise UsageError(f"--mix is {settings.mix}, but --trace {settings.trace} has sizes of its own: omit it")
    fitted = fit_sizes({*sizes}, served, defaults.default_resolution, DIFFUSIONDB_NATIVE)
    return replace(
        recording,
        fields=tuple(
            {
                name: fitted[value] if name == "resolution" else value
                for name, value in each.items()
                if name not in replaced
            }
            for each in recording.fields
        ),
    )


def _curve(settings: TraceSettings) -> "Curve":
    from ...data.traces.curves import Curve

    if settings.duration_s is None or settings.rate_range is None:
        raise UsageError("a shape trace needs its least and greatest rate, as --rate-range 1:8, and its --duration")
    ends = settings.rate_range.split(":")
    try:
        low, high = map(float, ends)
    except ValueError as error:
        raise UsageError(f"--rate-range is {settings.rate_range!r}, but it must be two rates, as 1:8") from error
    curve = Curve.in_the_box() if settings.curve is None else Curve.read(settings.curve)
    return curve.scaled(low, high, settings.duration_s)


def check_slo_scale(slo_scale: float) -> None:
    """Raise UsageError unless an SLO scale is more than 0 and finite."""
    if not 0 < slo_scale < math.inf:
        raise UsageError(f"SLO scale is {slo_scale:g}, but it must be more than 0 and finite")
