"""Quality cost of the cache: PatchedServe's tables 1 and 2 (section 8.2)."""

from collections.abc import Mapping
from typing import Any

from ..compare.run import compare
from ..measurer import Measurer
from ..options import EvalOptions, plan_eval
from ..run import draw_set
from ..sets.drawers import EngineDrawer
from .lab import Lab
from .paper import Measurement
from .statement import Statement


def compare_quality(
    lab: Lab, settings: Mapping[str, Any], metric: str, printed: tuple[float, ...], *, is_more: bool
) -> Measurement:
    """Measure a metric on images of plain diffusers and on ours with the cache, for every data set.

    Args:
        lab, settings: as for `Measure`.
        metric: `clip` or `fid`.
        printed: smallest and largest change that the paper prints.
        is_more: whether a higher value is better.
    """
    found, statements = {}, []
    for dataset in settings["datasets"]:
        options = EvalOptions(
            metrics=(metric,),
            dataset=dataset,
            num_prompts=settings["num_prompts"],
            seed=lab.seed,
            resolutions=",".join(map(str, lab.sizes)),
            num_inference_steps=settings["num_steps"],
        )
        plan = plan_eval(options, lab.model.defaults, lab.root)
        folders = []
        for what, model in (("plain diffusers", lab.plain_model()), ("the cache", lab.cached_model())):
            drawn = draw_set(
                EngineDrawer(model), plan, options, lab.place, start_phase=lab.start, what=f"denoising steps, {what}"
            )
            folders.append(drawn.folder)
        measurer = Measurer(lab.judges, lab.root, lab.seed, start_phase=lab.start)
        comparison = compare(folders[0], folders[1], (metric,), measurer)
        name, change = next((name, each) for name, each in comparison.differences.items() if name.startswith(metric))
        sides = {"Original": comparison.first, "PatchedServe": comparison.second}
        found[dataset] = {
            "metric": name,
            "sides": {side: each.metrics[name].to_json() for side, each in sides.items()},
            "difference": change.estimate.to_json(),
            "cache_use": comparison.second.cache_use,
        }
        text = f"{name}, PatchedServe against the original, {dataset}"
        # The paper's "similar" is taken as no worse than the worst change that it prints.
        neutral = min(0, *printed) if is_more else max(0, *printed)
        statements.append(Statement(text, change.estimate, printed, "score", neutral, is_more))
    return Measurement({"datasets": found}, statements)
