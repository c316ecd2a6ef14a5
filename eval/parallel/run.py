"""Drawing of the sets, their comparison with the original, and verdicts on DistriFusion's claims."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diffusers import DPMSolverMultistepScheduler

from ...data.datasets.base import BadEntries
from ...data.errors import UsageError
from ...data.workspace import ModelWorkspace
from ...serving.models.build import build_model
from ...serving.models.served import ServedModel
from ...serving.options import EngineOptions
from ...serving.parallel.strips import Strips
from ...serving.parallel.swap import unit_of
from ..compare.comparison import FID_TO_FIRST, Comparison
from ..compare.paired import PairedResult, compare_fid, compare_values
from ..compare.run import common_values, compare
from ..measurer import Measurer, StartPhase
from ..options import EvalOptions, EvalPlan
from ..run import draw_set
from ..sets.drawers import EngineDrawer
from ..sets.generate import read_manifest
from ..sets.image_sets import set_of
from .plan import FEW_STEPS, Claim, ParallelPlan, ParallelSetting, name_of_original

RESULT_KIND = "psctl-parallel-quality"
METRICS = ("psnr", "ssim", "lpips", "fid")
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
"""Prediction types of models that DPM-Solver++ supports."""


@dataclass(frozen=True, slots=True)
class ParallelQuality:
    """Result of the evaluation.

    Attributes:
        comparisons: comparison with the original, by name of the set.
        verdicts: claims, each with the paired difference that it is judged by.
        settings: settings with which the sets were drawn.
    """

    comparisons: Mapping[str, Comparison]
    verdicts: Sequence[tuple[Claim, PairedResult]]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that can be serialized as JSON."""
        sets = {}
        for name, each in self.comparisons.items():
            found = {metric: asdict(result.estimate) for metric, result in each.metrics.items()}
            found["fid"] = asdict(each.second.metrics["fid"].estimate)
            sets[name] = found | {"images": each.second.path}
        claims = [
            {
                **asdict(claim),
                "worse": found.first,
                "better": found.second,
                **{name: getattr(found, name) for name in ("difference", "low", "high")},
                "holds": claim.holds(found),
            }
            for claim, found in self.verdicts
        ]
        return {"kind": RESULT_KIND, "version": 1, "settings": dict(self.settings), "sets": sets, "claims": claims}


def evaluate_parallel(
    model: ServedModel,
    wanted: ParallelPlan,
    plan: EvalPlan,
    options: EvalOptions,
    measurer: Measurer,
    workspace: ModelWorkspace,
    *,
    on_failed: Callable[[str], None],
) -> ParallelQuality:
    """Draw the missing images of the sets, and measure them.

    Args:
        model: model on plain diffusers.
        wanted: plan of the sets.
        plan: plan from `plan_eval`, with real images.
        options: options with seed, batch size and number of bad images.
        measurer: measures the images.
        workspace: workspace of the model.
        on_failed: called with a line for each failed image.

    Raises:
        UsageError: as `check`, before anything is drawn.
        RunError, KeyboardInterrupt: as `draw_set`; images that are drawn are kept.
    """
    measurer.judges.check(METRICS)
    folders = draw_sets(
        model, wanted.settings(), plan, options, workspace, start_phase=measurer.start_phase, on_failed=on_failed
    )
    return judge_sets(folders, facts_of(model, wanted, plan, options), wanted, measurer)


def facts_of(model: ServedModel, wanted: ParallelPlan, plan: EvalPlan, options: EvalOptions) -> dict[str, Any]:
    """Return the settings with which the sets are drawn, for results."""
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "sampler": type(model.pipe.scheduler).__name__,
        "num_inference_steps": plan.num_inference_steps,
        "guidance_scale": plan.guidance_scale,
        "num_prompts": len(plan.items),
        "resolutions": sorted({f"{item.width}x{item.height}" for item in plan.items}),
        "warmup": wanted.warmup,
        "seed": options.seed,
    }


def draw_sets(
    model: ServedModel,
    settings: Sequence[ParallelSetting],
    plan: EvalPlan,
    options: EvalOptions,
    workspace: ModelWorkspace,
    *,
    start_phase: StartPhase,
    on_failed: Callable[[str], None],
) -> dict[str, Path]:
    """Draw the missing images of these sets and return the folder of each set by name; `start_phase` reports progress.
    Other arguments, and errors, are as in `evaluate_parallel`.
    """
    for setting in settings:
        check(model, setting, plan)
    folders: dict[str, Path] = {}
    for setting in settings:
        with closing(served_with(model, setting)) as served:
            few = replace(plan, num_inference_steps=FEW_STEPS) if setting.few_steps else plan
            drawn = draw_set(
                EngineDrawer(served), few, options, workspace, start_phase=start_phase, what=f"steps, {setting.name}"
            )
        folders[setting.name] = drawn.folder
        for reason in drawn.failed:
            on_failed(f"{setting.name}: {reason}")
    return folders


def judge_sets(
    folders: Mapping[str, Path], settings: Mapping[str, Any], wanted: ParallelPlan, measurer: Measurer
) -> ParallelQuality:
    """Compare the sets in these folders; `settings` describe how they were drawn. Raises as `compare`."""
    comparisons = {
        setting.name: compare(folders[setting.original], folders[setting.name], METRICS, measurer)
        for setting in wanted.settings()
        if setting.options is not None
    }
    judge = _ClaimJudge(comparisons, folders, measurer)
    return ParallelQuality(comparisons, [(claim, judge.compare(claim)) for claim in wanted.claims()], settings)


def check(model: ServedModel, setting: ParallelSetting, plan: EvalPlan) -> None:
    """Raise UsageError if an image is too small for the ranks, or the model does not suit figure 7's sampler."""
    if setting.few_steps and model.pipe.scheduler.config.get("prediction_type") not in _PREDICTIONS:
        raise UsageError(f"figure 7 is drawn with DPM-Solver++, which {model.name} was not made for: leave out fig7")
    if (options := setting.options) is None:
        return
    for item in plan.items:
        # Naive ranks also split images by columns, in turn.
        side = min(item.height, item.width) if options.mode == "naive" else item.height
        try:
            Strips.of(side // model.family.geometry.latent_factor, unit_of(model.denoiser), (1.0,) * options.count)
        except UsageError as error:
            raise UsageError(f"{item.width}x{item.height} pixels, {setting.name}: {error}") from None


def served_with(model: ServedModel, setting: ParallelSetting) -> ServedModel:
    """Return the same loaded model with the sampler and the ranks of a setting, which must fit it."""
    pipe, name = model.pipe, model.name
    if setting.few_steps:
        pipe = copy.copy(pipe)
        pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
        # Names of image sets derive from what determines them, which includes the sampler.
        name = f"{name} with DPM-Solver++"
    options = EngineOptions("plain")
    if setting.options is not None:
        options = EngineOptions("parallel", parallel=setting.options)
    return build_model(pipe, name=name, fingerprint=model.fingerprint, defaults=model.defaults, options=options)


@dataclass(frozen=True, slots=True)
class _ClaimJudge:
    """Compares two sets, over the same prompts."""

    comparisons: Mapping[str, Comparison]
    folders: Mapping[str, Path]
    measurer: Measurer

    def compare(self, claim: Claim) -> PairedResult:
        """Return the difference that a claim is about. The FID to the original is measured to the original's images."""
        if claim.metric == "fid":
            return self.comparisons[claim.better].differences["fid"]
        if claim.metric != FID_TO_FIRST:
            worse, better = (self.comparisons[name].per_image[claim.metric] for name in (claim.worse, claim.better))
            direction = "higher" if claim.metric == "psnr" else "lower"
            return compare_values(claim.metric, *common_values(worse, better), direction, self.measurer.seed)
        first, second, original = (
            self.measurer.features(
                set_of(self.folders[name], read_manifest(self.folders[name])),
                bad=BadEntries(name, self.measurer.max_bad),
            )
            for name in (claim.worse, claim.better, name_of_original())
        )
        return compare_fid(first, second, original, self.measurer.seed)
