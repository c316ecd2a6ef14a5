"""`psctl bench edit`: throughput of edits with records, and of five alternatives."""

from typing import Annotated

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...serving.options import EngineOptions
from ..flags import flag
from ..options.common import GuidanceScale, NumInferenceSteps, OutputFile, Resolutions, Seed, numbers_of
from ..options.target import Target
from ..options.templates import require_cells
from ..output import Output


def bench_edit(
    *,
    mask_ratios: Annotated[
        str, flag("--mask-ratios", "Shares of the image that masks cover, each measured separately.", metavar="R,...")
    ] = "0.1,0.2,0.3",
    resolutions: Resolutions = None,
    num_edits: Annotated[int, flag("--num-edits", "Number of edits per mask ratio.", min=1)] = 16,
    templates: Annotated[int, flag("--templates", "Number of edited images; each has a record.", min=1)] = 4,
    max_batch_size: Annotated[int, flag("--max-batch-size", "Maximum number of edits in a batch.", min=1, max=256)] = 8,
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    cache_threshold: Annotated[
        float, flag("--cache-threshold", "Limit of the sum of changes, for the accumulated cache.", min=0)
    ] = 0.2,
    repeats: Annotated[
        int, flag("--repeats", "Number of rounds; the result is the median of their ratios.", min=1)
    ] = 6,
    seed: Seed = 0,
    output_file: OutputFile = None,
    target: Target,
    out: Output,
) -> None:
    """Measure the throughput of edits that read records, against five other ways to draw them.

    The sides take turns with the same edits: only the masked part is computed (reuse); plain diffusers, one by one; the
    patch engine computes the whole image (exact), also with a cache like TeaCache's (accumulated); crops around the
    masks are drawn and pasted (crop); one by one with the original image's GroupNorm statistics, like SIGE (frozen).
    Times include all stages, from the text encoder to the pasted image. Results are written to the workspace. Ctrl-C
    keeps the mask ratios that are finished.

    Examples:

        psctl bench edit
        psctl bench edit --resolutions 256 --mask-ratios 0.05,0.1,0.2 --num-edits 32
        psctl bench edit --model emoji-3 --max-batch-size 4 --repeats 3 --json
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    defaults = target.defaults()
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    ratios = tuple(numbers_of("--mask-ratios", mask_ratios))
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise UsageError(f"--mask-ratios is {mask_ratios!r}, but each must be above 0 and at most 1")
    require_cells(target.model, sizes, several=True)
    require_places(target.workspace, file=output_file)

    served, place = target.load(out, EngineOptions())
    from ...profiling.measure.edit_throughput import EditBenchSettings, edit_experiment

    settings = EditBenchSettings(
        sizes,
        ratios,
        defaults.num_inference_steps if num_inference_steps is None else num_inference_steps,
        defaults.guidance_scale if guidance_scale is None else guidance_scale,
        num_edits,
        templates,
        max_batch_size,
        repeats,
        cache_threshold,
        seed,
    )
    with edit_experiment(served, settings, place) as experiment:
        out.experiment(experiment, place, output_file)
