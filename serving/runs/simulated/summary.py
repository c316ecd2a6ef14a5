"""Summaries of simulated runs. This module imports no torch."""

from collections.abc import Mapping
from typing import Any

from ....data.figures import write_figures
from ...core.metrics import summarize
from ...simulator.simulator import SimulationResult
from ..figures import run_figures
from ..outside_profile import predictions_outside
from .deployment import SimulatedDeployment


def loop_figures(result: SimulationResult) -> dict[str, Any]:
    """Return the figures of the simulated denoise loops of all GPUs, with the names of the engine's
    (`runs.summary.engine_figures`).
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
    result: SimulationResult, deployment: SimulatedDeployment, *, model: str, dataset: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of a simulated run: those of a served run (`serving.core.metrics.summarize`), and those of its
    GPUs.
    """
    records = result.records
    summary = summarize(records, result.duration_s, slo_scale=deployment.slo_scale, model=model, dataset=dataset)
    requests_of = [0] * len(result.busy_s)
    for index in result.gpu_of.values():
        requests_of[index] += 1
    graphs = deployment.engine.durations.graphs
    if graphs is not None:
        summary["graphs"] = {
            "mode": graphs.mode,
            "keys": result.num_keys,
            "recordings": result.num_recordings,
            "replay_rate": result.num_replays / result.num_steps if result.num_steps else None,
        }
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
