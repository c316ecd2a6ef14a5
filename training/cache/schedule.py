"""Cache schedules: the steps of a request that the model computes, fixed before the request begins.

The model's output at a skipped step is forecast from the last two computed steps, along the line through both, damped
more the longer the gap is (`shares`). A request thus becomes a shorter walk through the same noise levels: the sampler
folds the forecast steps into the computed one before them (`serving.samplers.skipping`), and batches, recorded passes,
predictors and schedulers see the computed steps only.

The steps are searched by dynamic programming over statistics of requests without a cache (`search_plans`). This module
imports no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.parsing import parse
from ...data.records import read_json
from ...data.requests import Request
from ...data.tables.block_facts import ProfiledModel

Floats = NDArray[np.float64]
_KIND, _FORMAT = "cache schedule", 1


class Gap(NamedTuple):
    """A computed step and the forecast steps after it.

    Attributes:
        step: the computed step.
        end: the next computed step.
        shares: (end - step,) distance that each forecast follows the line from the previous computed step through this
            one, in units of the distance between the two; 0 at the computed step itself.
    """

    step: int
    end: int
    shares: tuple[float, ...]


def share_followed(skipped: ArrayLike, gap: ArrayLike) -> Floats:
    """Return how far a forecast follows the line through the last two computed steps, in units of their distance.

    The longer the line, the stronger the damping; the result is always below 1.

    Source: TaylorSeer (arXiv 2503.06923), first order, on the output of the model instead of those of its layers.
    Undamped, as there, forecasts over long gaps are worse than none with `emoji-3`; with this damping they are better
    than none and than plain reuse with both bundled models.

    Args:
        skipped: number of steps since the last computed one.
        gap: number of steps between the last two computed ones.
    """
    return np.asarray(skipped / np.add(skipped, gap), dtype=np.float64)


def shares(gap: int, length: int) -> Floats:
    """Return `share_followed` for two computed steps that are `gap` apart, at the second one and the `length` - 1 steps
    after it.
    """
    return share_followed(np.arange(length), gap)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The computed steps for one number of steps.

    Attributes:
        num_steps: number of steps of the request.
        steps: the computed steps, ascending, from 0.

    Raises:
        UsageError: a step is beyond the last one, the steps are not in order, or step 0 is missing.
    """

    num_steps: int
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0] != 0 or list(self.steps) != sorted(set(self.steps)):
            raise UsageError(f"computed steps are {list(self.steps)}, but they must be in order, from 0")
        if self.steps[-1] >= self.num_steps:
            raise UsageError(f"step {self.steps[-1]} is to be computed, but there are {self.num_steps}, from 0")

    @classmethod
    def of_all(cls, num_steps: int) -> Self:
        """Return the plan that computes every step."""
        return cls(num_steps, tuple(range(num_steps)))

    @property
    def saved_share(self) -> float:
        """Share of the steps that are not computed."""
        return 1 - len(self.steps) / self.num_steps

    def scaled(self, num_steps: int) -> "StepPlan":
        """Return the plan for another number of steps: it computes those nearest to the same fractions of the way."""
        if num_steps == self.num_steps:
            return self
        ratio = (num_steps - 1) / max(1, self.num_steps - 1)
        return StepPlan(num_steps, tuple(sorted({round(step * ratio) for step in self.steps})))

    def starting_at(self, first: int) -> "StepPlan":
        """Return the plan of a request that leaves out its `first` steps: it computes the next two, then as planned."""
        if not first:
            return self
        left = self.num_steps - first
        steps = {0, min(1, left - 1), *(step - first for step in self.steps if step > first)}
        return StepPlan(left, tuple(sorted(steps)))

    def gaps(self) -> list[Gap]:
        """Return the computed steps, each with the steps that are forecast after it."""
        found, before = [], None
        for step, end in zip(self.steps, (*self.steps[1:], self.num_steps), strict=True):
            own = np.zeros(end - step) if before is None else shares(step - before, end - step)
            found.append(Gap(step, end, tuple(own.tolist())))
            before = step
        return found


@dataclass(frozen=True, slots=True)
class CacheSchedule:
    """The plans of one model.

    Attributes:
        facts: the model that it was made for.
        plans: plans by number of steps; at least one.
        report: figures of the search, as JSON.
    """

    facts: ProfiledModel
    plans: Mapping[int, StepPlan]
    report: Mapping[str, Any] = field(default_factory=dict)

    def plan_of(self, num_steps: int, first: int = 0) -> StepPlan:
        """Return the plan for a number of steps, of which the `first` are left out.

        If no plan was searched for this number, the plan of the nearest number is scaled.
        """
        nearest = min(self.plans, key=lambda known: (abs(math.log(known / num_steps)), known))
        return self.plans[nearest].scaled(num_steps).starting_at(first)

    def skips(self, request: Request) -> bool:
        """Whether steps of a request are skipped. None are if it disables the cache, or if it edits a template, whose
        records contain all steps.
        """
        return request.cache and (request.edit is None or request.edit.template is None)

    def num_computed(self, request: Request) -> int:
        """Return the number of steps of a request that are computed."""
        if not self.skips(request):
            return request.num_steps
        first = request.num_inference_steps - request.num_steps
        return len(self.plan_of(request.num_inference_steps, first).steps)

    def save(self, path: str | Path) -> None:
        """Write the schedule, atomically, as JSON that may be edited by hand. Raises OSError."""
        plans = {str(num_steps): list(plan.steps) for num_steps, plan in sorted(self.plans.items())}
        head = {"kind": _KIND, "format": _FORMAT, **asdict(self.facts)}
        write_json(Path(path), {**head, "plans": plans, "report": self.report})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a schedule.

        Raises:
            UsageError: the file is missing, or is not a complete schedule.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"there is no cache schedule {path}; search one with: psctl train-predictor schedule")
        content, where = read_json(path, "a cache schedule"), f"{path} is no cache schedule"
        if (content.get("kind"), content.get("format")) != (_KIND, _FORMAT):
            raise UsageError(f"{where}: it is of kind {content.get('kind')}, format {content.get('format')}")
        steps = parse(dict[int, tuple[int, ...]], content.get("plans"), f"{where}: plans")
        plans = {number: {"num_steps": number, "steps": own} for number, own in steps.items()}
        if not plans:
            raise UsageError(f"{where}: it has no plans")
        report = parse(dict[str, Any], content.get("report", {}), f"{where}: report")
        facts = parse(ProfiledModel, content, where)
        return cls(facts, parse(dict[int, StepPlan], plans, f"{where}: plans"), report)


def search_plans(gram: Floats, weights: Sequence[float], most: int) -> dict[int, StepPlan]:
    """Return the best plan for each number of computed steps.

    The final latents are a sum of the model's outputs, each multiplied by a weight of the sampler. The forecasts of a
    gap shift them by the sum of their weighted errors; the search minimises the sum over gaps of the squares of these
    shifts, measured on requests without a cache. The effect of an error on later outputs is left to validation.

    Args:
        gram: (steps, steps) mean over requests of the products of their outputs at two steps.
        weights: (steps,) weights of the outputs in the final latents.
        most: largest number of computed steps.

    Returns:
        Plans by number of computed steps, from 1.
    """
    num_steps, of = len(weights), np.asarray(weights, dtype=float)
    # Indices: the previous computed step (itself for the first one), a computed step, and the next one.
    cost = np.full((num_steps, num_steps, num_steps + 1), np.inf)
    for step in range(num_steps):
        own = np.arange(step, num_steps)
        # Differences of the weighted outputs from the step's own, summed up to each end, and their products.
        each = np.zeros((num_steps - step, num_steps))
        each[np.arange(len(own)), own] = of[own]
        each[:, step] -= of[own]
        reused = np.cumsum(each, axis=0)
        on_reused = reused @ gram
        squares = (on_reused * reused).sum(1)
        if not step:
            cost[0, 0, 1:] = squares
        for before in range(step):
            line = np.cumsum(of[own] * shares(step - before, len(own)))
            slope = gram[step, step] - 2 * gram[step, before] + gram[before, before]
            products = line * (on_reused[:, step] - on_reused[:, before])
            cost[before, step, step + 1 :] = squares - 2 * products + line**2 * slope
    best = np.full((num_steps, num_steps), np.inf)
    best[0, 0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    plans: dict[int, StepPlan] = {}
    for count in range(1, min(most, num_steps) + 1):
        total = best[:, :, None] + cost
        before, last = np.unravel_index(int(total[:, :, num_steps].argmin()), best.shape)
        steps = [int(last)]
        pair = int(before), int(last)
        for origins in reversed(came_from):
            pair = int(origins[pair]), pair[0]
            steps.append(pair[1])
        plans[count] = StepPlan(num_steps, tuple(reversed(steps)))
        came_from.append(total[:, :, :num_steps].argmin(0))
        best = total[:, :, :num_steps].min(0)
    return plans
