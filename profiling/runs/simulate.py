"""Simulated runs: a trace on the virtual clock. This module imports no torch.

A run writes the same files as a served one to its folder of the workspace; the steps are those of the first GPU.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...data.errors import UsageError
from ...data.figures import write_figures
from ...data.requests import Request
from ...data.run_facts import RunFacts
from ...data.tables.latency import read_latencies
from ...data.tables.schemas import RECORDS, read_rows
from ...data.traces.files import save_trace
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...serving.core.metrics import slo_attainment_rate, summarize
from ...serving.core.request_state import RequestRecord
from ...serving.editing.costs import EditCosts
from ...serving.editing.profile import EditProfile
from ...serving.options import EngineName
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy
from ...serving.scheduling.routers import DEFAULT_ROUTER
from ...serving.scheduling.systems import System
from ...serving.simulator.distrifusion import PUBLISHED, Speedups
from ...serving.simulator.simulator import SimulationResult, simulate
from ...serving.simulator.stage_times import StageTimes, standalone_latency_s
from ...serving.simulator.step_durations import ProfiledSteps, StepDurations
from ...training.cache.schedule import CacheSchedule
from ...training.latency.online_correction import OnlineCorrection, bounded
from ...training.latency.predictor import LatencyPredictor
from .calibration import Calibration, step_sources
from .figures import run_figures
from .outside_profile import predictions_outside
from .run_folder import write_run
from .trace_settings import DEFAULT_SLO_SCALE

_FULL_BATCHES = 20
OnFinish = Callable[[RequestRecord], None] | None


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine as the simulator models it.

    Attributes:
        durations, times: durations of the steps and of the other stages.
        told_scale: initial scale of the online correction of the latencies that policies receive, which are the
            profiled ones of steady steps. The correction learns as on the engine.
        schedule: schedule of the steps that are computed; None if all are.
    """

    durations: StepDurations
    times: StageTimes
    told_scale: float = 1.0
    schedule: CacheSchedule | None = None

    @classmethod
    def of(cls, steps: ProfiledSteps, calibration: Calibration | None = None, times: StageTimes | None = None) -> Self:
        """Return an engine with profiled steps.

        Without a calibration, steps last as long as in the profile, and the other stages as long as in `times`.
        """
        if calibration is None:
            return cls(StepDurations(steps), times or StageTimes())
        return cls(calibration.durations(steps), calibration.times, calibration.told_scale)

    def slowed(self, factor: float) -> Self:
        """Return the engine with steps that last `factor` times as long."""
        scales = {size: scale * factor for size, scale in self.durations.scales.items()}
        reuse = self.durations.reuse
        durations = replace(
            self.durations,
            scales=scales,
            first_scale=self.durations.first_scale * factor,
            reuse=None if reuse is None else replace(reuse, aside_s=reuse.aside_s * factor),
        )
        return replace(self, durations=durations, told_scale=self.told_scale * factor)

    def standalone_s(self, request: Request) -> float:
        """Return the latency in seconds of a request that is served alone."""
        durations = self.durations
        return standalone_latency_s(request, durations.steps.policy_latency, self.times, scale=durations.scale_of(1))

    def capacity(self, system: System, requests: Sequence[Request], max_batch_size: int, num_gpus: int = 1) -> float:
        """Return the requests per second that a system completes while such requests queue. Raises as `serve`."""
        times = math.ceil(_FULL_BATCHES * max_batch_size * num_gpus / len(requests))
        many = [
            replace(request, request_id=index, arrival_s=0.0, slo_s=None)
            for index, request in enumerate(itertools.chain.from_iterable([requests] * times))
        ]
        result = self.serve(system, many, self.standalone_s, max_batch_size, num_gpus)
        return len(many) / result.duration_s

    def serve(
        self,
        system: System,
        requests: Sequence[Request],
        standalone_s: Callable[[Request], float],
        max_batch_size: int,
        num_gpus: int,
        *,
        keep_steps: bool = False,
        on_finish: OnFinish = None,
        speedups: Speedups = PUBLISHED,
        router: str = DEFAULT_ROUTER,
        edits: EditCosts | None = None,
    ) -> SimulationResult:
        """Simulate a trace whose requests have SLOs.

        Args:
            system: system whose policy, share of steps and allocation of GPUs are simulated.
            requests: requests as submitted, before the system adapts them.
            standalone_s, max_batch_size, num_gpus, keep_steps, on_finish, router, edits: as in `simulate`.
            speedups: speed-ups of all GPUs together, used if the system spans them.

        Raises:
            UsageError: the latencies do not cover a resolution, or there is no such router.
        """
        policy = get_policy(system.policy)
        predictor = self.durations.steps.policy_latency
        if policy.requires_predictor and not self.durations.is_as_profiled:
            # A calibration on a busy machine may exceed the range that a correction can learn.
            predictor = OnlineCorrection(predictor, scale=bounded(self.told_scale), after_s=self.times.postprocess_s)
        alone_s = {request.request_id: standalone_s(request) for request in requests}
        return simulate(
            list(map(system.adapt, requests)),
            policy,
            predictor,
            durations=self.durations,
            max_batch_size=max_batch_size,
            num_gpus=num_gpus,
            speedups=speedups if system.spans_gpus else None,
            times=self.times,
            router=router,
            edits=edits,
            schedule=self.schedule,
            standalone_s=lambda request: alone_s[request.request_id],
            keep_steps=keep_steps,
            on_finish=on_finish,
        )


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """Configuration that serves a simulated trace.

    Attributes:
        system: system whose policy, engine, share of steps and allocation of GPUs are simulated; also its cache, if the
            engine was calibrated with one.
        engine: engine of one GPU.
        num_gpus, max_batch_size: as in `simulate`.
        slo_scale: SLO of each request without one, as a multiple of its standalone latency.
        speedups: speed-ups of all GPUs together, for systems that span them.
        slower: factor by which steps last longer than in `engine`, while SLOs stay the same.
        alone: plain engine that provides standalone latencies; None uses `engine`.
        router: name of the router that sends requests to GPUs (`serving.scheduling.routers`).
        edits: costs of edits that read records; the steps of `engine` must then come from `StepFile.with_edits`.
    """

    system: System
    engine: SimulatedEngine
    num_gpus: int = 1
    max_batch_size: int = 16
    slo_scale: float = DEFAULT_SLO_SCALE
    speedups: Speedups = PUBLISHED
    slower: float = 1.0
    alone: SimulatedEngine | None = None
    router: str = DEFAULT_ROUTER
    edits: EditCosts | None = None

    def run(
        self, requests: Sequence[Request], *, keep_steps: bool = False, on_finish: OnFinish = None
    ) -> tuple[list[Request], SimulationResult]:
        """Simulate a trace in order of arrival, as `simulate` does. Returns the trace with its SLOs, and the result.

        Raises:
            UsageError: the trace is empty, a number is out of its range, or the predictor does not cover a resolution.
        """
        if not requests:
            raise UsageError("the trace is empty, but it must hold at least one request")
        alone_s = (self.alone or self.engine).standalone_s
        promised = assign_slos(requests, alone_s, self.slo_scale)
        engine = self.engine if self.slower == 1 else self.engine.slowed(self.slower)
        given = self.system, promised, alone_s, self.max_batch_size, self.num_gpus
        result = engine.serve(
            *given,
            keep_steps=keep_steps,
            on_finish=on_finish,
            speedups=self.speedups,
            router=self.router,
            edits=self.edits,
        )
        return promised, result

    def attainment(self, requests: Sequence[Request]) -> float:
        """Return the SLO attainment of a trace, from 0 to 1. Raises as `run`."""
        rate = slo_attainment_rate(self.run(requests)[1].records)
        assert rate is not None, "every request has an SLO"
        return rate


class StepFile(NamedTuple):
    """Step latencies of a file: steady steps, first steps if they were measured, and the circumstances of the
    measurement if they are known.
    """

    steady: StepLatencyPredictor
    first: StepLatencyPredictor | None
    facts: RunFacts | None

    def of(self, engine: EngineName) -> ProfiledSteps:
        """Return the profiled steps of an engine; the plain engine takes a pass for each resolution."""
        return ProfiledSteps(self.steady, self.first, by_resolution=engine == "plain")

    def with_edits(self, profile: EditProfile) -> Self:
        """Return the step latencies combined with those of edits that read records.

        Raises UsageError if the file is known to be of another model, machine or engine than the profile.
        """
        difference = None if self.facts is None else profile.facts.difference(self.facts)
        if difference is not None:
            raise UsageError(
                f"the profile of edits does not go with the step latencies: it {difference}; measure both alike (psctl "
                "profile latency, psctl profile edits)"
            )
        first = None if self.first is None else profile.first_latency(self.first)
        return self._replace(steady=profile.steady_latency(self.steady), first=first)


def load_step_file(path: Path, *, on_warning: Callable[[str], None] | None = None) -> StepFile:
    """Load a fitted predictor (safetensors of `psctl train-predictor latency`) or a table (parquet of `psctl profile
    latency`, CSV or parquet of another program). `on_warning` is as in `LatencyPredictor`.

    Raises:
        UsageError: the file is neither; the message states the reason.
    """
    if path.suffix.lower() == ".safetensors":
        predictor = LatencyPredictor.load(path, on_warning=on_warning)
        return StepFile(predictor, None, predictor.about.circumstances)
    table = read_latencies(path)
    return StepFile(*step_sources(table), table.circumstances)


def load_stage_times(run_dir: Path) -> StageTimes:
    """Return the mean times of the stages of a served run. Raises UsageError if it has no records, and RunError if it
    has no image.
    """
    rows = read_rows(run_dir / "records.parquet", RECORDS)
    return StageTimes.measured(RequestRecord.from_row(row) for row in rows)


def loop_figures(result: SimulationResult) -> dict[str, Any]:
    """Return the figures of the simulated denoise loops of all GPUs, named as the engine's (`serve.engine_figures`)."""
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


def write_simulation(
    workspace: ModelWorkspace,
    requests: Sequence[Request],
    result: SimulationResult,
    summary: dict[str, Any],
    *,
    with_report: bool,
) -> Path:
    """Write a simulated run into a new folder of the workspace and return the folder. Sets `run_dir` of the summary.
    Raises OSError.
    """
    run_dir = workspace.new_run("simulate")
    summary["run_dir"] = str(run_dir)
    save_trace(run_dir / "trace.jsonl", requests)
    write_run(run_dir, result.records, result.steps, summary, with_report=with_report)
    return run_dir
