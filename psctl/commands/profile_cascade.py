"""`psctl profile cascade`: how long both models of a cascade take, and what they draw."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...eval.options import EvalOptions
from ...serving.cascade.legs import LEGS, Leg, LegSpec, parse_cascade
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
    from ...serving.cascade.profile import CascadeProfile
    from ...serving.models.served import ServedModel
    from ...training.cascade.discriminator import Discriminator


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
            "By psctl train-predictor discriminator. Default: the workspace's.",
            dir_okay=False,
        ),
    ] = None,
    batch_sizes: Annotated[
        str, flag("--batch-sizes", "Batches to time, from 1 on.", metavar="SIZE,...")
    ] = "1,2,4,8,16,32",
    dataset: Annotated[
        str,
        flag("--dataset", "Captions and real images of the bank.", metavar="emoji|coco:PATH|..."),
    ] = "emoji",
    num_prompts: Annotated[
        int, flag("--num-prompts", "Captions that both models draw; 0: no bank, times only.", min=0)
    ] = 5000,
    resolutions: Resolutions = None,
    max_batch_size: Annotated[int, flag("--max-batch-size", "Requests of the bank drawn together.", min=1)] = 16,
    remeasure: Annotated[bool, flag("--remeasure", "Measure times again that the workspace holds.")] = False,
    seed: Seed = 0,
    judging: JudgeFlags,
    output_file: OutputFile = None,
    target: Annotated[Target, WHERE.without("model")],
    out: Output,
) -> None:
    """Measure both models of a cascade: how long batches take, and what images they draw for the same prompts.

    Times go to the workspace as cascade.json, for plans and simulations. The bank holds for each prompt both models'
    images, the confidence of the light one and features for FID. As engines are exact, these are the images that would
    be served. Interrupted drawing goes on with the same command.

    Examples:

        psctl profile cascade --quick
        psctl profile cascade --cascade emoji-xl:4,emoji-xl:50 --num-prompts 0 --json
        psctl profile cascade --cascade stabilityai/sdxl-turbo:2,org/sdxl --device cuda --dataset coco:coco2017
    """
    specs = parse_cascade(cascade)
    counts = _batch_sizes(batch_sizes)
    options = EvalOptions(
        metrics=("fid",),
        dataset=dataset,
        num_prompts=max(2, num_prompts),
        seed=seed,
        resolutions=resolutions,
        max_batch_size=max_batch_size,
    )
    require_places(target.workspace, file=output_file)
    defaults = replace(target, model=specs["heavy"].model).defaults()
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    plans = plans_of(specs, options, target) if num_prompts else None
    with out.status("Loading ..."):
        from ...profiling.cascade.batches import profile_leg
        from ...serving.cascade.profile import CascadeProfile, LegProfile, read_profile
        from ...serving.models.placement import resolve_device

        device = resolve_device(target.device)
        place = place_of(target.root, specs, str(device))
        scorer = _discriminator(discriminator, place, cascade)
    loaded = load_both(specs, target, out)
    models = loaded.models
    scorer.to(models["light"].device).require_models(*facts_of(models, specs))
    file = place.tables / PROFILE_FILE
    known = None if remeasure or not file.is_file() else read_profile(file)
    if known is not None and not _still_holds(
        known, models, specs, scorer.digest, counts, [str(size) for size in sizes]
    ):
        known = None
    if known is None:
        legs: dict[Leg, LegProfile] = {}
        with out.phases() as start:
            for leg in LEGS:
                model = models[leg]
                advance = start(f"batches of the {leg} model", len(sizes) * len(counts))
                legs[leg] = profile_leg(
                    model,
                    specs[leg].steps_of(model.defaults),
                    sizes,
                    loaded.places[leg].tables,
                    batch_sizes=counts,
                    load_s=loaded.load_s[leg],
                    score=scorer.confidence if leg == "light" else None,
                    on_batch=lambda advance=advance: advance(1),
                )
        known = CascadeProfile(legs, scorer.digest)
        known.save(file)
    else:
        out.note("Times were measured before; --remeasure measures again.")
    result: dict[str, Any] = {
        "cascade": cascade,
        "profile": str(file),
        "discriminator": scorer.digest,
        **{leg: known.legs[leg].to_json() for leg in LEGS},
        "bank": None,
    }
    if plans is not None:
        from ...eval.cascade.bank import draw_bank, load_features
        from ...eval.cascade.quality import served_quality

        with out.phases() as start:
            judges = judging.to_judges(device)
            bank, folder = draw_bank(
                models, plans, options, scorer, judges, loaded.places, place.tables, shared_root=target.root.root,
                start_phase=start,
            )  # fmt: skip
        features = load_features(folder, len(bank.entries))
        all_light: list[Leg | None] = ["light" for _ in bank.entries]
        quality = served_quality(features, range(len(bank.entries)), all_light)
        result["bank"] = {
            "folder": str(folder),
            "num_prompts": len(bank.entries),
            "quantiles": _quantiles(bank.confidences),
            "fid_light": quality["fid_light"],
            "fid_heavy": quality["fid_heavy"],
        }
    out.data(result, table=lambda: _profile_table(result), file=output_file)
    out.note(f"Profile: {file}")


def _discriminator(file: Path | None, place: "ModelWorkspace", cascade: str) -> "Discriminator":
    """The one that was named, or the workspace's. Raises UsageError: there is none."""
    from ...training.cascade.discriminator import DISCRIMINATOR_FILE, load_discriminator

    found = file or place.find_predictor(DISCRIMINATOR_FILE)
    if found is None:
        raise UsageError(
            f"the workspace has no discriminator of {cascade}: psctl train-predictor discriminator --cascade "
            f"{cascade}, or name one (--discriminator)"
        )
    return load_discriminator(found)


def _still_holds(
    known: "CascadeProfile",
    models: "dict[Leg, ServedModel]",
    specs: dict[Leg, LegSpec],
    digest: str,
    batch_sizes: tuple[int, ...],
    sizes: list[str],
) -> bool:
    """Whether times that were measured before are of these models, here, with this discriminator."""
    from ...profiling.cascade.batches import worker_facts

    return known.discriminator == digest and all(
        each.facts == worker_facts(models[leg])
        and each.num_steps == specs[leg].steps_of(models[leg].defaults)
        and each.batch_sizes == batch_sizes
        and set(sizes) <= set(each.sizes)
        for leg, each in known.legs.items()
    )


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Raises UsageError unless they are whole numbers from 1 on, ascending."""
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
    for leg in LEGS:
        about = result[leg]
        for size, times in about["sizes"].items():
            for index, count in enumerate(about["batch_sizes"]):
                latency_s, throughput = times["latency_s"][index], times["throughput"][index]
                rows.append(
                    (f"{leg}, {about['num_steps']} steps", size, str(count), f"{latency_s:.3g}", f"{throughput:.3g}")
                )
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
        parts.append(
            Text(
                f"Bank of {bank['num_prompts']} prompts: FID {bank['fid_light']:.4g} light, {bank['fid_heavy']:.4g} "
                f"heavy; confidences {', '.join(f'{share:.0%}: {value:.2f}' for share, value in bank['quantiles'])}"
            )
        )
        parts.append(Text(str(bank["folder"])))
    return Group(*parts)


def _quantiles(confidences: list[float]) -> list[tuple[float, float]]:
    """Of those that are numbers."""
    known = sorted(each for each in confidences if each == each)
    return [(share, known[min(len(known) - 1, int(share * len(known)))]) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
