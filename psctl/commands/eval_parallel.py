"""`psctl eval parallel`: measures the effect of several ranks on images."""

from typing import TYPE_CHECKING, Annotated

from ...data.files import require_places, write_json
from ...eval.options import EvalOptions, plan_eval
from ...serving.options import EngineOptions
from ..flags import flag
from ..options.common import OutputFile
from ..options.groups import DRAW, JudgeFlags
from ..options.target import Target
from ..output import Output
from .eval import interval_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...eval.parallel.run import ParallelQuality


def eval_parallel(
    *,
    num_ranks: Annotated[str, flag("--num-ranks", "Numbers of ranks, in ascending order.", metavar="N,...")] = "2,4,8",
    parts: Annotated[
        str, flag("--parts", "Parts to measure: table1, fig7 (warm-up), fig8 (GroupNorm).", metavar="NAME,...")
    ] = "table1,fig7,fig8",
    warmup: Annotated[
        int, flag("--parallel-warmup", "Number of calls after the first that are synchronous.", min=0)
    ] = 4,
    drawing: Annotated[EvalOptions, DRAW.fixing(metrics=("fid",))],
    judging: JudgeFlags,
    output_file: OutputFile = None,
    target: Target,
    out: Output,
) -> None:
    """Draw captions on one rank and on several, and check DistriFusion's claims about image quality.

    Table 1: displaced and naive ranks against the original. Figure 7: warm-up, in 10 steps of DPM-Solver++. Figure 8:
    variants of GroupNorm. All ranks are virtual, and none is used for guidance alone. Each claim is reported with its
    paired difference and 95 % interval. An interrupted run continues where it stopped.

    Examples:

        psctl eval parallel --resolutions 256 --dtype float32
        psctl eval parallel --model emoji-3 --parts table1 --num-ranks 2,4
        psctl eval parallel --num-prompts 32 --parts fig8 --json --output-file parallel.json
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...eval.parallel.plan import ParallelPlan, parse_parts, parse_ranks

    wanted = ParallelPlan(parse_ranks(num_ranks), parse_parts(parts), warmup)
    require_places(target.workspace, file=output_file)
    with out.status(f"Sampling {drawing.num_prompts} text-image pairs from {drawing.dataset} ..."):
        plan = plan_eval(drawing, target.defaults(), target.root.root)

    served, place = target.load(out, EngineOptions("plain"))
    from ...eval.measurer import Measurer
    from ...eval.parallel.run import evaluate_parallel

    with out.phases() as start:
        measurer = Measurer.of(drawing, judging.to_judges(served.device), target.root.root, start)
        found = evaluate_parallel(
            served,
            wanted,
            plan,
            drawing,
            measurer,
            place,
            on_failed=lambda reason: out.warn(f"image failed: {reason}"),
        )
    content = found.to_json()
    run_dir = place.new_run("eval-parallel")
    write_json(run_dir / "parallel.json", content)
    out.data(content | {"run_dir": str(run_dir)}, table=lambda: _tables(found), file=output_file)
    out.note(f"Results: {run_dir}")


def _tables(found: "ParallelQuality") -> "RenderableType":
    from ...profiling.report.table import Table, to_rich

    names = ("psnr", "ssim", "lpips", "fid_to_first", "fid")
    content = found.to_json()
    rows = []
    for name, values in content["sets"].items():
        cells = []
        for metric in names:
            each = values[metric]
            ends = "" if each["low"] is None else f" [{each['low']:.3g}, {each['high']:.3g}]"
            cells.append(f"{each['value']:.4g}{ends}")
        rows.append((name, *cells))
    sets = Table("", ("set", "PSNR, dB", "SSIM", "LPIPS", "FID to the original", "FID to real images"), rows)
    claims = [
        (
            claim.text,
            claim.metric,
            f"{each.first:.4g}",
            f"{each.second:.4g}",
            f"{each.difference:+.4g}",
            interval_text(each.low, each.high),
            "yes" if claim.holds(each) else "NO",
        )
        for claim, each in found.verdicts
    ]
    columns = ("claim", "metric", "first", "second", "difference", "95 % interval", "found")
    return to_rich([sets, Table("", columns, claims, num_words=2)])
