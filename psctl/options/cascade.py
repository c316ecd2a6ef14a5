"""Options of a cascade: its two models, and the allocation of their workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from ...data.workspace import ModelWorkspace, Workspace
from ...serving.cascade.legs import Leg, LegSpec, cascade_name
from ...serving.runs.trace_settings import TraceSettings
from ..flags import Flags, flag, preset

PANEL = "Cascade (--cascade)"
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

    PANEL: ClassVar = PANEL

    cascade_profile: Annotated[
        Path | None,
        flag(
            "--cascade-profile",
            "Times of both models, from psctl profile cascade. Default: the workspace's; for simulations also the "
            "bundled ones.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None
    bank: Annotated[
        Path | None,
        flag(
            "--bank",
            "Bank of images of both models, from psctl profile cascade. Default: the newest next to the profile.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None
    overprovision: Annotated[
        float, flag("--overprovision", "Cascade: factor by which capacity must exceed demand (lambda).")
    ] = 1.05
    solver: Annotated[
        Literal["milp", "enumerate"],
        flag(
            "--solver",
            "Cascade: solver of plans, HiGHS or an enumeration of all pairs of batch sizes. Both find the same plans.",
        ),
    ] = "milp"
    objective: Annotated[
        Literal["threshold", "quality"],
        flag(
            "--objective",
            "diffserve: the largest threshold that capacity allows, or a smaller one with a better FID in the bank.",
        ),
    ] = "threshold"
    balance: Annotated[
        Literal["least", "random"],
        flag("--balance", "Choice of the worker for a request: the one with the least pending work, or a random one."),
    ] = "least"
    threshold: Annotated[
        float | None,
        flag(
            "--threshold",
            "diffserve-static-threshold: confidence from which light images are returned. Default: the largest that "
            "capacity allows at the trace's peak.",
        ),
    ] = None
    queue_factor: Annotated[
        float, flag("--queue-factor", "diffserve-no-queue: waiting time, as a multiple of a batch's duration.")
    ] = 2.0
    on_late: Annotated[
        Literal["discard", "light"],
        flag("--on-late", "Result of a deferred request that the heavy model cannot finish in time."),
    ] = "discard"
    replan_on_burst: Annotated[
        bool,
        flag(
            "--replan-on-burst",
            "Plan immediately when the arrivals of a second exceed the planned rate by more than half.",
        ),
    ] = False
    threshold_per_resolution: Annotated[
        bool,
        flag(
            "--threshold-per-resolution",
            "Cascade: use lower thresholds for resolutions whose heavy images cost more.",
        ),
    ] = False
    skip_light: Annotated[
        bool,
        flag("--skip-light", "Send requests directly to the heavy model when at least 98 % of them would be deferred."),
    ] = False
    reuse_light: Annotated[
        bool,
        flag(
            "--reuse-light",
            "Start heavy images from light ones, with the noise given to psctl profile cascade --reuse-light.",
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
