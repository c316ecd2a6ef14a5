"""Rules that decide which steps are computed, compared at equal savings over many requests, easy and hard ones apart.

Every rival draws the same requests, whose captions and seeds were used to make none of the rivals. Each runs with
several settings, so that a line through its points gives the quality of its images at any saving: schedules of an
increasing number of steps, searched as `psctl train-predictor schedule` does; forests, the bundled one and those of
block profiles (`--forests`), with several confidences; accumulated changes; and a schedule to which a forest may only
add steps. All forecast in the same way. Requests count as hard or easy by the images of a rule outside this
comparison: every fifth step.

    python tests/benchmarks/cache_rivals.py --model emoji-xl --forests forecast=blocks.parquet --output-file xl.json
    python tests/benchmarks/cache_rivals.py --summary xl.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from patchedserve.data.workspace import Workspace
from patchedserve.eval.cache.quality import similarity
from patchedserve.eval.cache.schedule import ScheduleLab
from patchedserve.eval.cache.sides import CacheSetting, make_side
from patchedserve.serving.cache.options import CACHE_PREDICTOR_FILE, CacheOptions
from patchedserve.serving.cache.rules import Booleans, PatchView, Predicted
from patchedserve.serving.models.loading import load_model, resolve_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.machine import run_facts
from patchedserve.training.cache.fitting import FitSettings, fit_cache_predictor
from patchedserve.training.cache.predictor import CachePredictor
from patchedserve.training.cache.samples import load_samples
from patchedserve.training.cache.schedule import CacheSchedule, StepPlan

_FIRST = 1 << 20
"""Number of the first caption and seed; the search for schedules uses those from 0 on."""
_FITTING = 48
_BATCH = 12
_EQUAL_SAVED = (0.6, 0.65, 0.7, 0.75, 0.8)


class PlanWithVeto(Predicted):
    """Rule that computes the steps of a plan, and those in which the forest does not allow a request to reuse."""

    def __init__(self, predictor: CachePredictor, plan: StepPlan) -> None:
        super().__init__(predictor)
        self._steps = np.array(plan.steps)

    def may_reuse(self, view: PatchView) -> Booleans:
        return super().may_reuse(view) & ~np.isin(view.steps_done, self._steps)


def settings_of(
    options: argparse.Namespace, model: ServedModel, plans: Mapping[int, StepPlan], folder: Path
) -> Iterator[tuple[str, CacheSetting]]:
    """Yield each setting with the name of its rival."""
    facts = CacheSchedule.load(resolve_model(options.model) / "cache-schedule.json").facts
    for count in options.computed:
        file = folder / f"computed-{count}.json"
        CacheSchedule(facts, {options.steps: plans[count]}, {}).save(file)
        yield "schedule", CacheSetting(f"schedule {count}", "schedule", CacheOptions("schedule", schedule=file))
    base = CacheOptions("patch", threshold=0.0, patch_size=model.block_facts(None).patch_size)
    boxed = CachePredictor.load(resolve_model(options.model) / CACHE_PREDICTOR_FILE, device=model.device)
    forests = {"forest in the box": [boxed]}
    for given in options.forests:
        name, _, table = given.partition("=")
        profiled, samples = load_samples(table, max_rows=300_000, seed=0)
        profiled.check_fits(model.block_facts(base.patch_size), source=table)
        of_model = samples.output_mse[samples.is_whole(profiled)]
        forests[f"forest, {name}"] = [
            fit_cache_predictor(samples, profiled, FitSettings(threshold=float(np.quantile(of_model, share))))
            for share in options.quantiles
        ]
    for name, trained in forests.items():
        for forest in trained:
            for confidence in options.confidences:
                cut = replace(forest, min_confidence=confidence)
                label = f"{name}, threshold {forest.threshold:.2g}, confidence {confidence:g}"
                yield name, CacheSetting(label, "patch", base, Predicted(cut))
    for total in options.sums:
        yield (
            "accumulated",
            CacheSetting(
                f"accumulated {total:g}", "accumulated", CacheOptions("accumulated", threshold=total, max_reuse=1_000)
            ),
        )
    for count in options.vetoed:
        for confidence in options.confidences[:1]:
            rule = PlanWithVeto(replace(boxed, min_confidence=confidence), plans[count])
            yield (
                "schedule + veto",
                CacheSetting(f"schedule {count} + veto", "patch", replace(base, warmup_steps=1), rule),
            )


def main() -> None:
    """Draw, or print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--computed", type=int, nargs="+", default=[6, 7, 9, 12])
    parser.add_argument("--vetoed", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--sums", type=float, nargs="+", default=[0.2, 0.3, 0.45])
    parser.add_argument("--forests", nargs="*", default=[], metavar="NAME=BLOCKS.parquet")
    parser.add_argument("--quantiles", type=float, nargs="+", default=[0.65])
    parser.add_argument("--confidences", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.85])
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--summary", type=Path, nargs="+")
    options = parser.parse_args()
    if options.summary:
        for path in options.summary:
            print("\n".join(summary(json.loads(path.read_text()))))
        return
    model = load_model(options.model)
    lab = ScheduleLab(model, lambda count: None)
    plans = lab.search_plans_for(lab.requests(options.steps, _FITTING, 0))
    requests = lab.requests(options.steps, options.num_prompts, _FIRST)
    workspace = Workspace(Path("psctl-workspace")).for_model(model.name, "cpu")
    sizes = sorted({request.resolution for request in requests})

    def drawn(setting: CacheSetting) -> tuple[list[Image], np.ndarray]:
        """Return the images, and for each request the share of steps that were not computed."""
        side, shares = make_side(model, setting, workspace, sizes), list[float]()
        for first in range(0, len(requests), _BATCH):
            batch = requests[first : first + _BATCH]
            for prepared in side.serve(batch, [0] * len(batch)):
                shares.append(prepared.steps_reused / options.steps)
        return side.images, np.array(shares)

    plain, _ = drawn(CacheSetting("without a cache", "off", CacheOptions()))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        every_fifth = Path(folder, "every-fifth.json")
        fifth = StepPlan(options.steps, tuple(range(0, options.steps, 5)))
        facts = CacheSchedule.load(resolve_model(options.model) / "cache-schedule.json").facts
        CacheSchedule(facts, {options.steps: fifth}, {}).save(every_fifth)
        outside = CacheSetting("every fifth", "schedule", CacheOptions("schedule", schedule=every_fifth))
        of_outside = similarity(drawn(outside)[0], plain, None)["ssim"]
        is_hard = of_outside < np.median(of_outside)
        for rival, setting in settings_of(options, model, plans, Path(folder)):
            images, saved = drawn(setting)
            ssim = similarity(images, plain, None)["ssim"]
            rows.append({"rival": rival, "label": setting.label, "saved": saved.tolist(), "ssim": ssim.tolist()})
            print(f"{setting.label}: saved {saved.mean():.3f}, SSIM {ssim.mean():.4f}", file=sys.stderr, flush=True)
    result = {
        **run_facts(model).to_json(),
        "steps": options.steps,
        "plans": {str(count): list(plan.steps) for count, plan in plans.items()},
        "is_hard": is_hard.tolist(),
        "rows": rows,
    }
    if options.output_file is not None:
        options.output_file.write_text(json.dumps(result))
    print("\n".join(summary(result)))


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines: all points, then SSIM of each rival at equal savings for all, easy and hard requests."""
    is_hard = np.array(result["is_hard"])
    yield f"{result['model']}, {result['steps']} steps, {len(is_hard)} requests"
    yield f"{'':52} saved (5 % to 95 %)     SSIM   worst   easy   hard"
    for row in result["rows"]:
        saved, ssim = np.array(row["saved"]), np.array(row["ssim"])
        low, high = np.quantile(saved, (0.05, 0.95))
        yield (
            f"{row['label']:52} {saved.mean():5.1%} ({low:3.0%} to {high:3.0%})  {ssim.mean():.4f}  {ssim.min():.3f}  "
            f"{ssim[~is_hard].mean():.4f} {ssim[is_hard].mean():.4f}"
        )
    for name, chosen in (("all", slice(None)), ("easy", ~is_hard), ("hard", is_hard)):
        yield f"SSIM at equal savings, {name} requests"
        yield f"{'':20}" + "".join(f"{saved:>9.0%}" for saved in _EQUAL_SAVED)
        for rival in dict.fromkeys(row["rival"] for row in result["rows"]):
            points = [
                (float(np.array(row["saved"])[chosen].mean()), float(np.array(row["ssim"])[chosen].mean()))
                for row in result["rows"]
                if row["rival"] == rival
            ]
            yield f"{rival:20}" + "".join(f"{at(points, saved):>9}" for saved in _EQUAL_SAVED)


def at(points: Sequence[tuple[float, float]], saved: float) -> str:
    """Return the value at a saving on the line through the Pareto-optimal points; a dash outside their range."""
    front = sorted(point for point in points if not any(s >= point[0] and q > point[1] for s, q in points))
    known = [each[0] for each in front]
    if not known[0] - 1e-6 <= saved <= known[-1] + 1e-6:
        return "-"
    return f"{np.interp(saved, known, [each[1] for each in front]):.4f}"


if __name__ == "__main__":
    main()
