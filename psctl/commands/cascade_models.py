"""Functions shared by commands that draw with both models of a cascade."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...eval.options import EvalOptions, EvalPlan, plan_eval
from ...serving.cascade.legs import ENGINE, LEGS, Leg, LegSpec
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ...serving.models.served import ServedModel


@dataclass(frozen=True, slots=True)
class LoadedCascade:
    """Both models, their parts of the workspace, and the time to load them."""

    models: "dict[Leg, ServedModel]"
    places: "dict[Leg, ModelWorkspace]"
    load_s: dict[Leg, float]


def plans_of(specs: dict[Leg, LegSpec], options: EvalOptions, target: Target) -> dict[Leg, EvalPlan]:
    """Return a plan for each model: equal prompts and sizes (the heavy model's), each with its own number of steps."""
    defaults = {leg: replace(target, base=spec.model).defaults() for leg, spec in specs.items()}
    heavy = plan_eval(options, defaults["heavy"], target.root.root)
    return {
        leg: replace(
            heavy,
            num_inference_steps=specs[leg].steps_of(defaults[leg]),
            guidance_scale=defaults[leg].guidance_scale,
        )
        for leg in LEGS
    }


def load_both(specs: dict[Leg, LegSpec], target: Target, out: Output) -> "LoadedCascade":
    """Load both models; if they are one model, load it once."""
    found = LoadedCascade({}, {}, {})
    for leg in LEGS:
        start_s = time.perf_counter()
        if leg == "heavy" and specs["heavy"].model == specs["light"].model:
            for each in (found.models, found.places, found.load_s):
                each[leg] = each["light"]  # type: ignore[index]  of each mapping its own
            continue
        found.models[leg], found.places[leg] = replace(target, base=specs[leg].model).load(out, ENGINE)
        found.load_s[leg] = time.perf_counter() - start_s
    return found


def facts_of(models: "dict[Leg, ServedModel]", specs: dict[Leg, LegSpec]) -> list[dict[str, Any]]:
    """Return the facts of both models for a discriminator."""
    return [
        {
            "model": models[leg].name,
            "fingerprint": models[leg].fingerprint,
            "num_steps": specs[leg].steps_of(models[leg].defaults),
            "guidance_scale": models[leg].defaults.guidance_scale,
        }
        for leg in LEGS
    ]
