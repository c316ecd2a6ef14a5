"""Options for records of images that edits read."""

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.templates import Keep, LoadPlan, TemplateKind
from ...serving.conflicts import refuse_conflicts
from ...serving.options import EngineOptions, LoadOptions, RecordTemplates, TemplateOptions, TemplateTiers
from ..flags import Flags, flag

_PANEL = "Records of images (--reuse-templates)"

TemplatePrompt = Annotated[
    str,
    flag(
        "--template-prompt",
        "Record: prompt that describes the whole image. Edits that share a record must have the same.",
    ),
]
TemplateSeed = Annotated[int, flag("--template-seed", "Record: seed of the noise outside masks.", min=0)]

TemplateKindFlag = Annotated[
    TemplateKind,
    flag(
        "--template-kind",
        "Record: of the image with noise of each step (noised), which is made if it is missing; or of the generation "
        "that has drawn it (trajectory), made by psctl generate --save-template.",
    ),
]
KeepFlag = Annotated[
    Keep,
    flag(
        "--keep",
        "Content of records, from small to fast: outputs of transformer blocks (outputs), also keys and values (kv), "
        "or all that a masked part reads (all). Everything else is computed for all pixels.",
    ),
]

EditLinkMbps = Annotated[
    float | None,
    flag(
        "--edit-link-mbps",
        "Limit on reading records in megabytes (10^6 bytes) per second, each step from its file, to measure edits "
        "behind a slow link.",
        show_default="no limit",
    ),
]

PlanFlag = Annotated[
    LoadPlan,
    flag(
        "--plan",
        "With --edit-link-mbps, blocks that read the record while the others compute all pixels: the fastest choice "
        "(optimal), that of InstGenIE's Algorithm 1 (paper), all (strawman), or none.",
    ),
]

TIERS = Flags(
    TemplateTiers,
    {
        "memory_mb": flag(
            "--template-memory-mb",
            "Memory for the records that were read last, in megabytes (10^6 bytes). Larger records are read from "
            "their files at each step.",
        ),
        "staging_mb": flag(
            "--template-staging-mb", "Memory for steps of records on a GPU, or prefetched from files, in megabytes."
        ),
        "disk_mb": flag("--template-disk-mb", "Disk space for records in the workspace, in megabytes."),
    },
    panel=_PANEL,
)


@dataclass(frozen=True, slots=True)
class TemplateFlags:
    """Options for records that a server's edits read."""

    PANEL: ClassVar = _PANEL

    reuse_templates: Annotated[
        bool,
        flag(
            "--reuse-templates", "With --http: edits compute only their masked part, and read the rest from a record."
        ),
    ] = False
    record: Annotated[
        RecordTemplates,
        flag(
            "--record",
            "With --reuse-templates: when missing records are made: at the first edit of an image, which is exact, in "
            "free places of the batch; or never, only by psctl templates add.",
        ),
    ] = "first"
    keep: KeepFlag = "all"
    edit_link_mbps: EditLinkMbps = None
    plan: PlanFlag = "optimal"
    tiers: Annotated[TemplateTiers, TIERS] = field(default_factory=TemplateTiers)

    def chosen(self, engine: EngineOptions, model: str, given: Container[str]) -> TemplateOptions | None:
        """Return the options for records of templates; None if edits read no records.

        Args:
            engine: the user's engine options.
            model: the user's name for the model.
            given: the options on the command line.

        Raises:
            UsageError: the engine or the model does not support records, or nothing is reused.
        """
        if not self.reuse_templates:
            of_records = ("--record", "--keep", "--edit-link-mbps", "--plan", *sorted(TIERS.names()))
            if refused := [name for name in of_records if name in given]:
                raise UsageError(f"{refused[0]} is of records that edits read: add --reuse-templates, or leave it out")
            return None
        require_masked(engine, "--reuse-templates")
        require_keep(model, self.keep)
        loads = loads_of(self.edit_link_mbps, self.plan, engine)
        return TemplateOptions(self.record, self.keep, loads, self.tiers)


def require_keep(model: str, keep: Keep) -> None:
    """Raise UsageError unless records of a model's templates support this `keep`; the model is not loaded."""
    from ...serving.models.loading import check_keep_of

    check_keep_of(model, keep)


def loads_of(link_mbps: float | None, plan: LoadPlan, engine: EngineOptions) -> LoadOptions | None:
    """Return the options for reading records.

    Raises UsageError: the speed is not allowed, there is nothing to plan, or parts of passes cannot be timed.
    """
    if link_mbps is None:
        if plan != "optimal":
            raise UsageError(f"--plan {plan} is of loads over a link: say with --edit-link-mbps how fast it is")
        return None
    if not 0 < link_mbps < math.inf:
        raise UsageError(f"--edit-link-mbps is {link_mbps:g}, but it must be above 0, and finite")
    refuse_conflicts(engine.features | {"--edit-link-mbps": "--edit-link-mbps"})
    return LoadOptions(link_mbps, plan)


def require_cells(model: str, sizes: Iterable[Resolution], *, several: bool = False) -> None:
    """Raise UsageError unless images of these sizes consist of whole cells, or of `several`; loads no model."""
    from ...serving.models.loading import model_geometry

    geometry = model_geometry(model)
    for size in sizes:
        geometry.check_cells(size, model, several=several)


def require_masked(options: EngineOptions, wanted: str = "--reuse") -> None:
    """Raise UsageError unless an engine can compute a part of an image and read the rest, as an option requires."""
    refuse_conflicts(options.features | {"--reuse": wanted})
