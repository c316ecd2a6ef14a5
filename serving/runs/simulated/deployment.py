"""Deployments on the virtual clock: the engine of a GPU as the simulator models it, and the GPUs that serve a trace.

This module imports no torch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ....data.errors import UsageError
from ....data.requests import Request
from ....data.traces.traces import assign_slos
from ....training.cache.schedule import CacheSchedule
from ....training.latency.online_correction import OnlineCorrection, bounded
from ...core.metrics import slo_attainment_rate
from ...core.request_state import RequestRecord
from ...editing.costs import EditCosts
from ...scheduling.policies import get_policy
from ...scheduling.routers import DEFAULT_ROUTER
from ...scheduling.systems import System
from ...simulator.distrifusion import PUBLISHED, Speedups
from ...simulator.simulator import SimulationResult, simulate
from ...simulator.stage_times import StageTimes, standalone_latency_s
from ...simulator.step_durations import ProfiledSteps, StepDurations
from ..trace_settings import DEFAULT_SLO_SCALE
from .calibration import Calibration

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
