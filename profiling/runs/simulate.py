"""Simulated runs: a trace on the virtual clock. This module imports no torch.

A run leaves in its folder of the workspace what a served one does; the steps are those of the first GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from ...serving.options import EngineName
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy
from ...serving.scheduling.step_latency import MemoisedLatency, PerResolutionLatency
from ...serving.scheduling.systems import System
from ...serving.simulator.simulator import SimulationResult, simulate
from ...serving.simulator.stage_times import StageTimes, standalone_latency_s
from ...serving.simulator.step_durations import StepDurations
from ...training.latency.online_correction import MAX_SCALE, OnlineCorrection
from ...training.latency.predictor import LatencyPredictor
from .calibration import Calibration, step_sources
from .figures import run_figures
from .outside_profile import predictions_outside
from .run_folder import write_run

OnFinish = Callable[[RequestRecord], None] | None


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What the simulator knows of one engine.

    Attributes:
        told: step latencies as policies see them at the start; they learn on line, as on the engine.
        durations, times: how long steps and the other stages last.
        told_scale: what the correction of `told` starts with.
    """

    told: StepLatencyPredictor
    durations: StepDurations
    times: StageTimes
    told_scale: float = 1.0

    @classmethod
    def of(
        cls,
        name: EngineName,
        steady: StepLatencyPredictor,
        first: StepLatencyPredictor | None = None,
        calibration: Calibration | None = None,
        times: StageTimes | None = None,
    ) -> Self:
        """An engine with these profiled latencies of steady and first steps.

        The plain engine takes a forward pass for each resolution, so that only latencies of batches of one resolution
        are looked up, and packs nothing: it has no first steps. Without a calibration, steps last as long as the
        profile says, and the other stages as `times` does.
        """
        if name == "plain":
            steady, first = PerResolutionLatency(steady), None
        if calibration is None:
            return cls(steady, StepDurations(steady, first), times or StageTimes())
        return cls(steady, calibration.durations(steady, first), calibration.times, calibration.told_scale)

    def standalone_s(self, request: Request) -> float:
        """Latency of a request that is served alone."""
        return standalone_latency_s(request, self.durations.steady, self.times, scale=self.durations.scale)

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
    ) -> SimulationResult:
        """Simulate a trace that has its SLOs.

        Args:
            system: whose policy, share of steps and allocation of GPUs are simulated; not its cache.
            requests: as they were asked for.
            standalone_s, max_batch_size, num_gpus, keep_steps, on_finish: of `simulate`.

        Raises:
            UsageError: the latencies do not know a resolution.
        """
        policy = get_policy(system.policy)
        told: StepLatencyPredictor = MemoisedLatency(self.told)
        if policy.requires_predictor and self.durations != StepDurations(self.told):
            # Where the calibration met a machine busy with other things, it may lie beyond what is ever learnt.
            told = OnlineCorrection(told, scale=min(max(self.told_scale, 1 / MAX_SCALE), MAX_SCALE))
        alone_s = {request.request_id: standalone_s(request) for request in requests}
        return simulate(
            list(map(system.adapt, requests)),
            policy,
            told,
            durations=self.durations,
            max_batch_size=max_batch_size,
            num_gpus=num_gpus,
            spans_gpus=system.spans_gpus,
            times=self.times,
            standalone_s=lambda request: alone_s[request.request_id],
            keep_steps=keep_steps,
            on_finish=on_finish,
        )


@dataclass(frozen=True, slots=True)
class Deployment:
    """What serves a simulated trace.

    Attributes:
        system: whose policy, engine, share of steps and allocation of GPUs are simulated; not its cache.
        predictor, first: seconds of a step on one GPU and, where that is known, after a request has joined or left:
            policies are not told, but learn it on line as in `psctl serve`.
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
        self, requests: Sequence[Request], *, keep_steps: bool = False, on_finish: OnFinish = None
    ) -> tuple[list[Request], SimulationResult]:
        """Simulate a trace, which is in order of arrival; return it with its SLOs, and the result. See `simulate`.

        Raises:
            UsageError: the trace is empty, a number is out of its range, or the predictor does not know a resolution.
        """
        if not requests:
            raise UsageError("the trace is empty, but it must hold at least one request")
        engine = SimulatedEngine.of(self.system.engine, MemoisedLatency(self.predictor), self.first, times=self.times)
        promised = assign_slos(requests, engine.standalone_s, self.slo_scale)
        given = self.system, promised, engine.standalone_s, self.max_batch_size, self.num_gpus
        return promised, engine.serve(*given, keep_steps=keep_steps, on_finish=on_finish)

    def attainment(self, requests: Sequence[Request]) -> float:
        """SLO attainment of a trace, from 0 to 1. Raises as `run`."""
        rate = slo_attainment_rate(self.run(requests)[1].records)
        assert rate is not None, "every request has an SLO"
        return rate


class StepFile(NamedTuple):
    """Step latencies of a file: of batches that stay the same and, where they were measured, of first steps; and what
    they were measured on, where that is known.
    """

    steady: StepLatencyPredictor
    first: StepLatencyPredictor | None
    facts: RunFacts | None


def load_step_file(path: Path, *, on_warning: Callable[[str], None] | None = None) -> StepFile:
    """Load a fitted predictor (safetensors of `psctl train-predictor latency`) or a table (parquet of `psctl profile
    latency`, CSV or parquet of another program); `on_warning` as of `LatencyPredictor`.

    Raises:
        UsageError: the file is neither; the message says why.
    """
    if path.suffix.lower() == ".safetensors":
        predictor = LatencyPredictor.load(path, on_warning=on_warning)
        return StepFile(predictor, None, predictor.about.circumstances)
    table = read_latencies(path)
    return StepFile(*step_sources(table), table.circumstances)


def load_stage_times(run_dir: Path) -> StageTimes:
    """The mean times of the stages of a served run. Raises UsageError (it has no records), RunError (no image)."""
    rows = read_rows(run_dir / "records.parquet", RECORDS)
    return StageTimes.measured(RequestRecord.from_row(row) for row in rows)


def loop_figures(result: SimulationResult) -> dict[str, Any]:
    """Figures of the simulated denoise loops of all GPUs, as the engine has them (`serve.engine_figures`)."""
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
    """The figures of a simulated run: those of a served one (`serving.metrics.summarize`), and of its GPUs."""
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
    with_report: bool,
) -> Path:
    """Write a simulated run into a new folder of the workspace and return it; the summary gets its `run_dir`. Raises
    OSError.
    """
    run_dir = workspace.new_run("simulate")
    summary["run_dir"] = str(run_dir)
    save_trace(run_dir / "trace.jsonl", requests)
    write_run(run_dir, result.records, result.steps, summary, with_report=with_report)
    return run_dir
