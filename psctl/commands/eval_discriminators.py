"""`psctl eval discriminators`: measures how well confidences select the light images of a cascade to redraw."""

from pathlib import Path
from typing import Annotated

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...serving.cascade.legs import parse_cascade
from ..flags import Flags, flag
from ..options.cascade import DEFAULT_CASCADE, Cascade, CascadeOptions
from ..options.common import Gpus, OutputFile, Seed, numbers_of
from ..options.groups import JudgeFlags
from ..options.target import WHERE, Target
from ..output import Output
from .simulate_cascade import CascadeImages, find_cascade_images


def eval_discriminators(
    *,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE ...]",
            help="Discriminators made by psctl train-predictor discriminator. Default: the workspace's.",
            show_default=False,
        ),
    ] = None,
    cascade: Cascade = DEFAULT_CASCADE,
    bank: Annotated[
        Path | None,
        flag(
            "--bank",
            "Bank made by psctl profile cascade. Default: the newest in the workspace.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    shares: Annotated[
        str,
        flag(
            "--shares",
            "Shares of deferred images at which the difference from random choices is tested.",
            metavar="F,...",
        ),
    ] = "0.2,0.4,0.6",
    num_draws: Annotated[
        int, flag("--num-draws", "Number of random choices that scorers are compared with.", min=2)
    ] = 20,
    num_resamples: Annotated[int, flag("--num-resamples", "Number of bootstrap resamples per interval.", min=2)] = 40,
    gpus: Gpus = 16,
    seed: Seed = 0,
    judging: Annotated[JudgeFlags, Flags.of(JudgeFlags).only("clip_model")],
    output_file: OutputFile = None,
    target: Annotated[Target, WHERE.only("workspace", "device")],
    out: Output,
) -> None:
    """Compare discriminators of a cascade by the FID of its images when the lowest scores are drawn again.

    The baselines are the CLIP score and random choices. PickScore is a CLIP model, too: pass its weights as
    --clip-model. The report contains DiffServe's figures 1 and 7: FID over latency, the share of easy prompts, and the
    results of allocations of workers.

    Examples:

        psctl eval discriminators
        psctl eval discriminators gt.safetensors heavy.safetensors resnet.safetensors --cascade emoji-xl:4,emoji-xl:50
        psctl eval discriminators --clip-model yuvalkirstain/PickScore_v1 --device cuda --json
    """
    parse_cascade(cascade)
    require_places(target.workspace, file=output_file)
    images = find_cascade_images(cascade, CascadeOptions(bank=bank), target)
    tested = tuple(numbers_of("--shares", shares))
    with out.status("Loading ..."):
        from ...eval.cascade.bank import bank_scores, load_features
        from ...eval.cascade.score_page import write_scores
        from ...eval.cascade.scores import ScoreSettings, allocations, compare_scores, mean_latency_s
        from ...serving.models.placement import resolve_device

        settings = ScoreSettings(tested=tested, num_draws=num_draws, num_resamples=num_resamples, seed=seed)
        judges = judging.to_judges(resolve_device(target.device))
        judges.check(("clip",))
    features = load_features(images.bank_folder, len(images.bank.entries))
    with out.phases() as start:
        scores = bank_scores(images.bank, files or [_workspace_file(images, cascade)], judges, start)
        result = compare_scores(features, scores, settings, start_phase=start)
    latency_s = [mean_latency_s(images.profile, share) for share in (0.0, 1.0)]
    best = min(result["rows"], key=lambda row: sum(point["fid"] for point in row["curve"]))
    result |= {
        "cascade": cascade,
        "bank": str(images.bank_folder),
        "mean_latency_s": latency_s,
        "allocations": {
            "scorer": best["scorer"],
            "num_workers": gpus,
            "rows": allocations(images.profile, best["curve"], gpus),
        },
    }
    result["run_dir"] = str(images.place(target).new_run("discriminators"))
    out.outcome(write_scores(result), output_file)


def _workspace_file(images: CascadeImages, cascade: str) -> Path:
    from ...training.cascade.discriminator import DISCRIMINATOR_FILE

    found = None if images.workspace is None else images.workspace.find_predictor(DISCRIMINATOR_FILE)
    if found is None:
        raise UsageError(f"the workspace has no discriminator of {cascade}; name one")
    return found
