"""`psctl train-predictor schedule`: searches the steps that the cache computes."""

from pathlib import Path
from typing import Annotated

from ...data.files import require_folder
from ...serving.cache.options import CACHE_SCHEDULE_FILE
from ..flags import flag
from ..options.common import Seed, numbers_of
from ..options.target import WHERE, Target
from ..output import Output


def train_predictor_schedule(
    *,
    target_ssim: Annotated[float, flag("--target-ssim", "Mean SSIM to reach, against images without a cache.")] = 0.975,
    steps: Annotated[
        str,
        flag(
            "--steps", "Numbers of steps with a list of their own; other numbers use the nearest list.", metavar="N,..."
        ),
    ] = "20,30,50",
    num_prompts: Annotated[
        int,
        flag(
            "--num-prompts",
            "Number of requests to learn from; half as many choose the list, and half as many evaluate it.",
            min=4,
        ),
    ] = 48,
    output_file: Annotated[
        Path | None,
        flag(
            "--output-file",
            f"File of the schedule. Default: predictors/{CACHE_SCHEDULE_FILE} in the model's workspace.",
            dir_okay=False,
        ),
    ] = None,
    seed: Seed = 0,
    target: Annotated[Target, WHERE],
    out: Output,
) -> None:
    """Search the fewest steps for --cache schedule whose images stay close to those of all steps.

    The model's output at the other steps is forecast from the last two computed steps. No profile is needed: requests
    are drawn on plain diffusers, whose outputs determine the best list for each number of computed steps. The number is
    chosen by the images of other requests, and SSIM is reported for requests used in neither.

    Examples:

        psctl train-predictor schedule
        psctl train-predictor schedule --model emoji-3 --target-ssim 0.98 --steps 30
        psctl train-predictor schedule --output-file fast.json --target-ssim 0.95 --json
    """
    from ...eval.cache.schedule import ScheduleSettings, search_schedule
    from ...profiling.report.tables import schedule_table

    settings = ScheduleSettings(
        target_ssim, tuple(int(each) for each in numbers_of("--steps", steps)), num_prompts, seed
    )
    if output_file is not None:
        require_folder(output_file.absolute().parent)
    served, place = target.load(out)
    file = output_file or place.predictors / CACHE_SCHEDULE_FILE
    require_folder(file.absolute().parent)
    with out.phases() as start:
        advance = start("images at most", settings.num_draws)
        schedule = search_schedule(served, settings, on_draw=advance)
    schedule.save(file)
    result = {
        "schedule": file,
        "model": schedule.facts.model,
        "scheduler": schedule.facts.scheduler,
        "target_ssim": target_ssim,
        "plans": {number: list(plan.steps) for number, plan in schedule.plans.items()},
        **schedule.report,
    }
    out.data(result, table=lambda: schedule_table(result).to_rich())
    out.note(f"Schedule: {file}")
