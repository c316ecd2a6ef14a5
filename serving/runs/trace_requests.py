"""Requests of a trace, drawn or read by its settings. This module imports no torch."""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution, parse_list
from ..models.defaults import ModelDefaults
from .trace_settings import TraceSettings, parse_slo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...data.edits import Reference
    from ...data.traces.curves import Curve
    from ...data.traces.recordings import Recording
    from ..families.geometry import Geometry

_DEFAULT_NUM_PROMPTS = 32
_DEFAULT_GAMMA_CV = 2.0


def draw_requests(
    settings: TraceSettings,
    defaults: ModelDefaults,
    *,
    geometry: "Callable[[], Geometry] | None" = None,
    name: str = "the model",
    sizes_only: bool = False,
) -> list[Request]:
    """Draw or read the trace.

    Args:
        settings: settings of the trace.
        defaults: defaults of the model.
        geometry: returns the geometry that edits must fit, whose images and masks are then read; None if the trace may
            not contain edits.
        name: name of the model.
        sizes_only: whether no image is read, for simulations: references then have sizes alone, and edits by masks
            stay as the trace names them.

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
    requests = with_references(requests, known, name, blank_image if sizes_only else image_of)
    if sizes_only:
        return requests
    requests = list(map(with_pixels, requests))
    for request in requests:
        known.check_edit(request)
    return requests


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
