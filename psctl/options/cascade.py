"""Options of a cascade: its two models, and the allocation of their workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...data.workspace import ModelWorkspace, Workspace
from ...serving.cascade.legs import Leg, LegSpec, cascade_name
from ...serving.runs.trace_settings import TraceSettings
from ..flags import Flags, flag, preset

_HELP = "A light and a heavy model, each with :STEPS behind it where it does not take its own number of steps."
Cascade = Annotated[str, flag("--cascade", _HELP, metavar="LIGHT,HEAVY")]
PROFILE_FILE = "cascade.json"
DEFAULT_CASCADE = "emoji-xl-turbo:1,emoji-xl:50"


def _set_system(context: typer.Context, cascade: str | None) -> str | None:
    if cascade is not None:
        preset(context, {"system": "diffserve"})
    return cascade


# Comes before the system, whose default it sets.
ServedCascade = Annotated[
    str | None,
    flag(
        "--cascade",
        f"{_HELP} --system is diffserve then, or one that it is compared with.",
        metavar="LIGHT,HEAVY",
        is_eager=True,
        callback=_set_system,
    ),
]


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """Options of a cascade; all but the first two configure its systems."""

    cascade_profile: Annotated[
        Path | None,
        flag(
            "--cascade-profile",
            "Times of both models, by psctl profile cascade. Default: the workspace's; for simulations else those in "
            "the box.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None
    bank: Annotated[
        Path | None,
        flag(
            "--bank",
            "Prompts that both models have drawn, by psctl profile cascade. Default: the newest beside the profile.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None
    overprovision: Annotated[
        float, flag("--overprovision", "Of a cascade: by how much capacity must exceed the demand (lambda).")
    ] = 1.05
    solver: Annotated[
        Literal["milp", "enumerate"],
        flag("--solver", "Of a cascade's plans: HiGHS, or every pair of batch sizes; both give the same plans."),
    ] = "milp"
    objective: Annotated[
        Literal["threshold", "quality"],
        flag(
            "--objective",
            "Of diffserve's plans: the largest threshold that there is room for, or of those the one with the best FID "
            "in the bank.",
        ),
    ] = "threshold"
    balance: Annotated[
        Literal["least", "random"],
        flag("--balance", "Which worker of a model gets a request: the one with the least to do, or any."),
    ] = "least"
    threshold: Annotated[
        float | None,
        flag(
            "--threshold",
            "Of diffserve-static-threshold: light images of this confidence or more are the answer. Default: what the "
            "peak of the trace leaves room for.",
        ),
    ] = None
    queue_factor: Annotated[
        float, flag("--queue-factor", "Of diffserve-no-queue: waiting as a multiple of a batch's duration.")
    ] = 2.0
    on_late: Annotated[
        Literal["discard", "light"],
        flag("--on-late", "What a deferred request gets that the heavy model cannot finish in time."),
    ] = "discard"
    replan_on_burst: Annotated[
        bool,
        flag(
            "--replan-on-burst",
            "Plan at once where the requests of a second are more than 1.5 times what was planned for.",
        ),
    ] = False
    threshold_per_resolution: Annotated[
        bool,
        flag(
            "--threshold-per-resolution",
            "Of a cascade: the more a heavy image of a resolution costs, the lower the threshold of its light ones.",
        ),
    ] = False
    skip_light: Annotated[
        bool,
        flag("--skip-light", "Send requests to the heavy model at once where 98 % of them would be deferred anyway."),
    ] = False
    reuse_light: Annotated[
        bool,
        flag(
            "--reuse-light",
            "Heavy images start from the light ones, noised as far as psctl profile cascade --reuse-light was told.",
        ),
    ] = False


CASCADE = Flags.of(CascadeOptions)


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """Plan of a cascade that serves a trace or clients, or is simulated.

    Attributes:
        cascade: both models as the user writes them.
        system: name of the system that allocates workers and routes requests.
        trace: settings of the trace; over HTTP only its resolutions, SLOs and seed.
        options: options of cascades.
        num_workers: number of workers, or of simulated GPUs.
        slo_scale: SLO of each request as a multiple of its standalone latency.
    """

    cascade: str
    system: str
    trace: TraceSettings
    options: CascadeOptions
    num_workers: int
    slo_scale: float


def place_of(root: Workspace, specs: dict[Leg, LegSpec], device: str) -> ModelWorkspace:
    """Return the part of the workspace of a cascade on a device."""
    return root.for_model(cascade_name(specs), device)


def newest_profile_place(root: Workspace, specs: dict[Leg, LegSpec]) -> ModelWorkspace | None:
    """Return the part of the workspace with the newest profile of a cascade, on any device; None if there is none."""
    folder = place_of(root, specs, "any").root.parent
    found = sorted(folder.glob(f"*/tables/{PROFILE_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    return ModelWorkspace(found[-1].parents[1]) if found else None
