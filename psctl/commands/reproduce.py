"""`psctl reproduce PAPER`: measures the figures and tables of a paper, next to its own numbers."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ..flags import flag
from ..options.common import Resolutions, Seed
from ..options.groups import JudgeFlags
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from ...eval.reproduce.lab import Lab
    from ...eval.reproduce.paper import Exhibit, Paper


@dataclass(frozen=True, slots=True)
class ReproduceFlags:
    """Figures and tables to reproduce from a paper, and the output folder."""

    figures: Annotated[list[int] | None, flag("--figure", "Number of a figure; may be repeated.", metavar="N")] = None
    tables: Annotated[list[int] | None, flag("--table", "Number of a table; may be repeated.", metavar="N")] = None
    is_quick: Annotated[
        bool, flag("--quick", "Smoke run of the same code, about a minute per figure, in a separate folder.")
    ] = False
    resolutions: Resolutions = None
    datasets: Annotated[
        list[str] | None,
        flag(
            "--dataset",
            "Tables: data set of captions and reference images, as in psctl eval; may be repeated. Default: emoji.",
            metavar="emoji|coco:PATH|...",
        ),
    ] = None
    num_prompts: Annotated[
        int | None, flag("--num-prompts", "Tables: number of captions per data set. Default: 256 (paper: 5000).", min=2)
    ] = None
    num_inference_steps: Annotated[
        int | None,
        flag(
            "--num-inference-steps",
            "Number of denoising steps. Default: 50, as in the paper, and 30 for figures that serve traces.",
            min=2,
        ),
    ] = None
    output_dir: Annotated[
        Path | None,
        flag(
            "--output-dir -o",
            "Folder for the page, pictures and numbers. Default: reproduce/PAPER in the workspace.",
            file_okay=False,
        ),
    ] = None


def reproduce_patchedserve(
    *, choice: ReproduceFlags, judging: JudgeFlags, seed: Seed = 0, target: Target, out: Output
) -> None:
    """Measure figures 4, 5, 11, 12, 13, 14, 15 and tables 1 and 2; by default all that apply to the model.

    Each exhibit has a picture (tables: Markdown) and a JSON file with the paper's numbers next to ours. One page shows
    the exhibits of all models and counts the statements that agree. Finished exhibits are kept: the same command, or
    one for other exhibits or models, continues. Missing profiles and predictors are made first. Figure 12 is about
    SDXL, figure 13 about SD3.

    Examples:

        psctl reproduce patchedserve --quick
        psctl reproduce patchedserve --figure 5 --figure 14 --table 1
        psctl reproduce patchedserve --model emoji-3 --figure 13 --json
        psctl reproduce patchedserve --figure 11 --num-inference-steps 50
        psctl reproduce patchedserve --table 2 --dataset coco:coco/val2014 --num-prompts 5000
        psctl reproduce patchedserve --model stabilityai/stable-diffusion-xl-base-1.0 --resolutions 512,768,1024
    """
    from ...eval.reproduce.patchedserve import PATCHEDSERVE

    _reproduce(PATCHEDSERVE, choice, judging, seed, target, out)


def _reproduce(
    paper: "Paper", choice: ReproduceFlags, judging: JudgeFlags, seed: int, target: Target, out: Output
) -> None:
    from ...data.workspace import Workspace
    from ...eval.reproduce.paper import reproduce
    from ...eval.reproduce.scale import FULL, QUICK
    from ...eval.reproduce.statement import statements_table, verdicts_table
    from ...profiling.report.table import to_rich
    from ...serving.models.checkpoint import read_index
    from ...serving.models.loading import resolve_model

    index = resolve_model(target.model) / "model_index.json"
    exhibits = paper.select(
        choice.figures or (), choice.tables or (), read_index(index, source=target.model)["_class_name"]
    )
    sizes = target.defaults().resolutions if choice.resolutions is None else parse_list(choice.resolutions)
    sizes = tuple(sorted(set(sizes), key=lambda size: (size.pixels, size)))
    if len(sizes) < 2:
        only = ", ".join(map(str, sizes))
        raise UsageError(f"the only resolution is {only}, but figures of mixed resolutions need two or more")
    folder = choice.output_dir or target.workspace / "reproduce" / (paper.name + "-quick" * choice.is_quick)
    # A smoke run leaves nothing that other commands would take for a measurement.
    inside = replace(target, workspace=folder / "workspace") if choice.is_quick else target
    require_places(folder, inside.workspace)
    scale = QUICK if choice.is_quick else FULL
    if choice.num_inference_steps is not None:
        scale = replace(scale, num_steps=choice.num_inference_steps)

    def settings_of(exhibit: "Exhibit") -> dict[str, Any]:
        settings: dict[str, Any] = {
            **{name: getattr(target, name) for name in ("model", "device", "dtype")},
            "resolutions": list(map(str, sizes)),
            "seed": seed,
            "is_quick": choice.is_quick,
            **asdict(scale),
            **(exhibit.quick if choice.is_quick else exhibit.full),
        }
        if "served_steps" in settings and choice.num_inference_steps is not None:
            settings["served_steps"] = choice.num_inference_steps
        if exhibit.kind == "table":
            settings |= {"datasets": choice.datasets or ["emoji"], "clip_model": judging.clip_model}
            settings |= {} if choice.num_prompts is None else {"num_prompts": choice.num_prompts}
        return settings

    part = Workspace(folder).for_model(target.model, "any").root.parent
    with out.phases() as start:

        def open_lab() -> "Lab":
            model, place = inside.load(out)
            from ...eval.reproduce.lab import Lab

            judges = judging.to_judges(model.device)
            judges.check(tuple(metric for exhibit in exhibits for metric in exhibit.metrics))
            return Lab(
                model, place, inside.root.root, part / "work", sizes, seed, scale, judges, start, out.note, out.warn
            )

        wanted = [(exhibit, settings_of(exhibit)) for exhibit in exhibits]
        outcome = reproduce(paper, wanted, open_lab, part, on_exhibit=out.note)
    out.data(
        {
            "paper": paper.name,
            "exhibits": outcome.results,
            "measured": outcome.measured,
            "verdicts": outcome.verdicts,
            "page": outcome.index,
            "was_interrupted": outcome.was_interrupted,
        },
        table=lambda: to_rich([*map(statements_table, outcome.results), verdicts_table(outcome.verdicts)]),
    )
    out.note(f"Open in a browser: file://{outcome.index.resolve()}")
    if outcome.was_interrupted:
        out.note("The same command continues from here.")
        raise KeyboardInterrupt
