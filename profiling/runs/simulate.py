"""Simulated runs: a trace on the virtual clock. This module imports no torch.

A run leaves in its folder of the workspace what a served one does: `trace.jsonl`, `records.parquet`, `steps.parquet`
(of the first GPU), `summary.json`, `report.html`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.figures import write_figures
from ...data.files import write_json
from ...data.requests import Request
from ...data.tables.latency import read_latencies
from ...data.tables.schemas import RECORDS, STEPS, read_frame, read_rows, write_table
from ...data.traces.files import save_trace
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...serving.core.metrics import slo_attainment_rate, summarize
from ...serving.core.request_state import RequestRecord
from ...serving.options import EngineName
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy
from ...serving.scheduling.step_latency import MemoisedLatency, PerResolutionLatency, ScaledLatency
from ...serving.scheduling.systems import System
from ...serving.simulator.simulator import SimulationResult, simulate
from ...serving.simulator.stage_times import StageTimes, standalone_latency_s
from ...serving.simulator.step_durations import StepDurations
from ...training.latency.online_correction import OnlineCorrection
from ...training.latency.predictor import LatencyPredictor
from .calibration import Calibration, step_sources
from .figures import run_figures
from .outside_profile import predictions_outside


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What the simulator knows of one engine.

    Attributes:
        told: step latencies as policies see them at the start; they learn on line, as on the engine.
        durations: how long steps last.
        times: of the other stages.
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
        """An engine with these profiled latencies.

        Args:
            name: the plain engine takes a forward pass for each resolution, so that only latencies of batches of one
                resolution are looked up, and packs nothing: it has no first steps.
            steady, first: of batches that stay the same, and of those that have changed.
            calibration: what a served run has told; None: steps last as long as the profile says.
            times: of the other stages, where there is no calibration.
        """
        if name == "plain":
            steady, first = PerResolutionLatency(steady), None
        if calibration is None:
            return cls(steady, StepDurations(steady, first), times or StageTimes())
        return cls(steady, calibration.durations(steady, first), calibration.times, calibration.told_scale)

    def standalone_s(self, request: Request) -> float:
        """Latency of a request that is served alone."""
        return standalone_latency_s(request, ScaledLatency(self.durations.steady, self.durations.scale), self.times)

    def serve(
        self,
        system: System,
        requests: Sequence[Request],
        standalone_s: Callable[[Request], float],
        *,
        max_batch_size: int = 16,
        num_gpus: int = 1,
        keep_steps: bool = False,
        on_finish: Callable[[RequestRecord], None] | None = None,
    ) -> SimulationResult:
        """Simulate a trace that has its SLOs.

        Args:
            system: whose policy, share of steps and allocation of GPUs are simulated; not its cache.
            requests: as they were asked for.
            standalone_s: latency of each when served alone, for policies that ask for it.
            max_batch_size, num_gpus, keep_steps, on_finish: of `simulate`.

        Raises:
            UsageError: the latencies do not know a resolution.
        """
        policy = get_policy(system.policy)
        told: StepLatencyPredictor = MemoisedLatency(self.told)
        if policy.requires_predictor and self.durations != StepDurations(self.told):
            told = OnlineCorrection(told, scale=self.told_scale)
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
        engine = SimulatedEngine.of(self.system.engine, MemoisedLatency(self.predictor), self.first, times=self.times)
        promised = assign_slos(requests, engine.standalone_s, self.slo_scale)
        result = engine.serve(
            self.system,
            promised,
            engine.standalone_s,
            max_batch_size=self.max_batch_size,
            num_gpus=self.num_gpus if num_gpus is None else num_gpus,
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
        from ..report.html import write_report

        records, steps = (run_dir / f"{name}.parquet" for name in ("records", "steps"))
        write_report(run_dir, summary, read_frame(records, RECORDS), read_frame(steps, STEPS))
    return run_dir
