"""Demo in three minutes: one overloaded trace of mixed resolutions, served by bucketed diffusers and by psctl, exactly
and with its cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...data.errors import RunError
from ...data.requests import Request
from ...data.run_facts import describe
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...serving.models.build import as_plain, without_cache
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ...serving.runs.notes import Notify
from ...serving.runs.serve import ServeOutcome, ServePlan, run_serve
from ...serving.runs.standalone import shape_of, standalone_latencies
from ...serving.runs.step_latencies import coarseness_notes, latencies_for_serving
from ...serving.runs.trace_requests import draw_requests
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...serving.scheduling.systems import System, get_system
from ...training.latency.online_correction import OnlineCorrection
from ..measure.for_serving import measure_latencies
from ..report.comparison import ComparedRun, headline, write_comparison
from ..report.html import write_report
from ..report.run_data import RunData

SYSTEMS = ("bucketed", "patched-slack", "patched-schedule")
_BASE = SYSTEMS[0]
_WARM_UP, _NEVER_LATE_S = 32, 600.0
"""Number of requests that warm up each system, all at once, and their SLO in seconds."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of the demo.

    Attributes:
        duration_s: seconds in which requests arrive.
        load: request rate, as a multiple of the rate at which bucketed diffusers serve a queue on this machine.
        num_inference_steps: number of steps of every request.
        slo_scale: SLO of a request as a multiple of its standalone latency on plain diffusers.
        max_batch_size: maximum number of requests in a batch.
        seed: seed of the trace.
    """

    duration_s: float = 15.0
    load: float = 1.3
    num_inference_steps: int = 20
    slo_scale: float = DEFAULT_SLO_SCALE
    max_batch_size: int = 16
    seed: int = 7


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Outcome of a demo: the runs in the order of `SYSTEMS`, the page that compares them, and its headline."""

    runs: tuple[ComparedRun, ...]
    page: Path
    headline: str


def run_demo(
    model: ServedModel,
    workspace: ModelWorkspace,
    folder: Path,
    settings: DemoSettings,
    *,
    on_note: Notify,
    on_warning: Notify,
    on_start: Callable[[str, Sequence[Request]], Callable[[], None]],
) -> DemoOutcome:
    """Serve the same trace with all systems, one after the other, and write a page that compares them.

    All systems have the same warm-up and share the weights and the SLOs. The request rate follows from the throughput
    of bucketed diffusers in the warm-up.

    Args:
        model: model on the patch engine, with or without a cache.
        workspace: workspace of the model, which receives the runs.
        folder: folder for the page, its picture and all images.
        settings: settings of the demo.
        on_note, on_warning: called with notes on progress, and with warnings of inexact results.
        on_start: called with the system and its trace when a run begins; returns the function to call after each
            request.

    Raises:
        RunError: a run completed no request.
        KeyboardInterrupt: on Ctrl-C; runs that are finished stay in the workspace.
        OSError: results cannot be written.
    """
    sizes = model.defaults.resolutions
    models = dict[str, ServedModel](zip(SYSTEMS, (as_plain(model), without_cache(model), model), strict=True))
    for served in models.values():
        served.tune(sizes, workspace.tables, settings.max_batch_size)
    latency = latencies_for_serving(
        model,
        workspace,
        sizes,
        settings.max_batch_size,
        measure=measure_latencies,
        on_note=on_note,
        on_warning=on_warning,
    )
    corrections = {name: OnlineCorrection(latency) for name in SYSTEMS}
    trace = TraceSettings(
        request_rate=math.inf,
        num_prompts=_WARM_UP,
        num_inference_steps=settings.num_inference_steps,
        seed=settings.seed + 1,
    )

    def serve(
        name: str,
        requests: Sequence[Request],
        save_dir: Path | None = None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> tuple[System, ServeOutcome]:
        system = get_system(name)
        outcome = run_serve(
            models[name],
            requests,
            ServePlan(trace, system, None, settings.slo_scale, settings.max_batch_size, save_dir),
            workspace,
            write_report=write_report,
            dataset="demo",
            predictor=corrections[name],
            on_finish=lambda record: on_finish(),
        )
        if outcome.was_interrupted:
            raise KeyboardInterrupt
        if not any(record.status == "completed" for record in outcome.records):
            raise RunError(f"{name} completed no request: {outcome.records[0].reason}")
        return system, outcome

    warm = [replace(request, slo_s=_NEVER_LATE_S) for request in draw_requests(trace, model.defaults)]
    served_at = {name: serve(name, warm)[1].summary["throughput_qps"] for name in SYSTEMS}
    rate = settings.load * served_at[_BASE]
    trace = replace(
        trace,
        request_rate=rate,
        duration_s=settings.duration_s,
        num_prompts=max(1, round(rate * settings.duration_s)),
        seed=settings.seed,
    )
    requests = draw_requests(trace, model.defaults)
    alone_s = standalone_latencies(models[_BASE], requests, workspace.tables, on_doubt=on_warning)
    requests = assign_slos(requests, lambda request: alone_s[shape_of(models[_BASE], request)], settings.slo_scale)
    on_note(
        f"{len(requests)} requests of {', '.join(map(str, sizes))} px arrive in {settings.duration_s:g} s: "
        f"{rate:.3g}/s, {settings.load:g} times what {_BASE} serves of a queue"
    )
    runs: list[ComparedRun] = []
    for name in SYSTEMS:
        system, outcome = serve(name, requests, folder / name, on_start(name, requests))
        runs.append(
            ComparedRun(
                name,
                system.about
                if system.cache in ("off", model.options.cache.mode)
                else f"{system.about}; the cache is off",
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
    facts += coarseness_notes(latency)
    return DemoOutcome(tuple(runs), write_comparison(folder, runs, facts), headline(runs))
