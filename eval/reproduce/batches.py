"""What batches cost and save: PatchedServe's figures 4 and 5 (section 3), 14 and 15 (section 8.2)."""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from ...profiling.report.block_plots import summarize_block_changes
from ...profiling.steps.bench import STEPS, run_bench
from ...profiling.steps.combinations import Combination
from ...profiling.steps.lanes import BenchSettings
from ...serving.cache.options import CacheOptions
from ..cache.bench import CacheBenchSettings, run_cache_bench
from ..cache.quality import QualityOptions
from ..cache.sides import Setting, settings_of
from ..metrics.judges import Judges
from .lab import Lab, finish
from .paper import SDXL, Found, Statement

_Settings = Mapping[str, Any]


def block_savings(lab: Lab, settings: _Settings) -> Found:
    """Figure 4: the share of blocks whose output changes by less than a threshold, by resolution."""
    summary = summarize_block_changes(lab.block_profile())
    whole = summary["whole_blocks"]
    shares = whole["shares"]["mse"].values()
    ours = {**whole, "patches_by_threshold": summary["by_resolution"], "thresholds": summary["thresholds"]}
    text = "blocks skipped, the size that skips most over the one that skips fewest"
    return Found(ours, [Statement(text, 100 * (max(shares) - min(shares)), unit="points", neutral=1)])


def step_latencies(lab: Lab, settings: _Settings) -> Found:
    """Figure 5: step latencies of all batches of three requests."""
    counts = [each for each in product(range(4), repeat=len(lab.sizes)) if sum(each) == 3]
    batches = sorted((Combination(lab.sizes, each) for each in counts), key=lambda each: each.num_pixels)
    done = lab.start("combinations", len(batches))
    bench = BenchSettings(settings["repeats"], settings["warmup"], lab.seed)
    outcome = run_bench(STEPS, lab.model, batches, lab.place, bench, on_row=lambda: done(1))
    finish(outcome.was_interrupted)
    rows = outcome.result["rows"]
    ms = {row["label"]: row["patched_ms"] for row in rows}
    small, large = rows[0], rows[-1]
    said = [Statement(f"{large['label']} against {small['label']}", large["patched_ms"] / small["patched_ms"], (1.68,))]
    if {"SML", "MML"} <= set(ms):
        said.append(Statement("SML against MML, which has more pixels", ms["SML"] / ms["MML"]))
    return Found({"rows": rows, "letters": outcome.result["letters"], "run_dir": str(outcome.run_dir)}, said)


def batched_with_and_without_cache(lab: Lab, settings: _Settings) -> Found:
    """Figure 14: latency and throughput of mixed batches: plain diffusers, patched, and patched with the cache."""
    batches = [Combination(lab.sizes, (count,) * len(lab.sizes)) for count in settings["of_each"]]
    sides = [
        Setting("baseline", "plain", CacheOptions(), engine="plain"),
        Setting("patched + cache", "patch", lab.cache()),
    ]
    rows = _cache_rows(lab, settings, batches, sides)
    found: list[dict[str, Any]] = []
    for row in rows:
        ms = {side["label"]: side["image_ms"] for side in row["sides"]}
        ms["patched"] = ms.pop("off")
        found.append({"requests": row["requests"], "label": row["label"], "image_ms": ms})
        found[-1]["saved_computation"] = row["sides"][-1]["saved_computation"]
    less = [100 * (1 - row["image_ms"]["patched"] / row["image_ms"]["baseline"]) for row in found]
    cached = fmean(row["image_ms"]["patched + cache"] / row["image_ms"]["patched"] for row in found)
    statements = [
        Statement("patched takes less time than the baseline, mean", fmean(less), (13.0,), unit="points", neutral=0),
        Statement("patched gains less in the largest batch than in the smallest", less[0] - less[-1], (), "points", 0),
        Statement("latency with the cache against patched, mean", cached, is_more=False),
    ]
    return Found({"rows": found}, statements)


def savings_of_patches_and_images(lab: Lab, settings: _Settings) -> Found:
    """Figure 15: what is saved, and how long a request takes, where patches or only whole batches may be reused."""
    size = settings["requests"]
    places = range(len(lab.sizes))
    batches = [Combination(lab.sizes, tuple(size if place == own else 0 for place in places)) for own in places]
    threshold = lab.typical_change()
    sides = settings_of(
        lab.model,
        lab.block_profile(),
        # Else requests would be computed whole: here patches decide one by one, as in the paper.
        CacheOptions("patch", threshold=0.0, full_above=1.0),
        thresholds=[threshold],
        image_thresholds=[threshold],
        intervals=[],
        sums=[],
        seed=lab.seed,
    )
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row, resolution in zip(_cache_rows(lab, settings, batches, sides), lab.sizes, strict=True):
        found[str(resolution)] = {
            side["kind"]: {"image_ms": side["image_ms"], "saved_computation": side.get("saved_computation", 0.0)}
            for side in row["sides"]
        }

    def saved(name: str, kind: str) -> float:
        return 100 * found[name][kind]["saved_computation"]

    statements = [
        Statement(
            f"{name}: saved patch by patch over whole images",
            saved(name, "patch") - saved(name, "image"),
            (),
            "points",
            0,
        )
        for name in found
    ]
    if type(lab.model.pipe).__name__ == SDXL:
        first, *_, last = found
        less = saved(first, "patch") - saved(last, "patch")
        times = [found[name]["patch"]["image_ms"] / found[name]["off"]["image_ms"] for name in (first, last)]
        statements += [
            Statement(f"saved patch by patch, {first} over {last}", less, unit="points", neutral=0),
            Statement(f"time saved, {last} over {first}", 100 * (times[0] - times[1]), unit="points", neutral=0),
        ]
    return Found({"threshold": threshold, "requests": size, "by_resolution": found}, statements)


def _cache_rows(
    lab: Lab, settings: _Settings, batches: Sequence[Combination], sides: Sequence[Setting]
) -> list[dict[str, Any]]:
    """The rows of a bench of the cache, without judges of the images."""
    done = lab.start("batches", len(batches) * (len(sides) + 1) * (settings["rounds"] + 1))
    outcome = run_cache_bench(
        lab.model,
        batches,
        sides,
        lab.place,
        CacheBenchSettings(settings["rounds"], lab.scale.num_steps, seed=lab.seed),
        QualityOptions(clip=False),
        Judges(),
        on_batch=lambda label: done(1),
    )
    finish(outcome.was_interrupted)
    return outcome.result["rows"]
