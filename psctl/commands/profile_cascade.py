"""`psctl profile cascade`: measures times and images of both models of a cascade."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.requests import steps_taken
from ...data.resolution import parse_list
from ...eval.options import EvalOptions
from ...serving.cascade.legs import LEGS, SIDES, Leg, LegSpec, Side, parse_cascade
from ..flags import flag, preset_flag
from ..options.cascade import DEFAULT_CASCADE, PROFILE_FILE, Cascade, place_of
from ..options.common import OutputFile, Resolutions, Seed, numbers_of
from ..options.groups import JudgeFlags
from ..options.target import WHERE, Target
from ..output import Output
from .cascade_models import facts_of, load_both, plans_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...data.workspace import ModelWorkspace
    from ...serving.cascade.profile import CascadeProfile, LegProfile
    from ...serving.models.served import ServedModel
    from ...training.cascade.discriminator import Discriminator


_MODELS: dict[Side, str] = {
    "light": "light model",
    "heavy": "heavy model",
    "reused": "heavy model from light images",
}


def profile_cascade(
    *,
    quick: Annotated[
        bool,
        preset_flag(
            "--quick",
            "500 prompts, batches of up to 8.",
            num_prompts=500,
            batch_sizes="1,2,4,8",
        ),
    ] = False,
    cascade: Cascade = DEFAULT_CASCADE,
    discriminator: Annotated[
        Path | None,
        flag(
            "--discriminator",
            "Discriminator made by psctl train-predictor discriminator. Default: the workspace's.",
            dir_okay=False,
        ),
    ] = None,
    batch_sizes: Annotated[
        str, flag("--batch-sizes", "Batch sizes to measure, starting with 1.", metavar="SIZE,...")
    ] = "1,2,4,8,16,32",
    dataset: Annotated[
        str,
        flag("--dataset", "Data set of the bank's captions and real images.", metavar="emoji|coco:PATH|..."),
    ] = "emoji",
    num_prompts: Annotated[
        int,
        flag(
            "--num-prompts", "Number of captions that both models draw; 0 measures times only, without a bank.", min=0
        ),
    ] = 5000,
    resolutions: Resolutions = None,
    max_batch_size: Annotated[int, flag("--max-batch-size", "Number of requests of the bank per batch.", min=1)] = 16,
    reuse_light: Annotated[
        float | None,
        flag(
            "--reuse-light",
            "Also measure and draw heavy images that start from light ones, with noise for this share of the steps.",
            metavar="STRENGTH",
        ),
    ] = None,
    remeasure: Annotated[bool, flag("--remeasure", "Measure times again although the workspace has them.")] = False,
    seed: Seed = 0,
    judging: JudgeFlags,
    output_file: OutputFile = None,
    target: Annotated[Target, WHERE.without("base")],
    out: Output,
) -> None:
    """Measure both models of a cascade: latency by batch size, and images of the same prompts.

    Times are written to the workspace as cascade.json, for plans and simulations. For each prompt, the bank contains
    the images of both models, the confidence of the light one, and features for FID. As the engines are exact, these
    are the images that would be served. After an interruption, the same command continues.

    Examples:

        psctl profile cascade --quick
        psctl profile cascade --cascade emoji-xl:4,emoji-xl:50 --num-prompts 0 --json
        psctl profile cascade --reuse-light 0.6
        psctl profile cascade --cascade stabilityai/sdxl-turbo:2,org/sdxl --device cuda --dataset coco:coco2017
    """
    specs = parse_cascade(cascade)
    counts = _batch_sizes(batch_sizes)
    if reuse_light is not None and not 0 < reuse_light < 1:
        raise UsageError(f"--reuse-light is {reuse_light:g}, but it must be a share of the steps between 0 and 1")
    options = EvalOptions(
        metrics=("fid",),
        dataset=dataset,
        num_prompts=max(2, num_prompts),
        seed=seed,
        resolutions=resolutions,
        max_batch_size=max_batch_size,
    )
    require_places(target.workspace, file=output_file)
    defaults = replace(target, base=specs["heavy"].model).defaults()
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    plans = plans_of(specs, options, target) if num_prompts else None
    with out.status("Loading ..."):
        from ...profiling.cascade.batches import profile_leg
        from ...serving.cascade.profile import CascadeProfile, read_profile
        from ...serving.models.placement import resolve_device

        device = resolve_device(target.device)
        place = place_of(target.root, specs, str(device))
        scorer = _discriminator(discriminator, place, cascade)
    loaded = load_both(specs, target, out)
    models = loaded.models
    scorer.to(models["light"].device).require_models(*facts_of(models, specs))
    file = place.tables / PROFILE_FILE
    known = {} if remeasure or not file.is_file() else _current_profiles(
        read_profile(file), models, specs, scorer.digest, counts, [str(size) for size in sizes]
    )  # fmt: skip
    strengths: dict[Side, float] = {"light": 1.0, "heavy": 1.0}
    if reuse_light is not None:
        strengths["reused"] = reuse_light
    missing: dict[Side, float] = {
        side: each for side, each in strengths.items() if side not in known or known[side].strength != each
    }
    if not missing:
        out.note("Times were measured before; --remeasure measures again.")
    with out.phases() as start:
        for side, strength in missing.items():
            leg: Leg = "light" if side == "light" else "heavy"
            advance = start(f"batches of the {_MODELS[side]}", len(sizes) * len(counts))
            known[side] = profile_leg(
                models[leg],
                specs[leg].steps_of(models[leg].defaults),
                sizes,
                loaded.places[leg].tables,
                batch_sizes=counts,
                load_s=loaded.load_s[leg],
                score=scorer.confidence if leg == "light" else None,
                strength=strength,
                on_batch=lambda advance=advance: advance(1),
            )
    profile = CascadeProfile({leg: known[leg] for leg in LEGS}, scorer.digest, known.get("reused"))
    profile.save(file)
    result: dict[str, Any] = {
        "cascade": cascade,
        "profile": str(file),
        "discriminator": scorer.digest,
        **{side: asdict(each) for side, each in known.items()},
        "bank": None,
    }
    if plans is not None:
        from ...eval.cascade.bank import LegDrawer, load_features
        from ...eval.cascade.quality import served_quality
        from ...eval.measurer import Measurer

        with out.phases() as start:
            measurer = Measurer.of(options, judging.to_judges(device), target.root.root, start)
            drawer = LegDrawer(models, plans, options, measurer, loaded.places)
            bank, folder = drawer.bank(scorer, place.tables, reuse=reuse_light)
        features = load_features(folder, len(bank.entries))
        all_light: list[Side | None] = ["light" for _ in bank.entries]
        quality = served_quality(features, range(len(bank.entries)), all_light)
        result["bank"] = {
            "folder": str(folder),
            "num_prompts": len(bank.entries),
            "quantiles": _quantiles(bank.confidences),
            **{name: value for name, value in quality.items() if name.startswith("fid_")},
        }
    out.data(result, table=lambda: _profile_table(result), file=output_file)
    out.note(f"Profile: {file}")


def _discriminator(file: Path | None, place: "ModelWorkspace", cascade: str) -> "Discriminator":
    """Load the discriminator that was given, or that of the workspace. Raises UsageError: there is none."""
    from ...training.cascade.discriminator import DISCRIMINATOR_FILE, load_discriminator

    found = file or place.find_predictor(DISCRIMINATOR_FILE)
    if found is None:
        raise UsageError(
            f"the workspace has no discriminator of {cascade}: psctl train-predictor discriminator --cascade "
            f"{cascade}, or name one (--discriminator)"
        )
    return load_discriminator(found)


def _current_profiles(
    known: "CascadeProfile",
    models: "dict[Leg, ServedModel]",
    specs: dict[Leg, LegSpec],
    digest: str,
    batch_sizes: tuple[int, ...],
    sizes: list[str],
) -> "dict[Side, LegProfile]":
    """Return earlier measurements of these models that still hold; for the light one, with this discriminator."""
    from ...profiling.cascade.batches import worker_facts

    def holds(leg: Leg, each: "LegProfile") -> bool:
        return (
            each.facts == worker_facts(models[leg])
            and each.num_steps == specs[leg].steps_of(models[leg].defaults)
            and each.batch_sizes == batch_sizes
            and set(sizes) <= set(each.sizes)
        )

    found: dict[Side, LegProfile] = {leg: each for leg, each in known.legs.items() if holds(leg, each)}
    if known.discriminator != digest:
        found.pop("light", None)
    if known.reused is not None and holds("heavy", known.reused):
        found["reused"] = known.reused
    return found


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Parse batch sizes. Raises UsageError unless they are ascending whole numbers from 1 on."""
    numbers = numbers_of("--batch-sizes", text)
    found = tuple(int(number) for number in numbers)
    if (
        not found
        or found[0] != 1
        or list(found) != sorted({*found})
        or any(a != b for a, b in zip(found, numbers, strict=True))
    ):
        raise UsageError(f"--batch-sizes is {text!r}, but it must be ascending whole numbers that begin with 1")
    return found


def _profile_table(result: dict[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from ...profiling.report.table import Table

    rows = []
    for side in SIDES:
        about = result.get(side)
        if about is None:
            continue
        name = f"{_MODELS[side]}, {steps_taken(about['num_steps'], about['strength'])} steps"
        for size, times in about["sizes"].items():
            for index, count in enumerate(about["batch_sizes"]):
                latency_s, throughput = times["latency_s"][index], times["throughput"][index]
                rows.append((name, size, str(count), f"{latency_s:.3g}", f"{throughput:.3g}"))
    columns = ("model", "resolution", "batch", "latency (s)", "images a second")
    parts: list[RenderableType] = [Table(f"Cascade {result['cascade']}", columns, rows).to_rich()]
    light, heavy = result["light"], result["heavy"]
    parts.append(
        Text(
            f"Scoring takes {light['score_s'] * 1e3:.3g} ms an image; changing to the light or heavy model "
            f"{light['switch_s']:.2g} or {heavy['switch_s']:.2g} s, with loading {light['load_s']:.2g} or "
            f"{heavy['load_s']:.2g} s."
        )
    )
    if (bank := result["bank"]) is not None:
        reused = f", {bank['fid_reused']:.4g} heavy from light" if "fid_reused" in bank else ""
        quantiles = ", ".join(f"{share:.0%}: {value:.2f}" for share, value in bank["quantiles"])
        parts.append(
            Text(
                f"Bank of {bank['num_prompts']} prompts: FID {bank['fid_light']:.4g} light, {bank['fid_heavy']:.4g} "
                f"heavy{reused}; confidences {quantiles}"
            )
        )
        parts.append(Text(str(bank["folder"])))
    return Group(*parts)


def _quantiles(confidences: list[float]) -> list[tuple[float, float]]:
    """Return quantiles of the values that are not NaN."""
    known = sorted(each for each in confidences if each == each)
    return [(share, known[min(len(known) - 1, int(share * len(known)))]) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
