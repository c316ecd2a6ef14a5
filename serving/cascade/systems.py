"""The systems that DiffServe is compared with, its ablations, and itself, each under one name. No torch.

Source: DiffServe section 4.1 (table 1) and section 4.5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...data.errors import UsageError
from .allocators import Allocator, Cluster, DiffServe, Proteus, Shared, Solver, clipper, static
from .dispatcher import Batching
from .enumeration import enumerate_plan
from .milp import Milp
from .problem import DeferralCurve

SolverName = Literal["milp", "enumerate"]


@dataclass(frozen=True, slots=True)
class CascadeKnobs:
    """What a user sets of a system.

    Attributes:
        solver: of allocations; both give the same plans.
        queue_factor: with `diffserve-no-queue`, waiting as a multiple of a batch's duration: 2 as printed, 1 is one
            batch of waiting.
        threshold: of `diffserve-static-threshold`; None for the one that the peak of the trace leaves room for.
        quality: FID at some thresholds, both rising in the first number: `diffserve` then goes by the best of those
            that there is room for, in place of the largest (section 2.2: FID turns up again where nearly all is heavy).
            Empty for the paper's own objective.
    """

    solver: SolverName = "milp"
    queue_factor: float = 2.0
    threshold: float | None = None
    quality: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.queue_factor < float("inf"):
            raise UsageError(f"--queue-factor is {self.queue_factor:g}, but it must be finite and not negative")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"--threshold is {self.threshold:g}, but it must be from 0 to 1")

    def worth(self) -> Callable[[float], float] | None:
        """What `DiffServe` goes by: FID with its sign turned, on lines between the thresholds where it was measured."""
        if not self.quality:
            return None
        thresholds, fids = zip(*self.quality, strict=True)
        return lambda threshold: -float(np.interp(threshold, thresholds, fids))

    def new_solver(self) -> Solver:
        """One that counts its own plans."""
        return Milp() if self.solver == "milp" else enumerate_plan


_Make = Callable[[Cluster, DeferralCurve, float, CascadeKnobs, Solver], Allocator]


@dataclass(frozen=True, slots=True)
class CascadeSystem:
    """Who allocates workers and routes requests.

    Attributes:
        name, about: for users.
        make: its allocator, from what there is, f(t), the peak of the trace in requests a second, what the user has
            set, and a solver.
        batching: whether plans say how large batches are, or `Aimd`.
        needs_peak: whether, with what the user has set, something of it is planned for the peak of the trace.
        is_shared: whether workers serve both models at once.
        has_thresholds: whether each request has a light image first.
    """

    name: str
    about: str
    make: _Make
    batching: Batching = "plan"
    needs_peak: Callable[[CascadeKnobs], bool] = lambda knobs: False
    is_shared: bool = False
    has_thresholds: bool = True

    def allocator(self, cluster: Cluster, curve: DeferralCurve, peak: float, knobs: CascadeKnobs) -> Allocator:
        """What makes its plans. Raises UsageError: not even one light image is in time."""
        for name, slo_s in cluster.slos_s.items():
            least_s = cluster.light.latency_s[name][0]
            if slo_s < least_s:
                raise UsageError(
                    f"the SLO of {name} is {slo_s:.3g} s, but one light image takes {least_s:.3g} s: no plan can be in "
                    "time; raise --slo-scale"
                )
        return self.make(cluster, curve, peak, knobs, knobs.new_solver())


def _static_threshold(
    cluster: Cluster, curve: DeferralCurve, peak: float, knobs: CascadeKnobs, solve: Solver
) -> Allocator:
    threshold = static(cluster, curve, peak, solve).plan.threshold if knobs.threshold is None else knobs.threshold
    return DiffServe(cluster, solve, threshold=threshold)


CASCADE_SYSTEMS: Mapping[str, CascadeSystem] = {
    system.name: system
    for system in (
        CascadeSystem(
            "diffserve",
            "a cascade whose threshold, workers and batch sizes follow the demand (DiffServe)",
            lambda cluster, curve, peak, knobs, solve: DiffServe(cluster, solve, worth=knobs.worth()),
        ),
        CascadeSystem(
            "diffserve-shared",
            "the same where both models are one with different steps: workers mix light and heavy images in a batch",
            lambda cluster, curve, peak, knobs, solve: Shared(cluster, worth=knobs.worth()),
            is_shared=True,
        ),
        CascadeSystem(
            "diffserve-static",
            "the same with one plan, for the peak of the trace",
            lambda cluster, curve, peak, knobs, solve: static(cluster, curve, peak, solve),
            needs_peak=lambda knobs: True,
        ),
        CascadeSystem(
            "proteus",
            "each request to one of the models at random, as many to the heavy one as there is room for (Proteus)",
            lambda cluster, curve, peak, knobs, solve: Proteus(cluster),
            has_thresholds=False,
        ),
        CascadeSystem(
            "clipper-light",
            "all workers have the light model (Clipper)",
            lambda cluster, curve, peak, knobs, solve: clipper(cluster, "light"),
            "aimd",
            has_thresholds=False,
        ),
        CascadeSystem(
            "clipper-heavy",
            "all workers have the heavy model (Clipper)",
            lambda cluster, curve, peak, knobs, solve: clipper(cluster, "heavy"),
            "aimd",
            has_thresholds=False,
        ),
        CascadeSystem(
            "diffserve-static-threshold",
            "diffserve, but the threshold stays (ablation)",
            _static_threshold,
            needs_peak=lambda knobs: knobs.threshold is None,
        ),
        CascadeSystem(
            "diffserve-aimd",
            "diffserve, but batch sizes grow until somebody is late (ablation)",
            lambda cluster, curve, peak, knobs, solve: DiffServe(cluster, solve),
            "aimd",
        ),
        CascadeSystem(
            "diffserve-no-queue",
            "diffserve, but waiting is taken to be a multiple of a batch's duration (ablation)",
            lambda cluster, curve, peak, knobs, solve: DiffServe(cluster, solve, queue_factor=knobs.queue_factor),
        ),
    )
}


def get_cascade_system(name: str) -> CascadeSystem:
    """The system that the user calls `name`. Raises UsageError: there is none."""
    if name not in CASCADE_SYSTEMS:
        raise UsageError(f"system of a cascade is {name!r}, but it must be one of {', '.join(CASCADE_SYSTEMS)}")
    return CASCADE_SYSTEMS[name]
