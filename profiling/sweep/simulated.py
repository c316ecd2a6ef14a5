"""Runs of a sweep in the simulator, with latencies of their own for the plain and the patch engine. No torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...serving.engine.stepper import EngineName
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy
from ...serving.scheduling.step_latency import MemoisedLatency, PerResolutionLatency, ScaledLatency
from ...serving.scheduling.systems import get_system
from ...serving.simulator.simulator import SimulationResult, simulate
from ...serving.simulator.stage_times import StageTimes, standalone_latency_s
from ...serving.simulator.step_durations import StepDurations
from ...training.latency.online_correction import OnlineCorrection
from ..runs.calibration import Calibration
from .sweep import Served


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


class SimulatedRunner:
    """Serves the runs of a sweep on the virtual clock.

    Args:
        engines: by name; every policy's must be there.
        max_batch_size, num_gpus: of `simulate`.
    """

    def __init__(
        self, engines: Mapping[EngineName, SimulatedEngine], *, max_batch_size: int = 16, num_gpus: int = 1
    ) -> None:
        self._engines = engines
        self._max_batch_size = max_batch_size
        self._num_gpus = num_gpus

    def run(self, policy: str, requests: Sequence[Request], standalone_s: Callable[[Request], float]) -> Served:
        """See `slo_sweep.Runner`. Raises UsageError: the latencies do not know a resolution."""
        system = get_system(policy, is_simulated=True)
        engine, chosen = self._engines[system.engine], get_policy(system.policy)
        alone_s = {request.request_id: standalone_s(request) for request in requests}
        told: StepLatencyPredictor = MemoisedLatency(engine.told)
        if chosen.requires_predictor:
            told = OnlineCorrection(told, scale=engine.told_scale)
        result = simulate(
            list(map(system.adapt, requests)),
            chosen,
            told,
            max_batch_size=self._max_batch_size,
            num_gpus=self._num_gpus,
            spans_gpus=system.spans_gpus,
            times=engine.times,
            durations=engine.durations,
            standalone_s=lambda request: alone_s[request.request_id],
        )
        figures = {
            "num_steps": result.num_steps,
            "step_latency_mean": sum(result.busy_s) / result.num_steps if result.num_steps else None,
            "batch_size_mean": _mean_batch(result),
            "scheduling_mean": result.decision_s / result.num_decisions if result.num_decisions else None,
            "busy_rate": [busy_s / result.duration_s for busy_s in result.busy_s],
            "max_prepared": result.max_prepared,
        }
        return Served(result.records, result.duration_s, figures)


def _mean_batch(result: SimulationResult) -> float | None:
    """Requests in a step, on average."""
    taken = sum(record.num_inference_steps for record in result.records if record.denoise_end_s is not None)
    return taken / result.num_steps if result.num_steps else None


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """Read `calibration.json` of a sweep with `--on both`: calibrations by engine.

    Raises:
        UsageError: the file cannot be read or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the calibration: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: the calibration is damaged: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{path}: the calibration is damaged: it names no engine")
    return {name: Calibration.from_json(data, f"{path}, {name}") for name, data in content.items()}


def standalone_by_resolution(
    resolutions: Sequence[Resolution], alone_s: Callable[[Resolution], float]
) -> dict[str, float]:
    """Standalone latencies by name of the resolution, as they are kept in the head of a sweep."""
    return {str(resolution): alone_s(resolution) for resolution in resolutions}
