"""What `psctl bench serve` sends: sizes and steps as the server reports them, SLOs from its standalone latencies. No
torch.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.resolution import Resolution, parse, parse_list
from ...data.traces.workloads import DATASET_C
from ...serving.models.defaults import ModelDefaults
from ...serving.runs.trace_requests import draw_requests
from ...serving.runs.trace_settings import TraceSettings
from .against import SIDES, LoadRound, send_by_turns
from .load import LoadSettings, send_load

Shape = tuple[Resolution, int]
"""Size and number of steps, on which the latency of a request alone depends."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load for one server, or for two by turns.

    Attributes:
        sides: settings of the load of each server.
        trace: settings of the traces. Sizes and steps that they lack are those that the first server reports.
        num_traces: number of traces, with seeds from that of `trace` on.
        config: sizes and steps in place of those of the trace, as in `redrawn`; None for those of the trace.
        num_warmups: number of requests of each shape that are sent alone to each server first.
        warmup_steps: number of steps of these requests; None for as many as in the load.
        slo_scale: SLOs as a multiple of the latency alone on the first server; None for no SLOs.
        compares_images: whether images are compared, which must be kept for it and need seeds.
    """

    sides: tuple[LoadSettings, ...]
    trace: TraceSettings
    num_traces: int = 1
    config: str | None = None
    num_warmups: int = 2
    warmup_steps: int | None = None
    slo_scale: float | None = None
    compares_images: bool = False

    def __post_init__(self) -> None:
        if self.slo_scale is not None and not self.num_warmups:
            raise UsageError("--slo needs --warmup-requests of 1 or more, which measure the latency alone")

    @contextmanager
    def sent(
        self, start: Callable[..., Callable[[], Any]], on_note: Callable[[str], None]
    ) -> Iterator[list[LoadRound]]:
        """Warm the servers up, send all traces to each, and yield the results.

        Images that are kept only to be compared exist within the context.

        Args:
            start: begins a phase, and returns the function to call after each of its requests.
            on_note: called with notes about the servers' parameters.

        Raises:
            RunError: a server does not answer, or draws no request of a shape.
            UsageError: neither the server nor the trace provides sizes and steps, or images that are to be compared
                take no seed.
            KeyboardInterrupt: on Ctrl-C.
        """
        first, *others = self.sides
        name, defaults = model_of(first.base_url, first.key, self.trace)
        names = [name, *(str(card_of(side.base_url, side.key).get("id", "unknown")) for side in others)]
        traces = traces_of(self.trace, defaults, self.config, self.num_traces)
        has_slo = self.slo_scale is not None
        every = [replace(each, slo_s=1.0) if has_slo else each for requests in traces for each in requests]
        sides = [side.discover(every, on_note) for side in self.sides]
        if self.compares_images and (blind := [side.url for side in sides if side.profile.lacks("seed")]):
            raise UsageError(f"--compare-images: {blind[0]} takes no seed, so its images have no partners")
        with ExitStack() as stack:
            folder = first.save_dir
            if folder is None and self.compares_images:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="psctl-images-")))
            if folder is not None and others:
                sides = [replace(side, save_dir=folder / place) for side, place in zip(sides, SIDES, strict=True)]
            if self.num_warmups:
                shapes = shapes_of(every)
                warm = start("requests of the warm-up", self.num_warmups * len(shapes) * len(sides))
                alone_s, *_ = [warm_up(shapes, side, self.num_warmups, self.warmup_steps, warm) for side in sides]
                if self.slo_scale is not None:
                    traces = [with_slos(requests, alone_s, self.slo_scale) for requests in traces]
            expected_s = len(sides) * sum(requests[-1].arrival_s for requests in traces)
            begun = cache(lambda: start("requests", len(every) * len(sides), expected_s=expected_s))
            rounds = send_by_turns(
                traces,
                sides,
                slo_scale=self.slo_scale,
                models=names,
                dataset=self.trace.trace,
                on_finish=lambda record: begun()(),
            )
            yield rounds


def shapes_of(requests: Sequence[Request]) -> dict[Shape, Request]:
    """Return the first request of each shape."""
    found: dict[Shape, Request] = {}
    for request in requests:
        found.setdefault((request.resolution, request.num_inference_steps), request)
    return found


def warm_up(
    shapes: dict[Shape, Request],
    settings: LoadSettings,
    repeats: int,
    num_steps: int | None,
    on_done: Callable[[], None],
) -> dict[Shape, float]:
    """Send requests of each shape alone and return the shortest latency of each in seconds.

    Args:
        shapes: an example request by shape of the load.
        settings: settings of the load; the warm-up does not stream, save or disconnect.
        repeats: number of requests of each shape.
        num_steps: number of steps of the requests; latencies are scaled to those of the load. None for as many as in
            the load.
        on_done: called after each request.

    Raises:
        RunError: no request of a shape is drawn.
    """
    plain = replace(settings, stream=False, disconnect_rate=0.0, save_dir=None)
    alone_s: dict[Shape, float] = {}
    for shape, example in shapes.items():
        steps = num_steps or example.num_inference_steps
        asked = replace(example, request_id=0, arrival_s=0.0, slo_s=None, num_inference_steps=steps)
        records = [send_load([asked], plain, on_finish=lambda record: on_done()).records[0] for _ in range(repeats)]
        known = [record.latency_s for record in records if record.latency_s is not None]
        if not known:
            raise RunError(f"{settings.url} draws no {shape[0]}: {records[-1].reason}")
        alone_s[shape] = min(known) * example.num_inference_steps / steps
    return alone_s


def traces_of(trace: TraceSettings, defaults: ModelDefaults, config: str | None, num: int) -> list[list[Request]]:
    """Return traces with seeds from that of the settings on; no two requests have the same number.

    Args:
        trace: settings of the traces.
        defaults: defaults of the model.
        config: as in `redrawn`; None for the sizes and steps of the trace.
        num: number of traces.

    Raises UsageError: as `draw_requests` and `redrawn`.
    """
    traces: list[list[Request]] = []
    for seed in range(trace.seed, trace.seed + num):
        requests = draw_requests(replace(trace, seed=seed), defaults)
        if config is not None:
            requests = redrawn(requests, config, seed)
        begin = sum(map(len, traces))
        traces.append([replace(each, request_id=begin + place) for place, each in enumerate(requests)])
    return traces


def with_slos(requests: Sequence[Request], alone_s: Mapping[Shape, float], slo_scale: float) -> list[Request]:
    """Return the requests with SLOs of `slo_scale` times the latency of their shape alone."""
    return [replace(each, slo_s=slo_scale * alone_s[each.resolution, each.num_inference_steps]) for each in requests]


def card_of(base_url: str, key: str | None) -> dict[str, Any]:
    """Return what a server says of its model; empty if it says nothing. Raises RunError: it does not answer."""
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = httpx.get(base_url.rstrip("/") + "/models", headers=headers, timeout=30)
        return dict(answer.json()["data"][0]) if answer.status_code == 200 else {}
    except httpx.HTTPError as error:
        raise RunError(f"{base_url} does not answer: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError):
        return {}


def model_of(base_url: str, key: str | None, trace: TraceSettings) -> tuple[str, ModelDefaults]:
    """Return name and defaults of a server's model; if the server does not report them, those of the trace.

    Raises:
        RunError: the server does not answer.
        UsageError: neither the server nor the trace provides sizes and steps.
    """
    card = card_of(base_url, key)
    name = str(card.get("id", "unknown"))
    if "sizes" in card and "defaults" in card:
        sizes = tuple(map(parse, card["sizes"]))
        known = card["defaults"]
        return name, ModelDefaults(known["num_inference_steps"], known["guidance_scale"], parse(known["size"]), sizes)
    steps = DATASET_C.steps[-1] if trace.trace == "dataset-c" else trace.num_inference_steps
    if trace.resolutions is None or steps is None:
        raise UsageError(
            f"{base_url} does not tell the sizes and steps of its model: give --resolutions and --num-inference-steps"
        )
    sizes = parse_list(trace.resolutions)
    largest = max(sizes, key=lambda size: size.pixels)
    return name, ModelDefaults(steps, trace.guidance_scale or 5.0, largest, sizes)


def redrawn(requests: Sequence[Request], config: str, seed: int) -> list[Request]:
    """Return the requests with sizes and steps drawn from a JSON configuration. Raises UsageError: it is malformed."""
    try:
        entries = json.loads(config)
        sizes = [Resolution(entry["width"], entry["height"]).checked() for entry in entries]
        steps = [entry.get("num_inference_steps") for entry in entries]
        weights = [float(entry.get("weight", 1.0)) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--random-request-config is not a list of sizes: {error}") from error
    if not entries or min(weights) < 0 or not sum(weights):
        raise UsageError("--random-request-config needs at least one size with a weight above 0")
    draws = random.Random(seed)
    places = draws.choices(range(len(sizes)), weights, k=len(requests))
    return [
        replace(request, resolution=sizes[place], num_inference_steps=steps[place] or request.num_inference_steps)
        for request, place in zip(requests, places, strict=True)
    ]
