"""Simulated runs: a trace on the virtual clock, and the searches that plan a deployment. This module imports no torch.

A run leaves in its folder of the workspace what a served one does: `trace.jsonl`, `records.parquet`, `steps.parquet`
(of the first GPU), `summary.json`, `report.html`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from ...data.figures import write_figures
from ...data.files import write_json
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.latency import read_latencies
from ...data.tables.schemas import RECORDS, STEPS, read_frame, read_rows, write_table
from ...data.traces.traces import assign_slos, retime, save_trace
from ...data.workspace import ModelWorkspace
from ...serving.core.metrics import slo_attainment_rate, summarize
from ...serving.core.request_state import RequestRecord
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy
from ...serving.scheduling.step_latency import MemoisedLatency, PerResolutionLatency
from ...serving.scheduling.systems import System
from ...serving.simulator.simulator import SimulationResult, simulate
from ...serving.simulator.stage_times import StageTimes, standalone_latency_s
from ...serving.simulator.step_durations import StepDurations
from ...training.latency.online_correction import OnlineCorrection
from ...training.latency.predictor import LatencyPredictor
from .calibration import step_sources
from .figures import run_figures
from .outside_profile import predictions_outside

MAX_GPUS = 4096
"""Most GPUs that are looked for."""
_RATE_PRECISION = 0.01
_MAX_DOUBLINGS = 40


@dataclass(frozen=True, slots=True)
class Deployment:
    """What serves a simulated trace.

    Attributes:
        system: whose policy, engine, share of steps and allocation of GPUs are simulated; not its cache.
        predictor: seconds of a step on one GPU.
        first: seconds of a step after a request has joined or left, where that is known. Policies are not told, but
            learn it on line as in `psctl serve`; the plain engine has none.
        times: seconds of the other stages.
        num_gpus, max_batch_size: of `simulate`.
        slo_scale: SLO of each request without one: this many times its standalone latency.
    """

    system: System
    predictor: StepLatencyPredictor
    times: StageTimes
    num_gpus: int = 1
    max_batch_size: int = 16
    slo_scale: float = 5.0
    first: StepLatencyPredictor | None = None

    def run(
        self,
        requests: Sequence[Request],
        *,
        num_gpus: int | None = None,
        keep_steps: bool = False,
        on_finish: Callable[[RequestRecord], None] | None = None,
    ) -> tuple[list[Request], SimulationResult]:
        """Simulate a trace; return it with its SLOs, and the result.

        Args:
            requests: the trace, in order of arrival.
            num_gpus: instead of the deployment's own.
            keep_steps, on_finish: of `simulate`.

        Raises:
            UsageError: the trace is empty, a number is out of its range, or the predictor does not know a resolution.
        """
        if not requests:
            raise UsageError("the trace is empty, but it must hold at least one request")
        system, policy = self.system, get_policy(self.system.policy)
        is_plain = system.engine == "plain"
        latency = MemoisedLatency(PerResolutionLatency(self.predictor) if is_plain else self.predictor)
        known: dict[tuple[Resolution, int], float] = {}

        def alone_s(request: Request) -> float:
            shape = (request.resolution, request.num_inference_steps)
            if shape not in known:
                known[shape] = standalone_latency_s(request, latency, self.times)
            return known[shape]

        promised = assign_slos(requests, alone_s, self.slo_scale)
        by_id = {request.request_id: alone_s(request) for request in promised}
        told: StepLatencyPredictor = latency
        durations = None
        if self.first is not None and not is_plain:
            durations = StepDurations(latency, self.first)
            told = OnlineCorrection(latency) if policy.requires_predictor else latency
        result = simulate(
            list(map(system.adapt, promised)),
            policy,
            told,
            durations=durations,
            max_batch_size=self.max_batch_size,
            num_gpus=self.num_gpus if num_gpus is None else num_gpus,
            spans_gpus=system.spans_gpus,
            times=self.times,
            standalone_s=lambda request: by_id[request.request_id],
            keep_steps=keep_steps,
            on_finish=on_finish,
        )
        return promised, result

    def attainment(self, requests: Sequence[Request], *, num_gpus: int | None = None) -> float:
        """SLO attainment of a trace, from 0 to 1. Raises as `run`."""
        rate = slo_attainment_rate(self.run(requests, num_gpus=num_gpus)[1].records)
        assert rate is not None, "every request has an SLO"
        return rate


def load_step_latency(path: Path, *, on_warning: Callable[[str], None] | None = None) -> StepLatencyPredictor:
    """Load step latencies: a fitted predictor (safetensors of `psctl train-predictor latency`) or a table.

    A table is parquet of `psctl profile latency`, or CSV or parquet of another program.

    Args:
        path: the file.
        on_warning: of `LatencyPredictor`.

    Raises:
        UsageError: the file is neither; the message says why.
    """
    if path.suffix.lower() == ".safetensors":
        return LatencyPredictor.load(path, on_warning=on_warning)
    return step_sources(read_latencies(path))[0]


def load_first_steps(path: Path) -> StepLatencyPredictor | None:
    """First steps of a batch, which `psctl profile latency` measures, too; None where a file does not tell them.

    Raises:
        UsageError: as `load_step_latency`.
    """
    return None if path.suffix.lower() == ".safetensors" else step_sources(read_latencies(path))[1]


def load_stage_times(run_dir: Path) -> StageTimes:
    """The mean prepare and postprocess times of a served run.

    Raises:
        UsageError: the folder has no table of records.
        RunError: no request of the run was completed.
    """
    rows = read_rows(run_dir / "records.parquet", RECORDS)
    return StageTimes.measured(RequestRecord.from_row(row) for row in rows)


def simulation_summary(
    result: SimulationResult, deployment: Deployment, *, model: str, dataset: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of a simulated run: those of a served one (`serving.metrics.summarize`), and of its GPUs."""
    records = result.records
    summary = summarize(records, result.duration_s, slo_scale=deployment.slo_scale, model=model, dataset=dataset)
    busy_s = sum(result.busy_s)
    requests_of = [0] * len(result.busy_s)
    for index in result.gpu_of.values():
        requests_of[index] += 1
    num_steps = result.num_steps
    steps_taken = sum(record.num_inference_steps for record in records if record.denoise_end_s is not None)
    summary |= {
        "num_gpus": deployment.num_gpus,
        "num_steps": num_steps,
        "batch_size_mean": steps_taken / num_steps if num_steps else None,
        "step_latency_mean": busy_s / num_steps if num_steps else None,
        "denoise_busy_rate": [busy / result.duration_s if result.duration_s else None for busy in result.busy_s],
        "requests_per_gpu": requests_of,
        "num_decisions": result.num_decisions,
        "scheduling_mean": result.decision_s / result.num_decisions if result.num_decisions else None,
        "max_prepared": result.max_prepared,
        "predictions_outside": predictions_outside(deployment.predictor),
        "was_interrupted": False,
        "config": dict(config),
    }
    return write_figures(summary, run_figures(summary, records))


def write_simulation(
    workspace: ModelWorkspace,
    requests: Sequence[Request],
    result: SimulationResult,
    summary: dict[str, Any],
    *,
    with_report: bool = True,
) -> Path:
    """Write a simulated run into a new folder of the workspace and return it; the summary gets its `run_dir`.

    Raises:
        OSError: something cannot be written.
    """
    run_dir = workspace.new_run("simulate")
    summary["run_dir"] = str(run_dir)
    save_trace(run_dir / "trace.jsonl", requests)
    write_table(run_dir / "records.parquet", RECORDS, (record.to_row() for record in result.records))
    write_table(run_dir / "steps.parquet", STEPS, (row.to_row() for row in result.steps))
    write_json(run_dir / "summary.json", summary)
    if with_report:
        from ..report import write_report

        records, steps = (run_dir / f"{name}.parquet" for name in ("records", "steps"))
        write_report(run_dir, summary, read_frame(records, RECORDS), read_frame(steps, STEPS))
    return run_dir


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found.

    Attributes:
        value: the highest rate in requests per second, or the smallest number of GPUs.
        attainment: SLO attainment there.
        tried: attainment by rate or number of GPUs, in rising order.
    """

    value: float
    attainment: float
    tried: dict[float, float]


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same requests arriving faster or slower, with the shape kept, so that the mean gap is `1 / rate`.

    Raises:
        UsageError: fewer than two requests, or all at one time: they have no rate.
    """
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if not span_s > 0:
        raise UsageError(f"{len(requests)} requests of the trace span no time, so they cannot be scaled to a rate")
    return retime(requests, speed=rate * span_s / (len(requests) - 1), from_zero=True)


def highest_rate(
    deployment: Deployment,
    trace_at: Callable[[float], Sequence[Request]],
    target: float,
    *,
    on_try: Callable[[float, float], None] | None = None,
) -> SearchResult:
    """Find the highest request rate at which the SLO attainment is at least `target`.

    The rate is doubled until it is too high and then bisected to 1 %. Attainment falls with the rate, but not strictly
    from one random trace to the next: what is found holds the target, and a rate at most 1 % above it does not.

    Args:
        deployment: what serves.
        trace_at: the trace at a rate in requests per second.
        target: share of the requests, above 0 and at most 1.
        on_try: told each rate that was tried, and the attainment there.

    Raises:
        UsageError: the target is out of its range, or the trace or a number is.
        RunError: the target is not met at any rate, or at every one.
    """
    _check_target(target)
    tried: dict[float, float] = {}

    def holds(rate: float) -> bool:
        tried[rate] = deployment.attainment(trace_at(rate))
        if on_try is not None:
            on_try(rate, tried[rate])
        return tried[rate] >= target

    # What one GPU manages one by one, times the GPUs, is a scale for where to start.
    example = trace_at(1.0)[0]
    start = deployment.num_gpus / standalone_latency_s(example, deployment.predictor, deployment.times)
    low = high = start
    if holds(start):
        for _ in range(_MAX_DOUBLINGS):
            low, high = high, high * 2
            if not holds(high):
                break
        else:
            raise RunError(
                f"the target of {target:.2%} is met at {high:.3g} requests a second and still is: give more "
                "requests (--num-prompts), so that they last long enough to queue up"
            )
    else:
        for _ in range(_MAX_DOUBLINGS):
            low, high = low / 2, low
            if holds(low):
                break
            if low < start / 1024:
                raise RunError(
                    _infeasible(target, tried[low], f"{low:.3g} requests a second on {deployment.num_gpus} GPUs")
                )
    while high / low > 1 + _RATE_PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return SearchResult(low, tried[low], dict(sorted(tried.items())))


def gpus_needed(
    deployment: Deployment,
    requests: Sequence[Request],
    target: float,
    *,
    on_try: Callable[[float, float], None] | None = None,
) -> SearchResult:
    """Find the smallest number of GPUs with which a trace's SLO attainment is at least `target`, by bisection.

    Args:
        deployment: what serves; its own number of GPUs does not matter.
        requests: the trace.
        target: share of the requests, above 0 and at most 1.
        on_try: told each number that was tried, and the attainment with it.

    Raises:
        UsageError: the target is out of its range, or the trace or a number is.
        RunError: not even one GPU for each request (or `MAX_GPUS`) meets the target.
    """
    _check_target(target)
    tried: dict[float, float] = {}

    def holds(num_gpus: int) -> bool:
        tried[num_gpus] = deployment.attainment(requests, num_gpus=num_gpus)
        if on_try is not None:
            on_try(num_gpus, tried[num_gpus])
        return tried[num_gpus] >= target

    choices = [1, 2, 4, 8] if deployment.system.spans_gpus else list(range(1, min(len(requests), MAX_GPUS) + 1))
    # Doubling first: simulations of very many GPUs are the slow ones.
    low, high = -1, 0
    while not holds(choices[high]):
        if high == len(choices) - 1:
            raise RunError(_infeasible(target, tried[choices[high]], f"{choices[high]} GPUs"))
        low, high = high, min(2 * high + 1, len(choices) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(choices[middle]) else (middle, high)
    return SearchResult(choices[high], tried[choices[high]], dict(sorted(tried.items())))


def _check_target(target: float) -> None:
    if not 0 < target <= 1:
        raise UsageError(f"SLO target is {target:g}, but it must be a share above 0 and at most 1, such as 0.99")


def _infeasible(target: float, reached: float, where: str) -> str:
    return (
        f"the target of {target:.2%} cannot be met: at {where} it is {reached:.2%}; the SLO (--slo-scale) is too short "
        "or the policy cannot do it"
    )
