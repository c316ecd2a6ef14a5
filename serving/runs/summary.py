"""Parts of the summary of a served run that its records do not tell: figures of the denoise loop, and of the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...training.latency.online_correction import OnlineCorrection
from ..scheduling.policies import StepLatencyPredictor
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


def optional_figures(
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
