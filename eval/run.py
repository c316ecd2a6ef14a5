"""One evaluation from end to end: draw what is missing, read both sides, measure, write the results.

An evaluation that was stopped continues where it was when it is asked for again: images are kept in a set named by
what decides them, features by the content of their images.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..data.datasets.base import BadEntries
from ..data.datasets.folders import pair_folders
from ..data.datasets.loading import ImageSource
from ..data.resolution import Resolution
from ..data.workspace import ModelWorkspace
from .measurer import Measurer, StartPhase, silent
from .metrics.measure import measure_sets
from .options import PAIRED, SETWISE, EvalOptions, EvalPlan, open_folders
from .result_files import RESULTS_FILE, EvalResults
from .sets.cache_use import cache_use_of
from .sets.drawers import Drawer
from .sets.generate import MANIFEST_FILE, Manifest, generate_set, generation_settings, num_steps_missing, read_manifest
from .sets.image_sets import fitted_sample, set_of, sources_of_pairs

RUN_KIND = "eval"


@dataclass(frozen=True, slots=True)
class EvalOutcome:
    """The results, where they were written, and where the generated images lie."""

    results: EvalResults
    run_dir: Path
    images_dir: Path


def evaluate_model(
    drawer: Drawer,
    plan: EvalPlan,
    options: EvalOptions,
    measurer: Measurer,
    workspace: ModelWorkspace,
    *,
    images_dir: Path | None = None,
) -> EvalOutcome:
    """Generate the plan's images through the engine and measure them against the data set.

    Args:
        drawer: draws the images.
        plan: from `plan_eval`.
        options: what is measured.
        measurer: measures the images.
        workspace: the model's part of the workspace.
        images_dir: where the images go; None for a folder of the workspace that is named by what decides them.

    Raises:
        UsageError, RunError: as the parts.
        KeyboardInterrupt: on Ctrl-C; images and features that are finished are kept.
    """
    measurer.judges.check(options.metrics)
    drawn = draw_set(drawer, plan, options, workspace, images_dir=images_dir, start_phase=measurer.start_phase)
    manifest, folder = drawn.manifest, drawn.folder
    sizes = {item.id: Resolution(item.width, item.height) for item in manifest.items}
    results = measure(
        options.metrics,
        measurer,
        set_of(folder, manifest),
        fitted_sample(plan.sample, sizes) if plan.sample.has_images else None,
        {item.id: item.prompt for item in manifest.items},
        settings={
            **manifest.settings,
            "num_prompts": len(plan.items),
            "seed": options.seed,
            "resolutions": _resolutions(sizes.values()),
            "prompts_digest": manifest.prompts_digest,
            "generated": str(folder.resolve()),
            "reference": plan.sample.name,
        },
    )
    results.warnings.extend([f"image failed: {reason}" for reason in drawn.failed])
    return _write(results, workspace, folder)


@dataclass(frozen=True, slots=True)
class DrawnSet:
    """A set of images that is complete, but for those that failed: why, one line each."""

    folder: Path
    manifest: Manifest
    failed: tuple[str, ...]


def draw_set(
    drawer: Drawer,
    plan: EvalPlan,
    options: EvalOptions,
    workspace: ModelWorkspace,
    *,
    images_dir: Path | None = None,
    start_phase: StartPhase = silent,
    what: str = "denoising steps",
    more: Mapping[str, Any] | None = None,
) -> DrawnSet:
    """Draw what is missing of the plan's images, through the engine as it serves.

    Args:
        drawer, plan, options, workspace, images_dir: as in `evaluate_model`.
        start_phase: reports progress.
        what: name of the phase.
        more: settings that the drawer adds.

    Raises:
        UsageError, RunError, KeyboardInterrupt: as `generate_set`.
    """
    settings = generation_settings(
        drawer.identity,
        policy=options.policy,
        num_inference_steps=plan.num_inference_steps,
        guidance_scale=plan.guidance_scale,
        dataset=options.dataset,
        **({"max_batch_size": options.max_batch_size} if drawer.identity.options.cache.is_on else {}),
        **(more or {}),
    )
    manifest = Manifest(plan.items, settings)
    folder = images_dir or workspace.runs / f"images-{manifest.digest[:16]}"
    drawer.prepare([Resolution(item.width, item.height) for item in plan.items], workspace.tables)
    failed = generate_set(
        drawer,
        folder,
        manifest,
        max_batch_size=options.max_batch_size,
        max_bad=options.max_bad,
        on_step=start_phase(what, num_steps_missing(folder, manifest)),
    )
    return DrawnSet(folder, manifest, failed)


def evaluate_folders(
    generated: Path,
    reference: Path | None,
    options: EvalOptions,
    measurer: Measurer,
    workspace: ModelWorkspace,
) -> EvalOutcome:
    """Measure a folder of images, against another one where the metrics need it.

    FID and KID compare the folders as they are; PSNR, SSIM and LPIPS the images of equal names, which must be of equal
    size. The CLIP score takes the prompts from the folder's manifest.

    Raises:
        UsageError: a folder, a partner, a manifest or a reference is missing, or sizes differ.
        RunError: as `Judges.check`.
    """
    folder, others = open_folders(options.metrics, generated, reference)
    manifest = read_manifest(generated) if "clip" in options.metrics or (generated / MANIFEST_FILE).is_file() else None
    source: ImageSource = folder if manifest is None else set_of(folder.root, manifest)
    pairs: tuple[ImageSource, ImageSource] | None = None
    if others is not None and set(PAIRED) & set(options.metrics):
        pairs = sources_of_pairs(pair_folders(folder, others))
    measurer.judges.check(options.metrics)
    results = measure(
        options.metrics,
        measurer,
        source,
        others,
        None if manifest is None else {item.id: item.prompt for item in manifest.items},
        settings={
            **({} if manifest is None else {**manifest.settings, "prompts_digest": manifest.prompts_digest}),
            "seed": options.seed,
            "generated": str(generated.resolve()),
            "reference": None if reference is None else str(reference),
        },
        pairs=pairs,
    )
    return _write(results, workspace, generated)


def measure(
    metrics: tuple[str, ...],
    measurer: Measurer,
    generated: ImageSource,
    reference: ImageSource | None,
    captions: Mapping[str, str] | None,
    *,
    settings: Mapping[str, Any],
    pairs: tuple[ImageSource, ImageSource] | None = None,
) -> EvalResults:
    """Measure all metrics of one set of images.

    Args:
        metrics: some of `METRICS`.
        measurer: measures the images; its tolerance holds for each side.
        generated, reference: the two sides; the reference may be None for the CLIP score alone.
        captions: by image id, for the CLIP score.
        settings: go into the results.
        pairs: the two sides under equal ids, where `generated` and `reference` do not have them.

    Raises:
        UsageError: as the metrics.
    """
    results = EvalResults({}, settings=dict(settings))
    details = {"resolutions": settings["resolutions"]} if "resolutions" in settings else {}
    if setwise := tuple(name for name in SETWISE if name in metrics):
        assert reference is not None, "checked by the callers"
        bad = [BadEntries(source.name, measurer.max_bad) for source in (generated, reference)]
        features = measurer.features(generated, "generated", bad[0]), measurer.features(reference, "reference", bad[1])
        found, warnings = measure_sets(
            setwise, *features, seed=measurer.seed, details=measurer.judges.inception_details() | details
        )
        results.metrics.update(found)
        results.warnings.extend(warnings)
        results.warnings.extend(f"image left out: {each}" for side in bad for each in side.problems)
    if "clip" in metrics:
        assert captions is not None, "checked by the callers"
        result, values = measurer.clip(generated, captions, **details)
        results.metrics[result.name], results.per_image[result.name] = result, values
    if paired := tuple(name for name in PAIRED if name in metrics):
        one, other = pairs or (generated, reference)
        assert other is not None, "checked by the callers"
        found, all_values, warnings = measurer.pairs(paired, one, other, **details)
        results.metrics.update(found)
        results.per_image.update(all_values)
        results.warnings.extend(warnings)
    return results


def _write(results: EvalResults, workspace: ModelWorkspace, images_dir: Path) -> EvalOutcome:
    use, warnings = cache_use_of(images_dir, results.settings, results.settings.get("num_prompts"))
    results = replace(results, cache_use=use, warnings=[*results.warnings, *warnings])
    run_dir = workspace.new_run(RUN_KIND)
    results.save(run_dir / RESULTS_FILE)
    return EvalOutcome(results, run_dir, images_dir)


def _resolutions(sizes: Any) -> list[str]:
    return [str(size) for size in sorted(set(sizes), key=lambda size: (size.pixels, size))]
