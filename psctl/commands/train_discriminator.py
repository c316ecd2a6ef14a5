"""`psctl train-predictor discriminator`: trains the network that scores light images of a cascade."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...data.files import require_places
from ...eval.options import EvalOptions
from ...serving.cascade.legs import parse_cascade
from ..flags import flag, preset_flag
from ..options.cascade import DEFAULT_CASCADE, Cascade, place_of
from ..options.common import Resolutions, Seed
from ..options.groups import JUDGES, JudgeFlags
from ..options.target import WHERE, Target
from ..output import Output
from .cascade_models import facts_of, load_both, plans_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_MIN_AUC = 0.6


def train_predictor_discriminator(
    *,
    quick: Annotated[
        bool,
        preset_flag("--quick", "120 prompts, 200 steps: coarser, in some minutes.", num_prompts=120, steps=200),
    ] = False,
    cascade: Cascade = DEFAULT_CASCADE,
    net: Annotated[
        Literal["mbconv", "resnet", "vit"],
        flag("--net", "Network: a small EfficientNet, ResNet or ViT, with at most 0.6 million parameters."),
    ] = "mbconv",
    real: Annotated[
        Literal["gt", "heavy", "vae", "near"],
        flag(
            "--real",
            "Images labelled as real: those of the data set, those of the heavy model, those of the data set after a "
            "pass through its autoencoder, or the light images that add least to FID.",
        ),
    ] = "gt",
    dataset: Annotated[
        str,
        flag(
            "--dataset",
            "Data set to train on, which must not contain images that the cascade is evaluated on.",
            metavar="emoji|coco:PATH|...",
        ),
    ] = "emoji?split=train",
    num_prompts: Annotated[
        int, flag("--num-prompts", "Number of captions; the two models draw half of them each.", min=40)
    ] = 1200,
    resolutions: Resolutions = None,
    steps: Annotated[int, flag("--steps", "Number of training steps.", min=1)] = 600,
    max_batch_size: Annotated[int, flag("--max-batch-size", "Number of requests per batch.", min=1)] = 16,
    seed: Seed = 0,
    judging: Annotated[JudgeFlags, JUDGES.only("fid_weights")],
    output_file: Annotated[
        Path | None,
        flag("--output-file", "File of the discriminator. Default: in the workspace's predictors.", dir_okay=False),
    ] = None,
    target: Annotated[Target, WHERE.without("base")],
    out: Output,
) -> None:
    """Train the discriminator of a cascade, which scores whether a light image is good enough.

    A small network learns to distinguish images of the data set from images of both models. A fifth of the images is
    held out to calibrate and evaluate its confidences. After an interruption, the same command continues.

    Examples:

        psctl train-predictor discriminator --quick
        psctl train-predictor discriminator --cascade emoji-xl:4,emoji-xl:50 --real near --num-prompts 2400
        psctl train-predictor discriminator --real vae --net resnet
        psctl train-predictor discriminator --cascade stabilityai/sdxl-turbo:2,org/sdxl --num-prompts 4000 \
            --dataset 'coco:coco2017?split=train2017'
    """
    specs = parse_cascade(cascade)
    options = EvalOptions(
        metrics=("clip",) if real == "heavy" else ("fid",),
        dataset=dataset,
        num_prompts=num_prompts,
        seed=seed,
        resolutions=resolutions,
        max_batch_size=max_batch_size,
    )
    require_places(target.workspace, file=output_file)
    plans = plans_of(specs, options, target)
    with out.status("Loading ..."):
        from ...eval.cascade.bank import LegDrawer
        from ...eval.measurer import Measurer
        from ...training.cascade.discriminator import DISCRIMINATOR_FILE, DiscriminatorAbout
        from ...training.cascade.fitting import fit_discriminator
    loaded = load_both(specs, target, out)
    models = loaded.models
    judges = judging.to_judges(models["light"].device)
    if real == "near":
        judges.check(("fid",))
    place = place_of(target.root, specs, str(models["light"].device))
    file = output_file or place.predictors / DISCRIMINATOR_FILE
    with out.phases() as start:
        measurer = Measurer.of(options, judges, target.root.root, start)
        examples = LegDrawer(models, plans, options, measurer, loaded.places).examples(real)
        advance = start("training steps", steps)
        light, heavy = facts_of(models, specs)
        about = DiscriminatorAbout(net, real, light, heavy)
        found = fit_discriminator(
            examples,
            about,
            place.root / "training",
            models["light"].device,
            steps=steps,
            seed=seed,
            on_step=lambda step, figures: advance(1),
        )
    found.save(file)
    result = {**asdict(found.about), "file": str(file)}
    out.data(result, table=lambda: _discriminator_table(result))
    if found.about.fit["auc"] < _MIN_AUC:
        out.warn(
            f"held-out images are hardly told apart (area under the ROC curve {found.about.fit['auc']:.2f}): "
            "confidences will say little; give more --num-prompts or --steps, or another --net or --real"
        )
    out.note(f"Discriminator: {file}")


def _discriminator_table(result: dict[str, Any]) -> "RenderableType":
    from ...profiling.report.table import Table

    fit = result["fit"]
    rows = [
        ("images to learn from", f"{fit['num_real']} real, {fit['num_drawn']} drawn"),
        ("held out", str(fit["num_held_out"])),
        ("parameters", f"{fit['parameters']:,}"),
        ("accuracy", f"{fit['accuracy']:.1%}"),
        ("area under the ROC curve", f"{fit['auc']:.3f}"),
        ("calibration error", f"{fit['ece']:.3f} (before: {fit['ece_before']:.3f})"),
        ("temperature", f"{result['temperature']:.3g}"),
    ]
    return Table(f"Discriminator ({result['net']}, real: {result['real']})", ("", "held-out images"), rows).to_rich()
