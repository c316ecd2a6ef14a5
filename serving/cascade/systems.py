"""Cascade systems by name: DiffServe, its ablations and its baselines. No torch.

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
    """User options of a system.

    Attributes:
        solver: solver of allocations; both give the same plans.
        queue_factor: waiting time of `diffserve-no-queue` as a multiple of the batch duration: 2 as printed, 1 for
            waiting for one batch.
        threshold: threshold of `diffserve-static-threshold`; None for the largest one that is feasible at the peak of
            the trace.
        quality: pairs of threshold and FID, by ascending threshold. `diffserve` then chooses the feasible threshold
            with the best FID instead of the largest one (section 2.2: FID rises again when nearly all images are
            heavy). Empty for the paper's own objective.
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
        """Return the objective of `DiffServe`: the negative FID, interpolated linearly between measured thresholds.

        Returns None without `quality`.
        """
        if not self.quality:
            return None
        thresholds, fids = zip(*self.quality, strict=True)
        return lambda threshold: -float(np.interp(threshold, thresholds, fids))

    def new_solver(self) -> Solver:
        """Return a new solver; a `Milp` counts its own plans."""
        return Milp() if self.solver == "milp" else enumerate_plan


_Make = Callable[[Cluster, DeferralCurve, float, CascadeKnobs, Solver], Allocator]


@dataclass(frozen=True, slots=True)
class CascadeSystem:
    """A named way to allocate workers and to route requests.

    Attributes:
        name, about: name and description for users.
        make: builds the allocator from the cluster, f(t), the peak of the trace in requests a second, the user options
            and a solver.
        batching: whether plans or `Aimd` set the batch sizes.
        needs_peak: whether the system plans for the peak of the trace under these user options.
        is_shared: whether workers serve both models at once.
        has_thresholds: whether each request gets a light image first.
    """

    name: str
    about: str
    make: _Make
    batching: Batching = "plan"
    needs_peak: Callable[[CascadeKnobs], bool] = lambda knobs: False
    is_shared: bool = False
    has_thresholds: bool = True

    def allocator(self, cluster: Cluster, curve: DeferralCurve, peak: float, knobs: CascadeKnobs) -> Allocator:
        """Return the allocator of the system. Raises UsageError: not even a single light image can be in time."""
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
    """Return the system with this name. Raises UsageError: there is none."""
    if name not in CASCADE_SYSTEMS:
        raise UsageError(f"system of a cascade is {name!r}, but it must be one of {', '.join(CASCADE_SYSTEMS)}")
    return CASCADE_SYSTEMS[name]
