"""Cache schedules: which steps of a request the model computes, known before it begins.

What the model would say at a step between is forecast from the last two steps that it took, along the line through
both, followed the less far the longer it is (`shares`). So a request is no more than a shorter walk through the same
noise levels: the sampler folds the steps that are forecast into the one before them
(`serving.samplers.skipping`), and batches, recorded passes, predictors and schedulers see the computed steps alone.

Which steps these are is searched by dynamic programming over what requests without a cache have left
(`search_plans`). This module imports no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.requests import Request
from ...data.tables.block_facts import ProfiledModel

Floats = NDArray[np.float64]
_KIND, _FORMAT = "cache schedule", 1


class Gap(NamedTuple):
    """A computed step and the forecast ones behind it.

    Attributes:
        step: that is computed.
        end: the next step that is.
        shares: (end - step,) by step, how far the line from the computed step before through this one is followed, in
            units of the distance between the two; 0 at the computed step itself.
    """

    step: int
    end: int
    shares: tuple[float, ...]


def share_followed(skipped: ArrayLike, gap: ArrayLike) -> Floats:
    """How far a forecast follows the line through the last two computed steps, in units of their distance: the less far
    the longer the line is, and never further than the two are apart.

    Source: TaylorSeer (arXiv 2503.06923), its first order, on the output of the model in place of those of its layers.
    Undamped, as there, forecasts of long gaps are worse than none with `emoji-3`; fading like this, they are better
    than none and than plain reuse with both bundled models.

    Args:
        skipped: steps since the last computed one.
        gap: from the one before it to that one.
    """
    return np.asarray(skipped / np.add(skipped, gap), dtype=np.float64)


def shares(gap: int, length: int) -> Floats:
    """How far forecasts follow the line through two computed steps that lie `gap` apart, at the second and the
    `length` - 1 steps behind it.
    """
    return share_followed(np.arange(length), gap)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps that are computed, of one number of steps.

    Attributes:
        num_steps: of the request.
        steps: ascending, from 0.

    Raises:
        UsageError: a step is not one of the request's, or they are not in order.
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
        """Every step is computed."""
        return cls(num_steps, tuple(range(num_steps)))

    @property
    def saved_share(self) -> float:
        """Share of the steps that are not computed."""
        return 1 - len(self.steps) / self.num_steps

    def scaled(self, num_steps: int) -> "StepPlan":
        """The plan for another number of steps: computed are those nearest to the same shares of the way."""
        if num_steps == self.num_steps:
            return self
        ratio = (num_steps - 1) / max(1, self.num_steps - 1)
        return StepPlan(num_steps, tuple(sorted({round(step * ratio) for step in self.steps})))

    def begun_at(self, first: int) -> "StepPlan":
        """The plan of a request that leaves out its first steps: it computes two, and then as planned."""
        if not first:
            return self
        left = self.num_steps - first
        steps = {0, min(1, left - 1), *(step - first for step in self.steps if step > first)}
        return StepPlan(left, tuple(sorted(steps)))

    def gaps(self) -> list[Gap]:
        """The computed steps with what is forecast behind each."""
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
        facts: what it was made for.
        plans: by number of steps, at least one.
        report: figures of the search, as JSON.
    """

    facts: ProfiledModel
    plans: Mapping[int, StepPlan]
    report: Mapping[str, Any] = field(default_factory=dict)

    def plan_of(self, num_steps: int, first: int = 0) -> StepPlan:
        """The plan for a number of steps of which the `first` are left out: where none was searched, that of the
        nearest number, scaled.
        """
        nearest = min(self.plans, key=lambda known: (abs(math.log(known / num_steps)), known))
        return self.plans[nearest].scaled(num_steps).begun_at(first)

    def skips(self, request: Request) -> bool:
        """Whether steps of a request are skipped: not where it wants no cache, or edits over a template, whose records
        are of all steps.
        """
        return request.cache and (request.edit is None or request.edit.template is None)

    def num_computed(self, request: Request) -> int:
        """How many steps of a request are computed."""
        if not self.skips(request):
            return request.num_steps
        first = request.num_inference_steps - request.num_steps
        return len(self.plan_of(request.num_inference_steps, first).steps)

    def save(self, path: str | Path) -> None:
        """Write the schedule, atomically, as JSON that people may edit. Raises OSError."""
        plans = {str(num_steps): list(plan.steps) for num_steps, plan in sorted(self.plans.items())}
        head = {"kind": _KIND, "format": _FORMAT, **asdict(self.facts)}
        write_json(Path(path), {**head, "plans": plans, "report": self.report})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a schedule.

        Raises:
            UsageError: the file is missing, or no whole schedule.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"there is no cache schedule {path}; search one with: psctl train-predictor schedule")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["kind"] != _KIND or content["format"] != _FORMAT:
                raise UsageError(f"it is of kind {content['kind']}, format {content['format']}")
            plans = {
                int(number): StepPlan(int(number), tuple(map(int, steps))) for number, steps in content["plans"].items()
            }
            if not plans:
                raise UsageError("it has no plans")
            facts = ProfiledModel(**{each.name: str(content[each.name]) for each in fields(ProfiledModel)})
            return cls(facts, plans, dict(content.get("report", {})))
        except (UsageError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UsageError(f"{path} is no cache schedule: {what}") from error


def search_plans(gram: Floats, weights: Sequence[float], most: int) -> dict[int, StepPlan]:
    """The best plan for each number of computed steps.

    Latents at the end are a sum of the model's outputs, each times a weight that the sampler gives it. Where a gap is
    forecast, they are off by the sum of its weighted errors; the search minimises the sum over gaps of the squares of
    these, as requests without a cache have it. What an error changes in outputs behind it is left to validation.

    Args:
        gram: (steps, steps) mean over requests of the products of their outputs at two steps.
        weights: (steps,) of the outputs in the final latents.
        most: largest number of computed steps.

    Returns:
        By number of computed steps, from 1.
    """
    num_steps, of = len(weights), np.asarray(weights, dtype=float)
    # By the computed step before (itself for the first one), a computed step, and the next one.
    cost = np.full((num_steps, num_steps, num_steps + 1), np.inf)
    for step in range(num_steps):
        own = np.arange(step, num_steps)
        # Of the outputs times their weights less that of the step, up to each end: their products.
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
