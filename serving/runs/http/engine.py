"""Engine of the batch server: the loaded model, its standalone latencies, and its warm-up."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ....data.prompts.captions import load_prompts
from ....data.requests import Request
from ....data.resolution import Resolution
from ....data.workspace import ModelWorkspace
from ...core.progress import OnProgress, no_progress
from ...models.identity import ModelIdentity
from ...options import CALIBRATE_S, Calibrate, EngineOptions, TemplateOptions
from ...scheduling.policies import get_policy
from ...scheduling.systems import System
from ..corrections import correction_of, keep_correction
from ..notes import Notify, ignore
from ..standalone import RequestShape, shape_of, standalone_latencies
from ..step_latencies import COARSE_BUDGET_S, MeasureLatencies, latencies_for_serving

if TYPE_CHECKING:
    from ....training.latency.online_correction import OnlineCorrection
    from ...models.served import ServedModel
    from ...server.local import LocalSetup
    from ...server.protocol import ModelFacts

_WARM_UP_STEPS = 4
_LOCK_FILE = "server.lock"


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """Recipe of an engine of the server as plain data, from which any process can build it.

    Attributes:
        name: the user's name for the model.
        model: the model as `load_model` takes it, valid in any process.
        device, dtype: device and number format of the model.
        options: options of the engine; those of the cache name its predictor.
        workspace: workspace of the model on this device.
        system: system that provides the policy and the share of steps.
        sizes: sizes that are warmed up, and whose standalone latency is measured.
        max_batch_size: maximum number of requests in a batch.
        needs_standalone: whether requests get SLOs, which need standalone latencies.
        templates: how edits record and read templates in the workspace; None if they read none.
        threads: number of torch's threads; None for torch's own choice.
        calibrate: which latencies are measured at the start.
        calibrate_s: seconds after which no further measurement begins.
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
    calibrate: Calibrate = "auto"
    calibrate_s: float = CALIBRATE_S


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of an engine that the front end needs."""

    model: "ModelFacts"
    alone: "StandaloneLatencies"
    identity: ModelIdentity


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """Parts of an engine in this process.

    Attributes:
        setup: setup for the backend.
        facts: facts for the front end.
        model: the loaded model.
        correction: online correction of the policy's predictions; None if the policy needs no predictor.
    """

    setup: "LocalSetup"
    facts: EngineFacts
    model: "ServedModel"
    correction: "OnlineCorrection | None"

    def keep_correction(self, workspace: ModelWorkspace, *, on_note: Notify) -> None:
        """Keep the correction for the next server. `on_note` is as in `corrections.keep_correction`."""
        if self.correction is not None:
            keep_correction(self.model, workspace, self.correction, on_note=on_note)


def build_engine(
    recipe: EngineRecipe,
    measure: MeasureLatencies,
    *,
    model: "ServedModel | None" = None,
    on_progress: OnProgress = no_progress,
    on_note: Notify = ignore,
    on_warning: Notify = ignore,
) -> BuiltEngine:
    """Load the model, unless it is given, and take the measurements of `recipe.calibrate`.

    Args:
        recipe: recipe of the engine.
        measure: measures step latencies, if the policy needs them and the workspace has none.
        model: the loaded model.
        on_progress: called with the progress of each phase.
        on_note: called with a line about each slow operation.
        on_warning: called with a line about possible inaccuracies.

    Raises:
        UsageError: the model cannot serve a size, or lacks step latencies that may not be measured.
        RunError: the model is damaged, or a measurement fails.
    """
    from ...server.local import LocalSetup

    model, place, system = _loaded(recipe, model), recipe.workspace, recipe.system
    one_of_each = _one_of_each(recipe, model)
    on_note(f"{model.about}.")
    examples = next(one_of_each)
    for request in examples:
        model.check_request(system.adapt(request))
    model.tune(recipe.sizes, place.tables, recipe.max_batch_size, on_progress)
    if recipe.templates is not None and recipe.templates.loads is not None:
        model.reuse.plan_loads(recipe.templates.loads, model.tuning(recipe.sizes, place.tables))
    correction = None
    end_s = time.monotonic() + recipe.calibrate_s
    if get_policy(system.policy).requires_predictor:
        sizes, largest = recipe.sizes, recipe.max_batch_size
        latency = latencies_for_serving(
            model,
            place,
            sizes,
            largest,
            measure=partial(
                measure,
                budget_s=min(COARSE_BUDGET_S, recipe.calibrate_s),
                remeasure=recipe.calibrate == "force",
                on_progress=partial(on_progress, "measuring step latencies"),
            ),
            calibrate=recipe.calibrate,
            on_note=on_note,
            on_warning=on_warning,
        )
        first = [system.adapt(each) for each in (*examples, *next(one_of_each), *next(one_of_each))]
        correction = correction_of(model, place, latency, first=first[:largest], on_note=on_note)
    alone = _standalone(recipe, model, examples, end_s - time.monotonic(), on_progress, on_note, on_warning)
    steps = min(_WARM_UP_STEPS, model.defaults.num_inference_steps)
    alone_first, together = (
        [replace(each, num_inference_steps=steps) for each in chosen] for chosen in (examples, next(one_of_each))
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
    facts = EngineFacts(_model_facts(recipe, model, on_note), alone, replace(model.identity, name=recipe.name))
    return BuiltEngine(setup, facts, model, correction)


def _loaded(recipe: EngineRecipe, model: "ServedModel | None") -> "ServedModel":
    """Load the model, unless it is given, and open its templates."""
    from ...models.loading import load_model

    if recipe.threads is not None:
        import torch

        torch.set_num_threads(recipe.threads)
    if model is None:
        model = load_model(recipe.model, recipe.device, recipe.dtype, recipe.options)
    if recipe.templates is not None:
        model.reuse.use_keep(recipe.templates.keep)
        model.reuse.open_store(recipe.workspace.templates, recipe.templates)
    return model


def _one_of_each(recipe: EngineRecipe, model: "ServedModel") -> Iterator[list[Request]]:
    """Yield requests of all sizes again and again, each time with other prompts."""
    prompts, defaults = itertools.cycle(load_prompts()), model.defaults
    while True:
        yield [
            Request(0, next(prompts), size, defaults.num_inference_steps, defaults.guidance_scale)
            for size in recipe.sizes
        ]


def _standalone(
    recipe: EngineRecipe,
    model: "ServedModel",
    examples: Sequence[Request],
    budget_s: float,
    on_progress: OnProgress,
    on_note: Notify,
    on_warning: Notify,
) -> "StandaloneLatencies":
    """Return the standalone latencies of a request of each size that is known or measured in time; empty if SLOs do not
    need them.
    """
    measured: dict[Resolution, float] = {}
    if recipe.needs_standalone:
        begun = itertools.count()

        def on_measure(shape: RequestShape) -> None:
            on_progress("measuring standalone latencies", next(begun), len(examples))
            on_note(f"Measuring {shape.in_words} alone on plain diffusers ...")

        of_shape = standalone_latencies(
            model,
            examples,
            recipe.workspace.tables,
            remeasure=recipe.calibrate == "force",
            budget_s=0.0 if recipe.calibrate == "off" else budget_s,
            on_measure=on_measure,
            on_doubt=on_warning,
        )
        shapes = {request.resolution: shape_of(model, request) for request in examples}
        measured = {size: of_shape[shape] for size, shape in shapes.items() if shape in of_shape}
        if missing := [str(size) for size in shapes if size not in measured]:
            how = "are derived from other sizes" if measured else "do not exist unless requests or --slo set them"
            on_warning(
                f"the standalone latency of {', '.join(missing)} is not measured (--calibrate {recipe.calibrate}, "
                f"--calibrate-time {recipe.calibrate_s:g}): SLOs {how}"
            )
    return StandaloneLatencies(measured, model.defaults.num_inference_steps)


def _model_facts(recipe: EngineRecipe, model: "ServedModel", on_note: Notify) -> "ModelFacts":
    """Return the facts of the model that requests are checked against. Calls `on_note` if edits see no references."""
    from ...conflicts import conflict_in
    from ...server.protocol import ModelFacts

    usual = model.defaults.default_resolution
    if usual not in recipe.sizes:
        usual = max(recipe.sizes, key=lambda size: size.pixels)
    reusing = {} if recipe.templates is None else {"--reuse": "--reuse-templates"}
    references = model.family.geometry.references
    conflict = conflict_in(model.options.features | reusing | {"--reference": "an edit by reference"})
    if references is not None and conflict is not None:
        on_note(f"Edits see no references: {conflict}.")
    return ModelFacts(
        recipe.name,
        replace(model.defaults, resolutions=tuple(recipe.sizes), default_resolution=usual),
        size_multiple=model.family.geometry.size_multiple,
        dtype=str(model.dtype).removeprefix("torch."),
        reuses_templates=recipe.templates is not None,
        adapters=() if model.adapters is None else model.adapters.names,
        references=None if conflict is not None else references,
    )


def build_for_replica(recipe: EngineRecipe, measure: MeasureLatencies) -> "tuple[LocalSetup, EngineFacts]":
    """Build an engine in the process of a replica, which imports `measure` by its name.

    Replicas of one machine measure one after the other, and the later ones reuse the measurements of the first.
    """
    from filelock import FileLock

    with FileLock(recipe.workspace.tables / _LOCK_FILE):
        built = build_engine(recipe, measure)
    return built.setup, built.facts


class StandaloneLatencies:
    """Standalone latencies of requests of any size and number of steps, derived from measured ones.

    Latency is proportional to the number of steps. The latency of a size that was not measured is interpolated linearly
    over pixels between the next smaller and larger size; beyond them it is proportional to the pixels. Pixels of
    references count as those of the image.

    Args:
        measured_s: measured seconds by size; empty if standalone latencies are not needed.
        num_steps: number of steps of the measured requests.
    """

    def __init__(self, measured_s: dict[Resolution, float], num_steps: int) -> None:
        self._points = sorted((size.pixels, seconds) for size, seconds in measured_s.items())
        self._num_steps = num_steps

    def latency_s(self, request: Request) -> float | None:
        """Return the seconds that a request takes alone; None if nothing was measured."""
        if not self._points:
            return None
        return self._whole_s(request.pixels_seen) * request.num_steps / self._num_steps

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
