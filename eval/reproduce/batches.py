"""Costs and savings of batches: PatchedServe's figures 4 and 5 (section 3), 14 and 15 (section 8.2)."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from ...data.statistics import Estimate, ratios_of
from ...profiling.experiment.rows import Row
from ...profiling.report.block_plots import summarize_block_changes
from ...profiling.steps.bench import STEPS, BenchKind, step_experiment
from ...profiling.steps.breakdown import BREAKDOWN
from ...profiling.steps.combinations import Combination
from ...profiling.steps.lanes import BenchSettings
from ...serving.cache.options import CacheOptions
from ..cache.bench import CacheBenchSettings, cache_experiment
from ..cache.quality import QualityOptions
from ..cache.sides import CacheSetting, settings_of
from ..metrics.judges import Judges
from .lab import Lab, finish
from .paper import SDXL, Measurement
from .serving import scheduling_shares
from .statement import Statement

_Settings = Mapping[str, Any]
_TINY = 0.05
"""Maximum share of a request's time that counts as tiny, the paper's word for the overhead of splitting."""


def block_savings(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figure 4: the share of blocks whose output changes by less than a threshold, by resolution."""
    summary = summarize_block_changes(lab.block_profile())
    whole = summary["whole_blocks"]
    ours = {**whole, "patches_by_threshold": summary["by_resolution"], "thresholds": summary["thresholds"]}
    return Measurement(ours, [savings_differ(whole["by_request"]["mse"])])


def savings_differ(by_request: Mapping[str, Sequence[float]]) -> Statement:
    """Return the statement that two sizes skip different shares of their blocks, whichever skips more. `by_request`
    holds the shares of single requests by resolution, from the smallest to the largest.

    The smallest and the largest size are compared, because the largest of all differences would be large by chance.
    Requests of two sizes are independent of each other, so that their pairing does not matter.
    """
    (small, own), *_, (large, other) = by_request.items()
    found = Estimate.of_mean([100 * (one - two) for one, two in zip(own, other, strict=False)])
    text = f"blocks skipped, difference between {small} and {large}"
    low = high = None
    if found.interval is not None:
        low, high = sorted(map(abs, found.interval))
        low = 0.0 if found.interval[0] < 0 < found.interval[1] else low
    return Statement(text, Estimate(abs(found.value), low, high, found.n), (), "points", 1)


def step_latencies(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figure 5: step latencies of all batches of three requests."""
    counts = [each for each in product(range(4), repeat=len(lab.sizes)) if sum(each) == 3]
    batches = sorted((Combination(lab.sizes, each) for each in counts), key=lambda each: each.num_pixels)
    result = _step_bench(lab, settings, STEPS, batches)
    rows = {row["label"]: row for row in result["rows"]}
    small, *_, large = rows
    said = [Statement(f"{large} against {small}", _latency_ratio(rows[large], rows[small]), (1.68,))]
    if {"SML", "MML"} <= set(rows):
        text = "SML against MML, which has more pixels"
        said.append(Statement(text, _latency_ratio(rows["SML"], rows["MML"])))
    return Measurement({name: result[name] for name in ("rows", "letters", "run_dir")}, said)


def _latency_ratio(own: Row, other: Row) -> Estimate:
    """Return the median of the repeats' ratios of two independent batches, whose pairing does not matter."""
    return Estimate.of_median(ratios_of(own["patched_samples_ms"], other["patched_samples_ms"]))


def batched_with_and_without_cache(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figure 14: latency and throughput of mixed batches on plain diffusers, patched, and patched with the
    cache, and the shares of a request's time that splitting, the cache and the scheduler take.
    """
    batches = [Combination(lab.sizes, (count,) * len(lab.sizes)) for count in settings["of_each"]]
    sides = [
        CacheSetting("baseline", "plain", CacheOptions(), engine="plain"),
        CacheSetting("patched + cache", "patch", lab.cache()),
    ]
    found: list[dict[str, Any]] = []
    for row in _cache_rows(lab, settings, batches, sides):
        by_name = {"patched" if side["label"] == "off" else side["label"]: side for side in row["sides"]}
        kept = {name: {side: by_name[side][name] for side in by_name} for name in ("image_ms", "seconds_by_round")}
        cached = {name: by_name["patched + cache"][name] for name in ("saved_computation", "overhead_s_by_round")}
        found.append({"requests": row["requests"], "label": row["label"], **kept, **cached})
    split = [
        splitting_shares(row, lab.scale.num_steps) for row in _step_bench(lab, settings, BREAKDOWN, batches)["rows"]
    ]
    scheduling = scheduling_shares(lab, settings)
    for row, shares in zip(found, split, strict=True):
        seconds = row["seconds_by_round"]["patched + cache"]
        cache = [own / of for own, of in zip(row["overhead_s_by_round"], seconds, strict=True)]
        row["overheads"] = {
            name: Estimate.of_mean(each).to_json() for name, each in (("splitting", shares), ("cache", cache))
        }
    ours = {"rows": found, "scheduling": {name: each.to_json() for name, each in scheduling.items()}}
    overheads = [
        Statement(
            f"splitting, share of the time: tiny (below {_TINY:.0%})",
            Estimate.of_mean(np.mean(split, 0).tolist()),
            (),
            "share",
            _TINY,
            is_more=False,
        ),
        Statement(
            f"scheduler's decisions, share of the time: negligible (below {_TINY:.0%})",
            scheduling["patchedserve"],
            (),
            "share",
            _TINY,
            is_more=False,
        ),
    ]
    return Measurement(ours, [*gains_by_round(found), *overheads])


def gains_by_round(rows: Sequence[Mapping[str, Any]]) -> list[Statement]:
    """Return figure 14's statements about times, from the times of each round of its batches, the smallest first. All
    sides of a round have served the same requests.
    """

    def of_side(name: str) -> np.ndarray:
        return np.array([row["seconds_by_round"][name] for row in rows])

    patched = of_side("patched")
    less = 100 * (1 - patched / of_side("baseline"))
    cached = np.log(of_side("patched + cache") / patched).mean(0)
    overhead = np.array([np.divide(row["overhead_s_by_round"], row["requests"]) for row in rows])
    return [
        Statement(
            "patched takes less time than the baseline, mean",
            Estimate.of_mean(less.mean(0).tolist()),
            (13.0,),
            "points",
            0,
        ),
        Statement(
            "patched gains less in the largest batch than in the smallest",
            Estimate.of_mean((less[0] - less[-1]).tolist()),
            (),
            "points",
            0,
        ),
        Statement(
            "latency with the cache against patched, mean",
            Estimate.of_ratios(np.exp(cached).tolist()),
            is_more=False,
        ),
        Statement(
            "cache management of a request, largest batch against smallest",
            Estimate.of_ratios((overhead[-1] / overhead[0]).tolist()),
            is_more=False,
        ),
    ]


def splitting_shares(row: Row, num_steps: int) -> list[float]:
    """Return the share of a patched request's time that splitting takes, by repeat of the breakdown of a step: moves of
    data beyond those of plain diffusers, and packing the batch once per `num_steps` steps.
    """
    patched, plain = (row["sides"][name] for name in ("patched", "same_resolution"))
    packing_ms = max(0.0, patched["first_ms"] - patched["step_ms"]) / num_steps
    return [
        (own["stitching"] - other["stitching"] + packing_ms) / patched["step_ms"]
        for own, other in zip(patched["ms_by_repeat"], plain["ms_by_repeat"], strict=True)
    ]


def savings_of_patches_and_images(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figure 15: savings and latency of a request if single patches, or only whole batches, may be reused."""
    size = settings["requests"]
    places = range(len(lab.sizes))
    batches = [Combination(lab.sizes, tuple(size if place == own else 0 for place in places)) for own in places]
    threshold = lab.typical_change()
    sides = settings_of(
        lab.model,
        lab.block_profile(),
        # Otherwise requests would be computed whole; here every patch is decided separately, as in the paper.
        CacheOptions("patch", threshold=0.0, full_above=1.0),
        thresholds=[threshold],
        image_thresholds=[threshold],
        intervals=[],
        sums=[],
        seed=lab.seed,
    )
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row, resolution in zip(_cache_rows(lab, settings, batches, sides), lab.sizes, strict=True):
        found[str(resolution)] = {
            side["kind"]: {
                "image_ms": side["image_ms"],
                "saved_computation": side.get("saved_computation", 0.0),
                "seconds_by_round": side["seconds_by_round"],
                "saved_by_round": side.get("saved_by_round", []),
            }
            for side in row["sides"]
        }
    statements = savings_by_round(found, is_sdxl=type(lab.model.pipe).__name__ == SDXL)
    return Measurement({"threshold": threshold, "requests": size, "by_resolution": found}, statements)


def savings_by_round(by_resolution: Mapping[str, Mapping[str, Any]], *, is_sdxl: bool) -> list[Statement]:
    """Return figure 15's statements, by rounds. Reuse of a batch is decided for all of its requests at once, so that
    they are not independent evidence. All sides and resolutions have the same prompts and seeds in a round.

    Args:
        by_resolution: `seconds_by_round` and `saved_by_round` of each kind of cache, by resolution, smallest first.
        is_sdxl: whether the paper's statements about SDXL alone are included.
    """

    def of_kind(name: str, kind: str, figure: str) -> np.ndarray:
        return np.array(by_resolution[name][kind][figure])

    def mean(points: np.ndarray) -> Estimate:
        return Estimate.of_mean((100 * points).tolist())

    saved = {
        (name, kind): of_kind(name, kind, "saved_by_round") for name in by_resolution for kind in ("patch", "image")
    }
    seconds = {
        (name, kind): of_kind(name, kind, "seconds_by_round")
        for name in by_resolution
        for kind in ("patch", "image", "off")
    }
    statements = []
    for name in by_resolution:
        more = mean(saved[name, "patch"] - saved[name, "image"])
        times = Estimate.of_ratios((seconds[name, "patch"] / seconds[name, "image"]).tolist())
        statements += [
            Statement(f"{name}: saved patch by patch over whole images", more, (), "points", 0),
            Statement(f"{name}: time patch by patch against whole images", times, is_more=False),
        ]
    if is_sdxl:
        first, *_, last = by_resolution
        taken = {name: seconds[name, "patch"] / seconds[name, "off"] for name in (first, last)}
        more = mean(saved[first, "patch"] - saved[last, "patch"])
        statements += [
            Statement(f"saved patch by patch, {first} over {last}", more, (), "points", 0),
            Statement(f"time saved, {last} over {first}", mean(taken[first] - taken[last]), (), "points", 0),
        ]
    return statements


def _step_bench(lab: Lab, settings: _Settings, kind: BenchKind, batches: Sequence[Combination]) -> dict[str, Any]:
    """Run a benchmark of single steps and return its result."""
    done = lab.start("combinations", len(batches))
    bench = BenchSettings(settings["repeats"], settings["warmup"], lab.seed)
    outcome = step_experiment(kind, lab.model, batches, lab.place, bench).run(lab.place, on_row=lambda: done(1))
    finish(outcome.was_interrupted)
    return outcome.result


def _cache_rows(
    lab: Lab, settings: _Settings, batches: Sequence[Combination], sides: Sequence[CacheSetting]
) -> list[dict[str, Any]]:
    """Run a benchmark of the cache without judges of the images, and return its rows."""
    done = lab.start("batches", len(batches) * (len(sides) + 1) * (settings["rounds"] + 1))
    experiment = cache_experiment(
        lab.model,
        batches,
        sides,
        lab.place,
        CacheBenchSettings(settings["rounds"], lab.scale.num_steps, seed=lab.seed),
        QualityOptions(clip=False),
        Judges(),
        on_batch=lambda label: done(1),
    )
    outcome = experiment.run(lab.place)
    finish(outcome.was_interrupted)
    return outcome.result["rows"]
