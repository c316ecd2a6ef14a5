"""Search of cache schedules for a model (`psctl train-predictor schedule`).

Requests that compute every step show how well outputs can be forecast from others, which determines the best plan for
each number of computed steps. The number of steps is measured: other requests are drawn without a cache, and again by
plans, until the plan with the fewest steps is found whose images are close enough. The reported figures come from a
third set of requests, used for neither.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from ...data.errors import RunError, UsageError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.tables.block_facts import ProfiledModel
from ...serving.core.prepared import PreparedRequest
from ...serving.models.build import as_plain
from ...serving.models.served import ServedModel
from ...serving.plain.stepper import PlainStepper
from ...serving.samplers.skipping import SkippingSampler
from ...training.cache.schedule import CacheSchedule, Floats, StepPlan, search_plans
from ..metrics.bootstrap import bootstrap_mean
from .quality import similarity

FIRST_SEED = 3 << 29
"""Seed of the first request; no other part of psctl draws with seeds from here on."""
_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Settings of the search for a schedule.

    Attributes:
        target_ssim: mean SSIM to plain diffusers that must be reached.
        num_steps: numbers of steps, each of which gets a plan.
        num_prompts: number of requests that forecasts are fitted to. Half as many select the plan, and another half
            as many provide the reported figures.
        seed: seed of the first request; the others count up.

    Raises:
        UsageError: a value is not allowed.
    """

    target_ssim: float = 0.975
    num_steps: tuple[int, ...] = (20, 30, 50)
    num_prompts: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.target_ssim < 1:
            raise UsageError(f"target-ssim is {self.target_ssim:g}, but it must be between 0 and 1")
        if self.num_prompts < 4:
            raise UsageError(f"num-prompts is {self.num_prompts}, but it must be 4 or more")
        if not self.num_steps or min(self.num_steps) < 2:
            raise UsageError(f"steps are {list(self.num_steps)}, but each must be 2 or more")

    @property
    def num_draws(self) -> int:
        """Maximum number of drawn images, each of all steps or fewer."""
        half = self.num_prompts // 2
        return sum(self.num_prompts + half * (3 + _halvings(number)) for number in self.num_steps)


def search_schedule(
    model: ServedModel, settings: ScheduleSettings, *, on_draw: Callable[[int], None] = lambda count: None
) -> CacheSchedule:
    """Search the plans of a loaded model.

    Args:
        model: loaded model, whose guidance scale and resolutions the requests use.
        settings: settings of the search.
        on_draw: called with the number of images after some were drawn.

    Returns:
        The schedule. Its report has, by number of steps: the number of computed steps, saved share, mean SSIM of
        fresh requests with its interval, the smallest SSIM, and all plans that were tried.

    Raises:
        UsageError: the model's sampler cannot skip steps.
        RunError: no plan reaches the target.
    """
    lab = ScheduleLab(model, on_draw)
    plans, report = dict[int, StepPlan](), dict[str, Any]()
    for num_steps in settings.num_steps:
        plan, figures = _search(lab, num_steps, settings)
        plans[num_steps], report[str(num_steps)] = plan, figures
    report = {"target_ssim": settings.target_ssim, "num_prompts": settings.num_prompts, "by_steps": report}
    facts = ProfiledModel(model.name, model.fingerprint, type(model.pipe.scheduler).__name__)
    return CacheSchedule(facts, plans, report)


def _search(lab: "ScheduleLab", num_steps: int, settings: ScheduleSettings) -> tuple[StepPlan, dict[str, Any]]:
    """Return the plan for a number of steps, and its figures."""
    count = settings.num_prompts
    fitting, choosing, fresh = (
        lab.requests(num_steps, number, settings.seed + first)
        for number, first in ((count, 0), (count // 2, count), (count // 2, 2 * count))
    )
    found = lab.search_plans_for(fitting)
    plain, tried = lab.draw(choosing), list[dict[str, Any]]()
    # The mean SSIM grows with the number of computed steps, so bisection finds the fewest that suffice.
    low, high, best = 0, num_steps, StepPlan.of_all(num_steps)
    while high - low > 1:
        middle = (low + high) // 2
        ssim = similarity(lab.draw(choosing, found[middle]), plain, None)["ssim"]
        tried.append({"computed": middle, "steps": list(found[middle].steps), "ssim": float(ssim.mean())})
        if ssim.mean() >= settings.target_ssim:
            high, best = middle, found[middle]
        else:
            low = middle
    if len(best.steps) == num_steps:
        # Rounded down, so that a value just below the target does not appear to reach it.
        closest = math.floor(1e4 * max(row["ssim"] for row in tried)) / 1e4
        raise RunError(
            f"{num_steps} steps: no list reaches SSIM {settings.target_ssim:g}; the closest is {closest:.4f}; give a "
            "lower --target-ssim"
        )
    ssim = similarity(lab.draw(fresh, best), lab.draw(fresh), None)["ssim"]
    mean = bootstrap_mean(ssim)
    return best, {
        "computed": len(best.steps),
        "saved_computation": best.saved_share,
        "ssim": mean.value,
        "ssim_interval": None if mean.interval is None else list(mean.interval),
        "ssim_min": float(ssim.min()),
        "tried": tried,
    }


class ScheduleLab:
    """Draws requests on plain diffusers, by plans or with all steps, in batches of one resolution."""

    def __init__(self, model: ServedModel, on_draw: Callable[[int], None]) -> None:
        self._model, self._on_draw = as_plain(model), on_draw
        self._sampler = SkippingSampler(model.pipe.scheduler, pass_step_kwargs=model.family.pass_step_kwargs)
        self._prompts = load_prompts()

    def requests(self, num_steps: int, count: int, first: int) -> list[Request]:
        """Return requests with prompts and seeds that count from `first`, and sizes in turn."""
        defaults, prompts = self._model.defaults, self._prompts
        return [
            Request(
                number,
                # A prime stride visits all captions before any is repeated.
                prompts[(first + number) * 7919 % len(prompts)],
                defaults.resolutions[number % len(defaults.resolutions)],
                num_inference_steps=num_steps,
                guidance_scale=defaults.guidance_scale,
                seed=FIRST_SEED + first + number,
            )
            for number in range(count)
        ]

    def search_plans_for(self, requests: Sequence[Request]) -> dict[int, StepPlan]:
        """Return the best plan for each number of computed steps, from the forecasts for these requests."""
        num_steps = requests[0].num_inference_steps
        gram: Floats = np.zeros((num_steps, num_steps))
        weights: list[float] = []

        def note(batch: Sequence[PreparedRequest], outputs: Sequence[torch.Tensor]) -> None:
            nonlocal weights
            weights = weights or self._sampler.output_weights(batch[0].state)
            # Images count alike, whatever their size.
            own = torch.stack(list(outputs)).double().cpu().numpy()
            gram[:] += np.einsum("ibd,jbd->ij", own, own) / own.shape[2]

        self.draw(requests, note=note)
        return search_plans(gram / len(requests), weights, num_steps - 1)

    @torch.inference_mode()
    def draw(
        self,
        requests: Sequence[Request],
        plan: StepPlan | None = None,
        note: Callable[[Sequence[PreparedRequest], Sequence[torch.Tensor]], None] | None = None,
    ) -> list[Image]:
        """Draw the requests and return their images in order. `note` is called with each batch and the outputs
        (requests, values) of its steps.
        """
        stepper, images = self._model.stepper, dict[int, Image]()
        assert isinstance(stepper, PlainStepper)
        for resolution in dict.fromkeys(request.resolution for request in requests):
            own = [request for request in requests if request.resolution == resolution]
            for start in range(0, len(own), _BATCH_SIZE):
                prepared = [self._model.prepare(request) for request in own[start : start + _BATCH_SIZE]]
                for each in prepared:
                    # The coefficients were prepared for the model's own sampler.
                    each.state.coefficients = None
                    if plan is not None:
                        each.state.skip(plan)
                batch, outputs = stepper.batch_of(prepared, self._sampler), list[torch.Tensor]()
                while not prepared[0].state.is_finished:
                    batch.step()
                    outputs.append(torch.stack(batch.outputs()).flatten(1))
                batch.unpack()
                if note is not None:
                    note(prepared, outputs)
                images |= {each.request.request_id: self._model.decode(each.latents) for each in prepared}
                self._on_draw(len(prepared))
        return [images[request.request_id] for request in requests]


def _halvings(number: int) -> int:
    return max(1, (number - 1).bit_length())
