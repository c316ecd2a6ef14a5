"""The system that serves: one option sets engine, policy and cache; single options override it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...serving.cascade.legs import CASCADE_SYSTEM_NAMES
from ...serving.conflicts import conflict_in
from ...serving.scheduling.policies import POLICY_NAMES
from ...serving.scheduling.systems import SYSTEMS, System, get_system
from ..flags import flag, preset

if TYPE_CHECKING:
    from ...serving.options import EngineOptions
    from ..output import Output
    from .target import Target

_HELP = "; ".join(f"{name}: {system.about}" for name, system in SYSTEMS.items())


def _set_engine(context: typer.Context, name: str) -> str:
    if context.params.get("cascade") is not None or name in CASCADE_SYSTEM_NAMES:
        return name
    engine = get_system(name, is_simulated=True, has_ranks=True).engine
    has_ranks = any(param.name == "parallel" for param in context.command.params)
    # If both are given, --parallel decides the engine.
    if context.params.get("parallel", "1") == "1" and (has_ranks or engine != "parallel"):
        preset(context, {"engine": engine})
    return name


# Must come before the options that it sets: a command processes its parameters in this order.
PolicyName = Annotated[
    str | None,
    flag(
        "--policy",
        f"Which requests join the batch, and when: {', '.join(POLICY_NAMES)}. Default: the system's.",
    ),
]
SystemName = Annotated[
    str,
    flag(
        "--system",
        f"What serves; sets engine, policy and cache, which --engine, --policy and --cache override. {_HELP}.",
        metavar="NAME",
        is_eager=True,
        callback=_set_engine,
    ),
]


def chosen_system(name: str, policy: str | None, engine: "EngineOptions", *, is_simulated: bool = False) -> System:
    """Return the system with the engine and the policy from their own options.

    Raises:
        UsageError: there is no such system, or no such policy.
    """
    return get_system(name, is_simulated=is_simulated, has_ranks=not is_simulated).overridden(
        engine=engine.engine, policy=policy
    )


def with_cache_of(
    systems: list[System],
    engine: "EngineOptions",
    given: dict[str, object],
    target: "Target",
    out: "Output",
    *,
    reuses_templates: bool = False,
) -> "EngineOptions":
    """Return the engine's options with the cache of the systems, unless the user chose one or the engine has none.

    The cache uses the predictor of the workspace or, without one, that of the model; without either, a note says so,
    and nothing is cached.
    """
    modes = {system.cache for system in systems} - {"off"}
    if "--cache" in given or engine.cache.is_on or not modes:
        return engine
    # With several modes, a comparison calibrates the simulator with the one that decides step by step.
    options = replace(engine.cache, mode="patch" if "patch" in modes else modes.pop())
    if options.is_of_patches and engine.engine != "patched":
        return engine
    used = engine.features | ({"--reuse": "--reuse-templates"} if reuses_templates else {})
    if options.is_of_patches and (conflict := conflict_in(used | options.features)):
        out.note(f"The system runs without its cache: {conflict}.")
        return engine
    if engine.model.is_any or (engine.model.adapter and options.is_of_patches):
        out.note(
            "With --sampler, --lora, --adapter or --quantize no patch is reused unless you choose --cache: predictors "
            "know the model as it is."
        )
        return engine
    found = target.with_cache_file(options).file
    if found is not None and not found.is_file():
        how = "psctl train-predictor schedule"
        if options.is_of_patches:
            how = "psctl profile && psctl train-predictor"
        what = "cache predictor" if options.is_of_patches else "cache schedule"
        out.note(f"Nothing is reused: neither workspace nor model has a {what} ({how}).")
        return engine
    return replace(engine, cache=options)
