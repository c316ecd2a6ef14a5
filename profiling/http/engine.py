"""An engine of the batch server: the loaded model, its latencies alone, and what is warmed up."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.workspace import ModelWorkspace
from ...serving.models.identity import ModelIdentity
from ...serving.options import EngineOptions, TemplateOptions
from ...serving.scheduling.policies import get_policy
from ...serving.scheduling.systems import System
from ..measure.standalone import shape_of, standalone_latencies
from ..runs.corrections import correction_of, keep_correction
from ..runs.step_latencies import latencies_for_serving

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel
    from ...serving.server.local import LocalSetup
    from ...serving.server.protocol import ModelFacts
    from ...training.latency.online_correction import OnlineCorrection

_WARM_UP_STEPS = 4
_LOCK_FILE = "server.lock"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """What an engine of the server is made of, as plain data: any process can build it.

    Attributes:
        name: the user's name for the model.
        model: as `load_model` takes it, wherever it is built.
        device, dtype: where and in which number format it runs.
        options: of the engine; its cache names its predictor.
        workspace: of the model on this device.
        system: whose policy and share of steps requests get.
        sizes: that are warmed up, and whose latency alone is measured.
        max_batch_size: requests denoised together.
        needs_standalone: whether requests get SLOs, so that latencies alone must be known.
        templates: how edits come to records of templates in the workspace; None: they read none.
        threads: that torch computes with; None: as many as it wants.
    """

    name: str
    model: str
    device: str
    dtype: str
    options: EngineOptions
    workspace: ModelWorkspace
    system: System
    sizes: Sequence[Resolution]
    max_batch_size: int = 16
    needs_standalone: bool = True
    templates: TemplateOptions | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the front end must know of an engine."""

    model: "ModelFacts"
    alone: "StandaloneLatencies"
    identity: ModelIdentity


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine of this process.

    Attributes:
        setup: for the backend.
        facts: for the front end.
        model: that was loaded.
        correction: what the policy's predictions are corrected by, if it predicts.
    """

    setup: "LocalSetup"
    facts: EngineFacts
    model: "ServedModel"
    correction: "OnlineCorrection | None"

    def keep_correction(self, workspace: ModelWorkspace, *, on_note: Tell) -> None:
        """Keep what was learnt of latencies for the next server; `on_note` as of `corrections.keep_correction`."""
        if self.correction is not None:
            keep_correction(self.model, workspace, self.correction, on_note=on_note)


def ignore(text: str) -> None:
    """Tell nobody."""


def build_engine(
    recipe: EngineRecipe, *, model: "ServedModel | None" = None, on_note: Tell = ignore, on_warning: Tell = ignore
) -> BuiltEngine:
    """Load the model, unless it is given, and measure what is not known of it yet.

    Raises:
        UsageError: the model cannot serve a size.
        RunError: the model is damaged, or a measurement fails.
    """
    from ...serving.models.loading import load_model
    from ...serving.server.local import LocalSetup
    from ...serving.server.protocol import ModelFacts

    if recipe.threads is not None:
        import torch

        torch.set_num_threads(recipe.threads)
    if model is None:
        model = load_model(recipe.model, recipe.device, recipe.dtype, recipe.options)
    if recipe.templates is not None:
        model.reuse.use_keep(recipe.templates.keep)
        model.reuse.open_store(recipe.workspace.templates, recipe.templates)
    defaults, place, system = model.defaults, recipe.workspace, recipe.system
    prompts = itertools.cycle(load_prompts())

    def one_of_each() -> list[Request]:
        return [
            Request(0, next(prompts), size, defaults.num_inference_steps, defaults.guidance_scale)
            for size in recipe.sizes
        ]

    examples = one_of_each()
    for request in examples:
        model.check_request(system.adapt(request))
    model.tune(recipe.sizes, place.tables)
    if recipe.templates is not None and recipe.templates.loads is not None:
        model.reuse.plan_loads(recipe.templates.loads, model.tuning(recipe.sizes, place.tables))
    correction = None
    if get_policy(system.policy).requires_predictor:
        latency = latencies_for_serving(
            model, place, recipe.sizes, recipe.max_batch_size, on_note=on_note, on_warning=on_warning
        )
        first = [system.adapt(each) for each in (*examples, *one_of_each(), *one_of_each())][: recipe.max_batch_size]
        correction = correction_of(model, place, latency, first=first, on_note=on_note)
    measured: dict[Resolution, float] = {}
    if recipe.needs_standalone:
        of_shape = standalone_latencies(
            model,
            examples,
            place.tables,
            on_measure=lambda shape: on_note(f"Measuring {shape.resolution} alone on plain diffusers ..."),
            on_doubt=on_warning,
        )
        measured = {request.resolution: of_shape[shape_of(model, request)] for request in examples}
    alone = StandaloneLatencies(measured, defaults.num_inference_steps)
    steps = min(_WARM_UP_STEPS, defaults.num_inference_steps)
    alone_first, together = (
        [replace(each, num_inference_steps=steps) for each in chosen] for chosen in (examples, one_of_each())
    )
    setup = LocalSetup(
        model,
        system,
        correction,
        recipe.max_batch_size,
        alone.latency_s,
        warm_up=[*([request] for request in alone_first), together],
        records_templates=recipe.templates is not None and recipe.templates.record == "first",
    )
    usual = defaults.default_resolution
    if usual not in recipe.sizes:
        usual = max(recipe.sizes, key=lambda size: size.pixels)
    defaults = replace(defaults, resolutions=tuple(recipe.sizes), default_resolution=usual)
    dtype = str(model.dtype).removeprefix("torch.")
    facts = EngineFacts(
        ModelFacts(
            recipe.name,
            defaults,
            size_multiple=model.family.geometry.size_multiple,
            dtype=dtype,
            reuses_templates=recipe.templates is not None,
            adapters=() if model.adapters is None else model.adapters.names,
        ),
        alone,
        replace(model.identity, name=recipe.name),
    )
    return BuiltEngine(setup, facts, model, correction)


def build_for_replica(recipe: EngineRecipe) -> "tuple[LocalSetup, EngineFacts]":
    """The same in a process of its own. Replicas of one machine measure one after the other: the first one for all."""
    from filelock import FileLock

    with FileLock(recipe.workspace.tables / _LOCK_FILE):
        built = build_engine(recipe)
    return built.setup, built.facts


class StandaloneLatencies:
    """Latencies alone of requests of any size and number of steps, by those that were measured.

    Steps count in proportion. A size that was not measured takes as long as the next smaller and larger one tell, on a
    straight line over the pixels, and beyond them in proportion to its pixels.

    Args:
        measured_s: by size; none, where latencies alone are not asked for.
        num_steps: that these took.
    """

    def __init__(self, measured_s: dict[Resolution, float], num_steps: int) -> None:
        self._points = sorted((size.pixels, seconds) for size, seconds in measured_s.items())
        self._num_steps = num_steps

    def latency_s(self, request: Request) -> float | None:
        """Seconds that a request takes alone; None if nothing was measured."""
        if not self._points:
            return None
        return self._whole_s(request.resolution.pixels) * request.num_steps / self._num_steps

    def _whole_s(self, pixels: int) -> float:
        least, most = self._points[0], self._points[-1]
        if not least[0] <= pixels <= most[0]:
            nearest = least if pixels < least[0] else most
            return nearest[1] * pixels / nearest[0]
        high = next(point for point in self._points if point[0] >= pixels)
        low = next(point for point in reversed(self._points) if point[0] <= pixels)
        if high[0] == low[0]:
            return high[1]
        return low[1] + (high[1] - low[1]) * (pixels - low[0]) / (high[0] - low[0])
