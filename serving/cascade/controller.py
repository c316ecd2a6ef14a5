"""The controller of a cascade, which samples its load and plans for it; the simulator uses the same class. No torch.

Source: DiffServe sections 3.1 and 3.3.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .allocators import Allocator, Observations
from .deferral import OnlineDeferral
from .demand import MovingAverage
from .legs import LEGS, Leg
from .problem import AllocationPlan

SAMPLE_S, PERIOD_S = 1.0, 5.0


class Controller:
    """Samples arrivals and queues every `SAMPLE_S`, records confidences, and plans every `PERIOD_S`.

    Args:
        allocate: makes the plans.
        profiled: confidences of light images, from the profile.
        demand: expected requests a second at the start.
        costs: cost of the heavy image of each profiled light image; see `deferral_curve`.
        burst: ratio of the latest arrival rate to the demand of the last plan above which a new plan is made at once;
            None to plan only every `PERIOD_S`.

    Attributes:
        plan: the current plan.
        observed: observations that it was made from.
        solve_s: time that it took to make the plan.
    """

    def __init__(
        self,
        allocate: Allocator,
        profiled: Sequence[float],
        *,
        costs: Sequence[float] | None = None,
        demand: float = 0.0,
        burst: float | None = None,
    ) -> None:
        self._allocate, self._burst = allocate, burst
        self._deferral = OnlineDeferral(profiled, costs=costs)
        self._demand, self._planned_demand = MovingAverage(), demand
        self._queues = {leg: MovingAverage() for leg in LEGS}
        self._arrivals = {leg: MovingAverage() for leg in LEGS}
        self._num_arrived, self._num_sent = 0, Counter[Leg]()
        self._planned_at_s = 0.0
        self.observed = Observations(demand, self._deferral.curve)
        self.solve_s = 0.0
        self.plan = self._plan()

    def arrived(self) -> None:
        """Count the arrival of a request."""
        self._num_arrived += 1

    def sent(self, leg: Leg) -> None:
        """Count a request that was sent to a model, be it new or deferred."""
        self._num_sent[leg] += 1

    def scored(self, confidence: float, cost: float) -> None:
        """Record the confidence of a light image, and the cost of its heavy image."""
        self._deferral.note(confidence, cost)

    def sample(self, now_s: float, queues: Mapping[Leg, int]) -> AllocationPlan | None:
        """Take a sample, and return a new plan when one is due, else None. Called every `SAMPLE_S`.

        Args:
            now_s: the current time.
            queues: number of requests that wait for a worker, by model.
        """
        self._demand.note(self._num_arrived / SAMPLE_S)
        for leg in LEGS:
            self._queues[leg].note(queues[leg])
            self._arrivals[leg].note(self._num_sent[leg] / SAMPLE_S)
        self._num_arrived = 0
        self._num_sent.clear()
        is_burst = self._burst is not None and self._demand.latest > self._burst * max(self._planned_demand, 1e-9)
        if now_s - self._planned_at_s < PERIOD_S - 1e-9 and not is_burst:
            return None
        # The average reflects a burst only later.
        demand = max(self._demand.value, self._demand.latest) if is_burst else self._demand.value
        self._planned_at_s, self._planned_demand = now_s, demand
        self.observed = Observations(
            demand,
            self._deferral.curve,
            self._queues["light"].value,
            self._queues["heavy"].value,
            self._arrivals["light"].value,
            self._arrivals["heavy"].value,
            self.plan,
            self.observed.num_workers,
        )
        self.plan = self._plan()
        return self.plan

    def replan(self, num_workers: int) -> AllocationPlan:
        """Make a plan for another number of workers, from the observations of the last plan."""
        self.observed = replace(self.observed, num_workers=num_workers, plan=self.plan)
        self.plan = self._plan()
        return self.plan

    def _plan(self) -> AllocationPlan:
        start_s = time.perf_counter()
        plan = self._allocate(self.observed)
        self.solve_s = time.perf_counter() - start_s
        return plan
