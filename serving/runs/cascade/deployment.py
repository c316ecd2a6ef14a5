"""A cascade that serves a trace on the virtual clock: systems, SLOs and figures. This module imports no torch."""

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ....data.checks import require_counts
from ....data.errors import UsageError
from ....data.requests import Request, steps_taken
from ....data.resolution import parse
from ....data.traces.traces import assign_slos
from ...cascade.allocators import Allocator, Cluster
from ...cascade.controller import Controller
from ...cascade.deferral import deferral_curve
from ...cascade.dispatcher import Dispatcher, OnLate
from ...cascade.legs import LEGS, Leg
from ...cascade.milp import Milp
from ...cascade.problem import OVERPROVISION
from ...cascade.profile import CascadeProfile, LegProfile
from ...cascade.result import CascadeResult
from ...cascade.simulation import CascadeModel, simulate_cascade
from ...cascade.systems import CascadeKnobs, CascadeSystem
from ...core.request_state import RequestRecord
from ...scheduling.routers import FewestPixels, RandomWorker
from ..trace_settings import check_slo_scale

Balance = Literal["least", "random"]
_PEAK_WINDOW_S = 20.0
"""Length of the window, equal to that of the moving average of demand."""
_BURST = 1.5


@dataclass(frozen=True, slots=True)
class CascadeDeployment:
    """Configuration of a cascade that serves a trace.

    Attributes:
        profile: profile of both models.
        confidences: confidences of the light images of the bank.
        system: system that allocates workers and routes requests.
        num_workers: number of workers, S.
        slo_scale: SLO of each request as a multiple of e(1) of the heavy model.
        overprovision: lambda of equations 2 and 3.
        knobs: parameters of the system.
        balance: which worker of a model gets a request: that with the least pending pixel steps, or any (`random`).
        on_late: treatment of a deferred request that the heavy model cannot finish in time.
        replan_on_burst: whether a second with 1.5 times the planned number of requests triggers a new plan at once.
        skip_light: whether requests go straight to the heavy model where the plan defers nearly all of them.
        reuse_light: whether heavy images start from light ones.
        sizes: resolutions of the light images of the bank, which give each resolution its own threshold; None for one
            threshold for all.
        seed: seed of random choices.

    Raises:
        UsageError: a number is out of its range.
    """

    profile: CascadeProfile
    confidences: Sequence[float]
    system: CascadeSystem
    num_workers: int
    slo_scale: float
    overprovision: float = OVERPROVISION
    knobs: CascadeKnobs = field(default_factory=CascadeKnobs)
    balance: Balance = "least"
    on_late: OnLate = "discard"
    replan_on_burst: bool = False
    skip_light: bool = False
    reuse_light: bool = False
    sizes: Sequence[str] | None = None
    seed: int = 0

    @property
    def legs(self) -> Mapping[Leg, LegProfile]:
        """Profiles of both models as they serve."""
        return self.profile.serving(reuses_light=self.reuse_light)

    def __post_init__(self) -> None:
        require_counts({"number of workers": self.num_workers})
        check_slo_scale(self.slo_scale)
        if not 0 < self.overprovision < math.inf:
            raise UsageError(f"--overprovision is {self.overprovision:g}, but it must be a positive number")
        if self.reuse_light and (self.skip_light or not self.system.has_thresholds):
            what = "--skip-light" if self.skip_light else f"--system {self.system.name}"
            raise UsageError(f"--reuse-light starts from light images, which {what} does not draw before heavy ones")
        light, heavy = (self.legs[leg] for leg in LEGS)
        if self.system.is_shared and (
            light.facts.fingerprint != heavy.facts.fingerprint
            or light.num_steps in (heavy.num_steps, steps_taken(heavy.num_steps, heavy.strength))
            or light.batch_sizes != heavy.batch_sizes
        ):
            raise UsageError(
                f"--system {self.system.name} draws light and heavy images in one batch, so that both must be of one "
                f"model with different steps, but they are {light.facts.model} with {light.num_steps} and "
                f"{heavy.facts.model} with {heavy.num_steps}"
            )

    def of_system(self, system: CascadeSystem) -> "CascadeDeployment":
        """Return this deployment with another system, which reuses light images only if it draws them first."""
        return replace(self, system=system, reuse_light=self.reuse_light and system.has_thresholds)

    def promised(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with their SLOs. Raises UsageError if a resolution was not profiled."""
        return assign_slos(requests, lambda request: self.profile.standalone_s(request.resolution), self.slo_scale)

    def models(self, requests: Sequence[Request]) -> dict[Leg, CascadeModel]:
        """Return both models for the mix of these requests. Raises as `promised`."""
        weights = {name: float(count) for name, count in _mix(requests).items()}
        return self._models_for(weights)

    def run(self, requests: Sequence[Request], places: Sequence[int]) -> "CascadeRun":
        """Serve a trace.

        Args:
            requests: requests with their SLOs.
            places: index of each request's light image in `confidences`.

        Raises:
            UsageError: the trace is empty, a resolution was not profiled, or no plan could be in time.
        """
        parts = self.parts(requests)
        confidence_of = {
            request.request_id: self.confidences[place] for request, place in zip(requests, places, strict=True)
        }
        dispatcher = parts.dispatcher(self)
        result = simulate_cascade(requests, parts.models, dispatcher, confidence_of.__getitem__, self.num_workers)
        return CascadeRun(result, parts.allocator, parts.peak)

    def parts(self, requests: Sequence[Request]) -> "CascadeParts":
        """Return the parts that serve a trace whose requests have SLOs, on either clock. Raises as `run`."""
        if not requests:
            raise UsageError("the trace is empty, but it must hold at least one request")
        # If requests of one resolution have different SLOs, plans use the tightest.
        slos_s: dict[str, float] = {}
        for request in requests:
            assert request.slo_s is not None, "of promised requests"
            name = str(request.resolution)
            slos_s[name] = min(slos_s.get(name, math.inf), request.slo_s)
        chance = random.Random(self.seed)
        draws = {request.request_id: chance.random() for request in requests}
        peak = peak_rate([request.arrival_s for request in requests])
        # The first plan assumes the mean rate of the trace, because no demand has been observed yet.
        duration_s = max(requests[-1].arrival_s - requests[0].arrival_s, 1.0)
        demand = min(peak, len(requests) / duration_s)
        return self._parts(self.models(requests), slos_s, peak, demand, draws.__getitem__)

    def parts_for_clients(self, sizes: Sequence[str]) -> "CascadeParts":
        """Return the parts that serve requests not known in advance. Plans assume equal parts of these resolutions.

        Raises UsageError if the system plans for the peak of a trace, or as `run`.
        """
        if self.system.needs_peak(self.knobs):
            raise UsageError(
                f"--system {self.system.name} plans for the peak of a trace, and over HTTP nobody knows it: "
                "diffserve, proteus, clipper-light or clipper-heavy"
            )
        weights = dict.fromkeys(sizes, 1.0)
        models = self._models_for(weights)
        slos_s = {name: self.slo_scale * self.profile.standalone_s(parse(name)) for name in sizes}
        chance = random.Random(self.seed)
        return self._parts(models, slos_s, 0.0, 0.0, lambda request_id: chance.random())

    def _models_for(self, weights: Mapping[str, float]) -> dict[Leg, CascadeModel]:
        return {leg: profile.model(weights) for leg, profile in self.legs.items()}

    def _parts(
        self,
        models: dict[Leg, CascadeModel],
        slos_s: dict[str, float],
        peak: float,
        demand: float,
        direct: Callable[[int], float],
    ) -> "CascadeParts":
        cluster = Cluster(
            self.num_workers, models["light"].batches, models["heavy"].batches, slos_s, self.overprovision
        )
        by_size = costs = None
        if self.sizes is not None:
            heavy = self.legs["heavy"]
            by_size, costs = heavy.costs(), heavy.costs_of(self.sizes)
        curve = deferral_curve(self.confidences, costs=costs)
        allocator = self.system.allocator(cluster, curve, peak, self.knobs)
        controller = Controller(
            allocator,
            self.confidences,
            costs=costs,
            demand=demand,
            burst=_BURST if self.replan_on_burst else None,
        )
        return CascadeParts(models, controller, allocator, peak, direct, by_size)


class CascadeParts(NamedTuple):
    """Parts that serve a trace.

    They are the models, the controller and its allocator, the peak of the trace, `direct`, and costs by resolution.
    `direct` returns a number from 0 to 1 for a request id; where a plan sends a share of the requests straight to the
    heavy model, that number decides which.
    """

    models: dict[Leg, CascadeModel]
    controller: Controller
    allocator: Allocator
    peak: float
    direct: Callable[[int], float]
    costs: Mapping[str, float] | None

    def dispatcher(
        self,
        deployment: CascadeDeployment,
        *,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
        result: CascadeResult | None = None,
    ) -> Dispatcher:
        """Return a dispatcher of simulated workers or worker processes."""
        return Dispatcher(
            self.models,
            self.controller,
            FewestPixels() if deployment.balance == "least" else RandomWorker(deployment.seed),
            self.direct,
            deployment.on_late,
            deployment.system.batching,
            on_end=on_end,
            skip_light=deployment.skip_light,
            costs=self.costs,
            result=result,
        )


@dataclass(frozen=True, slots=True)
class CascadeRun:
    """Result of a trace, the allocator, and the peak of the trace in requests a second."""

    result: CascadeResult
    allocator: Allocator
    peak: float

    def figures(self) -> dict[str, Any]:
        """Return the figures specific to a cascade, as JSON."""
        result = self.result
        light = [row for row in result.legs if row.leg == "light" and row.status == "completed"]
        scored = [row for row in light if row.threshold is not None]
        served = Counter(result.served_by().values())
        thresholds = [row.plan.threshold for row in result.plans if row.plan.threshold is not None]
        solver = getattr(self.allocator, "solve", None)
        judged = [record for record in result.records if record.slo_met is not None]
        violations = sum(record.slo_met is not True for record in judged)
        return {
            "slo_violation_rate": violations / len(judged) if judged else None,
            "heavy_share": served["heavy"] / served.total() if served else None,
            "deferred_share": sum(row.is_deferred for row in scored) / len(scored) if scored else None,
            "unscored_light": sum(row.confidence is None or math.isnan(row.confidence) for row in scored),
            "threshold_mean": sum(thresholds) / len(thresholds) if thresholds else None,
            "plans": len(result.plans),
            "plans_by_status": dict(Counter(row.plan.status for row in result.plans)),
            "plans_replaced": solver.num_replaced if isinstance(solver, Milp) else None,
            "switches": result.num_switches,
            "wasted_light_s": result.wasted_s,
            "peak_rate": self.peak,
        }


def peak_rate(arrivals_s: Sequence[float], window_s: float = _PEAK_WINDOW_S) -> float:
    """Return the maximum rate in requests a second over any window of `window_s`, or over all of a shorter trace."""
    duration_s = arrivals_s[-1] - arrivals_s[0]
    if duration_s <= window_s:
        return len(arrivals_s) / max(duration_s, 1.0)
    most = max(bisect_right(arrivals_s, start_s + window_s) - index for index, start_s in enumerate(arrivals_s))
    return most / window_s


def _mix(requests: Sequence[Request]) -> Counter[str]:
    return Counter(str(request.resolution) for request in requests)
