"""One trace, served with graphs by plain diffusers by resolution and by the patch engine.

The trace is Dataset C (`DATASET_C`) with Poisson arrivals and deadlines of three times the standalone latency.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from patchedserve.data.prompts.captions import load_prompts
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.report.html import write_report
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.plain.stepper import PlainStepper
from patchedserve.serving.runs.serve import ServePlan, run_serve
from patchedserve.serving.runs.standalone import standalone_latencies
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.serving.scheduling.systems import get_system

from ..context import Context, Row
from .recorders import CountingRecorder

_SLO_SCALE = 3.0
_MOST_TOGETHER = 12
_SYSTEMS = ("bucketed", "patched-fcfs")
_KEPT = ("slo_attainment_rate", "latency_mean", "latency_p50", "latency_p95", "throughput_qps", "num_steps")
_KEPT += ("completed_requests", "failed_requests", "discarded_requests", "step_latency_mean", "batch_size_mean")
_KEPT += ("per_resolution", "standalone_latency", "duration")


def served(context: Context) -> Iterator[Row]:
    """Yield a row for each system and rate, rate by rate, then one for the patch engine with the earliest deadline
    first.
    """
    scale = context.scale
    runs = [(system, rate) for rate in scale.rates for system in _SYSTEMS]
    runs.append(("patched-edf", scale.rates[0]))
    yield from context.measured(
        (f"{system}, {rate:g}/s", partial(_serve, context, system, rate)) for system, rate in runs
    )


def _serve(context: Context, name: str, rate: float) -> Row:
    scale, model = context.scale, context.model
    trace = generate_trace(
        TraceConfig(
            request_rate=rate,
            num_prompts=scale.num_prompts,
            resolutions=scale.served.sizes,
            mix=scale.served.weights,
            num_inference_steps=scale.served.steps,
            guidance_scale=model.defaults.guidance_scale,
        ),
        load_prompts(),
    )
    workspace = Workspace(context.folder / "workspace").for_model(model.name, str(model.device))
    # One repeat stores them in the workspace; time is short.
    standalone_latencies(model, trace, workspace.tables, num_repeats=1)
    system = get_system(name).overridden(cache="off")
    recorder = CountingRecorder(context.make_recorder(context.device))
    served = _recorded(model, system.engine, recorder)
    outcome = run_serve(
        served,
        trace,
        ServePlan(TraceSettings(request_rate=rate), system, None, _SLO_SCALE, _MOST_TOGETHER),
        workspace,
        write_report=write_report,
        dataset="dataset-c",
        on_start=recorder.reset,  # tuning also records passes
    )
    summary: dict[str, Any] = outcome.summary
    about = {"system": name, "request_rate": rate, "recorded": recorder.recorded, "played": recorder.played}
    about["recording_failure"] = summary.get("recording_failure")
    return about | {key: summary[key] for key in _KEPT}


def _recorded(model: ServedModel, engine: str, recorder: CountingRecorder) -> ServedModel:
    """Return the model on an engine whose passes are recorded."""
    if engine == "plain":
        plain = with_engine(model, EngineOptions("plain", cuda_graphs=False))
        assert isinstance(plain.stepper, PlainStepper)
        plain.stepper.models.captured = CapturedPasses(recorder)
        return plain
    patched = with_engine(model, EngineOptions(cuda_graphs=False))
    patched_stepper(patched).model.use_graphs(recorder)
    return patched
