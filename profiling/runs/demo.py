"""The point in two minutes: one overloaded trace of mixed resolutions, served by diffusers in buckets and by psctl."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...data.errors import RunError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.run_facts import describe
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...serving.models.build import as_plain
from ...serving.models.served import ServedModel
from ...serving.scheduling.policies import StepLatencyPredictor
from ...serving.scheduling.systems import get_system
from ...training.latency.online_correction import OnlineCorrection
from ..machine import run_facts
from ..measure.standalone import shape_of, standalone_latencies
from ..report.comparison import ComparedRun, headline, write_comparison
from ..report.run_data import RunData
from .serve import run_serve
from .step_latencies import latencies_for_serving
from .trace_settings import TraceSettings, draw_requests

SYSTEMS = ("bucketed", "patchedserve")
_WARM_UP, _NEVER_LATE_S = 12, 600.0
"""Requests that each system serves before its run counts, and their SLO."""
_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What is served.

    Attributes:
        duration_s: seconds in which requests arrive.
        load: request rate as a share of what full mixed batches could denoise on this machine. Preparing and decoding
            take their part of it, on a CPU about a third.
        num_inference_steps: of every request.
        slo_scale: SLO of a request: this many times its standalone latency on plain diffusers.
        max_batch_size: requests denoised together.
        seed: of the trace.
    """

    duration_s: float = 15.0
    load: float = 0.65
    num_inference_steps: int = 20
    slo_scale: float = 5.0
    max_batch_size: int = 16
    seed: int = 7


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What a demo gives: the runs in the order of `SYSTEMS`, the page that compares them, and its headline."""

    runs: tuple[ComparedRun, ...]
    page: Path
    headline: str


def run_demo(
    model: ServedModel,
    workspace: ModelWorkspace,
    folder: Path,
    settings: DemoSettings,
    *,
    on_note: _Tell,
    on_warning: _Tell,
    on_start: Callable[[str, Sequence[Request]], Callable[[], None]],
) -> DemoOutcome:
    """Serve the same trace with both systems, one after the other, and write a page that compares them.

    Both are warmed up alike, and share the weights and the SLOs. The rate follows the machine (`DemoSettings.load`).

    Args:
        model: loaded for the patch engine.
        workspace: of the model; both runs go there.
        folder: where the page, its picture and all images go.
        settings: what is served.
        on_note, on_warning: told what happens, and what may be inexact.
        on_start: told the system and its trace when a run begins; gives what is called after each request.

    Raises:
        RunError: a run completed no request.
        KeyboardInterrupt: on Ctrl-C; runs that are finished stay in the workspace.
        OSError: results cannot be written.
    """
    sizes = model.defaults.resolutions
    plain = as_plain(model)
    for served in (plain, model):
        served.tune(sizes, workspace.tables)
    latency = latencies_for_serving(
        model, workspace, sizes, settings.max_batch_size, on_note=on_note, on_warning=on_warning
    )
    most = capacity(latency, sizes, settings)
    rate = settings.load * most
    trace = TraceSettings(
        request_rate=rate,
        duration_s=settings.duration_s,
        num_prompts=round(rate * settings.duration_s),
        num_inference_steps=settings.num_inference_steps,
        seed=settings.seed,
    )
    requests = draw_requests(trace, model.defaults)
    alone_s = standalone_latencies(plain, requests, workspace.tables)
    requests = assign_slos(requests, lambda request: alone_s[shape_of(plain, request)], settings.slo_scale)
    on_note(
        f"{len(requests)} requests of {', '.join(map(str, sizes))} px arrive in {settings.duration_s:g} s: "
        f"{rate:.3g}/s, where denoising alone could take {most:.3g}/s in full batches"
    )
    runs: list[ComparedRun] = []
    for name in SYSTEMS:
        system = get_system(name)
        served = plain if system.engine == "plain" else model
        at_once = replace(trace, request_rate=math.inf, num_prompts=_WARM_UP, seed=settings.seed + 1)
        warm = [replace(request, slo_s=_NEVER_LATE_S) for request in draw_requests(at_once, model.defaults)]
        correction = OnlineCorrection(latency)
        for batch, is_counted in ((warm, False), (requests, True)):
            on_finish = on_start(name, batch) if is_counted else (lambda: None)
            outcome = run_serve(
                served,
                batch,
                system,
                workspace,
                dataset="demo",
                config={**trace.to_config(), "system": name, "policy": system.policy, "engine": system.engine},
                predictor=correction,
                slo_scale=settings.slo_scale,
                max_batch_size=settings.max_batch_size,
                save_dir=folder / name if is_counted else None,
                on_finish=lambda record, on_finish=on_finish: on_finish(),
            )
            if outcome.was_interrupted:
                raise KeyboardInterrupt
        if not any(record.status == "completed" for record in outcome.records):
            raise RunError(f"{name} completed no request: {outcome.records[0].reason}")
        runs.append(
            ComparedRun(
                name,
                system.about if system.cache == served.options.cache.mode else f"{system.about}; the cache is off",
                outcome.summary,
                RunData.of(outcome.summary.get("duration"), outcome.records, outcome.steps),
                {
                    record.request_id: Path(record.image_path)
                    for record in outcome.records
                    if record.image_path is not None
                },
            )
        )
    facts = [describe(run_facts(model).to_json()), f"{len(requests)} requests at {rate:.3g}/s"]
    facts.append(f"SLO {settings.slo_scale:g} times the standalone latency on plain diffusers")
    return DemoOutcome(tuple(runs), write_comparison(folder, runs, facts), headline(runs))


def capacity(latency: StepLatencyPredictor, sizes: Sequence[Resolution], settings: DemoSettings) -> float:
    """Requests per second that denoising could take in full batches, as many of each size."""
    batch = [sizes[index % len(sizes)] for index in range(settings.max_batch_size)]
    return settings.max_batch_size / (settings.num_inference_steps * latency.step_latency_s(batch))
