"""Summaries of runs beyond their records: figures of the denoise loops, served and simulated, and of the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...data.figures import write_figures
from ...training.latency.online_correction import OnlineCorrection
from ..core.metrics import summarize
from ..scheduling.policies import StepLatencyPredictor
from ..simulator.simulator import SimulationResult
from .deployment import Deployment
from .figures import run_figures
from .outside_profile import predictions_outside

if TYPE_CHECKING:
    from ..engine.run_result import RunResult
    from ..models.served import ServedModel


def engine_figures(result: "RunResult") -> dict[str, Any]:
    """Return the figures of the denoise loop: number of steps, mean batch size, share of the time in which it was busy,
    number of the policy's decisions, and the seconds that a decision took.
    """
    busy_s = sum(row.duration_s for row in result.steps)
    num_steps, ranked = len(result.steps), sorted(result.decision_times_s)
    return {
        "num_steps": num_steps,
        "batch_size_mean": sum(row.active for row in result.steps) / num_steps if num_steps else None,
        "step_latency_mean": busy_s / num_steps if num_steps else None,
        "num_decisions": len(ranked),
        "scheduling_mean": fmean(ranked) if ranked else None,
        # The smallest time that at least 95 % of the decisions did not exceed.
        "scheduling_p95": ranked[math.ceil(0.95 * len(ranked)) - 1] if ranked else None,
        "max_prepared": result.max_prepared,
        "denoise_busy_rate": busy_s / result.duration_s if result.duration_s > 0 else None,
        "was_interrupted": result.was_interrupted,
    }


def what_was_learnt(
    model: "ServedModel", predictor: StepLatencyPredictor | None, outside_before: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the parts of a summary that not every run has.

    They are the savings of the caches of prompts and patches, the memory freed by offloading text encoders, the error
    of predicted step latencies, the predictions outside the profile, the reasons why batches failed and why passes
    could not be recorded, and the facts of parallel ranks. `outside_before` is as in `predictions_outside`.
    """
    from ..parallel.stepper import ParallelStepper
    from ..patched.stepper import PatchedStepper
    from ..plain.stepper import PlainStepper

    found: dict[str, Any] = {}
    if model.prompts is not None:
        found["prompt_cache"] = model.prompts.to_json()
    if model.offload is not None:
        found["offload"] = model.offload.to_json(model.pipe)
    if isinstance(predictor, OnlineCorrection):
        found["predictor_drift"] = asdict(predictor.drift())
    outside = predictions_outside(predictor, outside_before)
    if outside is not None:
        found["predictions_outside"] = outside
    if isinstance(model.stepper, PatchedStepper | PlainStepper) and model.stepper.recording_failure is not None:
        found["recording_failure"] = model.stepper.recording_failure
    failures = model.stepper.batch_failures
    if failures.count:
        found["batch_failures"] = asdict(failures)
    if model.cache_stats is not None:
        found["cache"] = model.cache_stats.to_json()
    if isinstance(model.stepper, ParallelStepper):
        found["parallel"] = model.stepper.facts()
    return found


def loop_figures(result: SimulationResult) -> dict[str, Any]:
    """Return the figures of the simulated denoise loops of all GPUs, with the names of the engine's
    (`engine_figures`).
    """
    num_steps, num_decisions = result.num_steps, result.num_decisions
    taken = sum(record.num_inference_steps for record in result.records if record.denoise_end_s is not None)
    return {
        "num_steps": num_steps,
        "batch_size_mean": taken / num_steps if num_steps else None,
        "step_latency_mean": sum(result.busy_s) / num_steps if num_steps else None,
        "scheduling_mean": result.decision_s / num_decisions if num_decisions else None,
        "max_prepared": result.max_prepared,
    }


def simulation_summary(
    result: SimulationResult, deployment: Deployment, *, model: str, dataset: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of a simulated run: those of a served run (`serving.core.metrics.summarize`), and those of its
    GPUs.
    """
    records = result.records
    summary = summarize(records, result.duration_s, slo_scale=deployment.slo_scale, model=model, dataset=dataset)
    requests_of = [0] * len(result.busy_s)
    for index in result.gpu_of.values():
        requests_of[index] += 1
    summary |= {
        "num_gpus": deployment.num_gpus,
        **loop_figures(result),
        "denoise_busy_rate": [busy / result.duration_s if result.duration_s else None for busy in result.busy_s],
        "requests_per_gpu": requests_of,
        "num_decisions": result.num_decisions,
        "predictions_outside": predictions_outside(deployment.engine.durations.steps.steady),
        "was_interrupted": False,
        "config": dict(config),
    }
    return write_figures(summary, run_figures(summary, records))
