"""Results of commands as tables, shown where `--json` prints everything. This module imports no torch or matplotlib."""

from collections.abc import Mapping
from typing import Any

from ...data.run_facts import describe
from .table import Table
from .words import DASH, number, share

_SUMMARY_ROWS = (
    ("duration", "duration", "s"),
    ("throughput", "throughput_qps", "images/s"),
    ("goodput", "goodput_qps", "images/s"),
    ("latency mean", "latency_mean", "s"),
    ("latency p50", "latency_p50", "s"),
    ("latency p95", "latency_p95", "s"),
    ("latency p99", "latency_p99", "s"),
    ("queueing mean", "queueing_mean", "s"),
    ("mean batch size", "batch_size_mean", ""),
)
_STEP_SIDES = {"one_by_one": "one by one", "same_resolution": "same resolution", "patched": "patched"}


def run_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Return the summary of a served or simulated run."""
    rows = [
        (f"{name} requests", str(summary[f"{name}_requests"]))
        for name in ("total", "completed", "failed", "discarded", "cancelled")
        if name in ("total", "completed") or summary[f"{name}_requests"]
    ]
    rows += [(f"  {reason}", str(count)) for reason, count in summary["discarded_by_reason"].items()]
    # Figures that only the engine has are missing from a run over HTTP.
    rows += [(label, number(summary[key], unit)) for label, key, unit in _SUMMARY_ROWS if key in summary]
    if "scheduling_mean" in summary:
        decision_s = summary["scheduling_mean"]
        rows.append(("scheduling mean", number(None if decision_s is None else decision_s * 1e3, "ms")))
    if (drift := summary.get("predictor_drift")) and drift["mean_error"] is not None:
        errors = f"{share(drift['first_error'])} in the first steps, {share(drift['mean_error'])} in the last"
        rows.append(("step latencies off by", errors))
    if summary["slo_scale"] is not None:
        name = f"SLO attainment ({summary['slo_scale']:g}x standalone)"
        rows.append((name, share(summary["slo_attainment_rate"])))
        if doubtful := summary.get("standalone_times_served"):
            rows.append(("  which says little", slo_doubt(doubtful)))
    config = summary["config"]
    if "cache" in config:
        rows.append(("patch cache", config["cache"]))
    if (cache := summary.get("cache")) is not None:
        rows.append(("  computation saved", share(cache["saved_computation"])))
    if (graphs := summary.get("graphs")) is not None:
        rows.append((f"recordings ({graphs['mode']})", f"{graphs['recordings']} of {graphs['keys']} kinds of passes"))
        rows.append(("  steps replayed", share(graphs["replay_rate"])))
    served_by = " with ".join(config[name] for name in ("system", "policy") if config.get(name))
    whole = Table(f"{summary['model']}, {served_by}", ("figure", "value"), rows)
    return [whole, resolution_table(summary["per_resolution"])]


def slo_doubt(times_served: Mapping[str, float]) -> str:
    """Return why SLOs are unreliable, given by resolution the ratio of standalone latency to time when served."""
    worst = max(times_served, key=lambda name: times_served[name])
    return (
        f"{worst} alone took {times_served[worst]:.3g} times as long as when it was served: measured on a busy machine "
        "(--remeasure)"
    )


def resolution_table(per_resolution: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the figures of every resolution in a summary."""
    rows = [
        (
            resolution,
            str(figures["requests"]),
            str(figures["completed"]),
            share(figures["slo_attainment_rate"]),
            *(number(figures[key], "s") for key in ("latency_mean", "latency_p95", "queueing_mean")),
        )
        for resolution, figures in per_resolution.items()
    ]
    columns = ("resolution (px)", "requests", "completed", "SLO attainment")
    return Table("By resolution", (*columns, "mean latency", "p95 latency", "mean queueing"), rows)


def search_table(found: Mapping[str, Any]) -> Table:
    """Return the result of a search for a rate, or for a number of GPUs."""
    rate, reached = found["highest_request_rate"], found["attainment_at_highest_rate"]
    rows = [
        ("highest rate", f"{rate:.3g}{_ends(found, 'highest_request_rate')}", str(found["gpus"]), share(reached, 2))
    ]
    if found["gpus_needed"] is not None:
        reached = share(found["attainment_with_gpus_needed"], 2)
        rows.append(
            ("GPUs needed", str(found["request_rate"]), f"{found['gpus_needed']}{_ends(found, 'gpus_needed')}", reached)
        )
    title = f"SLO attainment of at least {found['slo_target']:.2%}"
    return Table(title, ("", "requests/s", "GPUs", "attainment"), rows)


def _ends(found: Mapping[str, Any], name: str) -> str:
    """Return the interval of a figure as text; empty if it has none."""
    figure = found["figures"][name]
    return "" if figure["low"] is None else f" ({figure['low']:.3g} to {figure['high']:.3g})"


def step_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of `steps.json`: a row for every combination, the summary and, with several efforts, all
    medians.
    """
    has_efforts = len(result["efforts"]) > 1

    def cell(row: Mapping[str, Any], side: str) -> str:
        effort = row[f"{side}_effort"]
        # Without a mark, the memory format is the default one.
        is_cl = side == "same_resolution" and row["same_resolution_format"] == "channels-last"
        return number(row[f"{side}_ms"], "ms") + " cl" * is_cl + f" {effort}" * (has_efforts and effort != "eager")

    rows = [
        (
            row["label"],
            *(cell(row, side) for side in _STEP_SIDES),
            f"{number(row['patched_p10_ms'])} to {number(row['patched_p90_ms'], 'ms')}",
            share(row["patched_share_of_peak"], 0),
            f"{row['ratio']:.2f}x",
            _STEP_SIDES[row["baseline"]],
        )
        for row in result["rows"]
    ]
    notes = [", ".join(f"{letter} {size}" for letter, size in result["letters"].items())]
    if any(row["same_resolution_format"] == "channels-last" for row in result["rows"]):
        notes.append("cl: faster in channels-last memory format")
    notes.append(f"of peak: share of {result['matrix_peak_gflops']:.0f} GFLOP/s, measured in large products")
    left_out = {name: reason for row in result["rows"] for name, reason in row["left_out"].items()}
    notes += [f"left out: {name} ({reason})" for name, reason in left_out.items()]
    if result["is_plain_for_one_resolution"]:
        notes.append("patched hands batches of one resolution to plain diffusers")
    columns = ("requests", *_STEP_SIDES.values(), "p10 to p90", "of peak", "times as fast", "as the best baseline")
    means = [
        ("mixed, geometric mean", _times(result["mean_ratio_mixed"])),
        ("all, minimum", _times(result["min_ratio"])),
    ]
    tables = [
        Table(describe(result), columns, rows, note="; ".join(filter(None, notes))),
        Table("patched is so many times as fast as the best baseline", ("", ""), means),
    ]
    return tables + [_effort_table(result)] * has_efforts


def _effort_table(result: Mapping[str, Any]) -> Table:
    """Return the median times of each side with each effort, in the faster memory format."""
    places = [(side, effort) for side in _STEP_SIDES for effort in result["efforts"]]
    rows = []
    for row in result["rows"]:
        best: dict[tuple[str, str], float] = {}
        for each in row["times"]:
            place = each["side"], each["effort"]
            best[place] = min(each["ms"], best.get(place, each["ms"]))
        rows.append((row["label"], *(number(best[place]) if place in best else DASH for place in places)))
    columns = ("requests", *(f"{_STEP_SIDES[side]}, {effort}" for side, effort in places))
    return Table("Milliseconds a step, by effort", columns, rows)


def breakdown_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of `breakdown.json`, one for every combination."""
    tables = []
    for row in result["rows"]:
        sides = [row["sides"][name] for name in ("patched", "same_resolution")]
        rows = []
        for category in result["categories"]:
            cells: list[str] = []
            for side in sides:
                ms = side["ms"][category]
                cells += [number(ms, "ms"), share(ms / side["step_ms"], 0)]
            rows.append((category.replace("_", "-"), *cells))
        rows.append(("step", number(sides[0]["step_ms"], "ms"), "", number(sides[1]["step_ms"], "ms"), ""))
        columns = ("where a step's time goes", "patched", "", "same resolution", "")
        tables.append(Table(f"{row['label']}: {describe(result)}", columns, rows))
    return tables


def profile_table(result: Mapping[str, Any]) -> Table:
    """Return the table of a latency profile: the spread of the combinations of every batch size."""
    by_size: dict[int, list[float]] = {}
    for row in result["rows"]:
        by_size.setdefault(row["requests"], []).append(row["median_ms"])
    rows = []
    for size, times in sorted(by_size.items()):
        times.sort()
        cells = (times[0], times[len(times) // 2], times[-1])
        rows.append((str(size), str(len(times)), *(number(ms, "ms") for ms in cells), _times(times[-1] / times[0])))
    columns = ("requests", "combinations", "fastest", "median", "slowest", "slowest / fastest")
    floor = result["noise_floor"]
    note = "" if floor is None else f"noise floor: the visits leave a median uncertain by {floor:.1%}"
    return Table(describe(result), columns, rows, num_words=0, note=note)


def edit_profile_table(result: Mapping[str, Any]) -> Table:
    """Return the table of an edit profile: its fitted lines, and their errors on held-out measurements."""
    rows = []
    for name, key, terms in (
        ("step", "compute", result["terms"]),
        ("first step", "first", result["terms"]),
        ("load", "load", result["load_terms"]),
    ):
        fit = result[key]
        line = " + ".join(
            f"{seconds * 1e3:.3g} {term}" for seconds, term in zip(fit["coefficients"], terms, strict=True) if seconds
        )
        r2 = DASH if fit["r2"] is None else f"{fit['r2']:.3f}"
        rows.append((name, line, str(fit["num_held_out"]), share(fit["mape"]), r2))
    ratios = [row["ratio"] for row in result["steps"]]
    return Table(
        describe(result["facts"]),
        ("", "milliseconds", "held out", "MAPE", "R2"),
        rows,
        num_words=2,
        note=f"the same edits computed whole take {min(ratios):.2f} to {max(ratios):.2f} times as long",
    )


def block_table(result: Mapping[str, Any]) -> Table:
    """Return the table of a block profile: the share of patches that change little, by block and resolution."""
    sizes = result["by_block"]
    return Table(
        f"{result['model']}: share of patches whose output changes by less than {result['table_threshold']:g} in a "
        "step",
        ("block", *sizes),
        [(block, *(share(sizes[size][block], 0) for size in sizes)) for block in result["blocks"]],
        note=f"mean squared change relative to the mean square; {result['num_rows']:,} rows",
    )


def latency_training_table(result: Mapping[str, Any]) -> Table:
    """Return the held-out errors of a latency predictor, beside those of simpler ones."""
    fit, about = result["fit"], result["circumstances"]
    parameters = [f"{name} {value:g}" for name, value in fit["parameters"].items() if name != "cross_validated_mape"]
    rows = []
    labels = {"svr": "SVR", "linear": "linear baseline", "pixels": "look-up by pixels"}
    for name, label in labels.items():
        errors = fit["errors"][name]
        label += " (kept)" if name == fit["kept"] else ""
        r2 = DASH if errors["r2"] is None else f"{errors['r2']:.4f}"
        rows.append((label, f"{errors['mape']:.2%}", r2, f"{errors['mse_ms2']:.3g} ms2"))
    floor = fit["noise_floor"]
    rows.append(("noise floor: the table against itself", DASH if floor is None else f"{floor:.2%}", DASH, DASH))
    note = (
        f"fitted to {fit['num_train']} combinations, errors on {len(fit['held_out'])} others; SVR: "
        f"{', '.join(parameters)}, {fit['num_support_vectors']} support vectors; one prediction takes "
        f"{result['prediction_us']:.0f} us"
    )
    title = "imported table" if about is None else describe(about)
    return Table(title, ("held out", "MAPE", "R2", "MSE"), rows, note=note)


def cache_training_table(result: Mapping[str, Any]) -> Table:
    """Return the scores of a cache predictor on held-out requests, beside those of the best plain threshold."""
    test, baseline = result["test"], result["baseline"]
    cut = DASH if baseline["cut"] is None else f"{baseline['cut']:.3g}"
    images = result.get("images")
    note = (
        f"{test['rows']:,} rows of {test['requests']} held-out requests, {share(test['share_within'])} of them "
        f"within the threshold; trained on {result['train']['rows']:,} rows of {result['train']['requests']}"
    )
    if images is not None:
        note += (
            f"\nimages of {images['requests']} requests, at most {images['max_reuse']} reuses in a row: SSIM "
            f"{images['ssim']:.4f} (target {images['target_ssim']:g}) with {share(images['saved_computation'])} saved, "
            f"confidence {images['min_confidence']:g}; patches computed because the predictor said so: "
            f"{images['patches_refused']:,}, because of reuses in a row: {images['patches_expired']:,}"
        )
    rows = [
        (label, *(share(figures[name]) for name in ("precision", "recall", "f1", "reuse_share")))
        for label, figures in (("random forest", result), (f"input changed by at most {cut}", baseline))
    ]
    return Table(
        f"{result['model']}, {result['scheduler']}, threshold {result['threshold']:g}",
        ("", "precision", "recall", "F1", "reuses"),
        rows,
        note=note,
    )


def schedule_table(result: Mapping[str, Any]) -> Table:
    """Return the lists of computed steps that the search found, and the image similarity of held-out requests."""
    rows = [
        (
            number,
            ", ".join(map(str, result["plans"][int(number)])),
            share(figures["saved_computation"]),
            f"{figures['ssim']:.4f}",
            f"{figures['ssim_min']:.3f}",
        )
        for number, figures in result["by_steps"].items()
    ]
    return Table(
        f"{result['model']}, {result['scheduler']}, target SSIM {result['target_ssim']:g}",
        ("steps", "computed", "saved", "SSIM", "least"),
        rows,
    )


def _times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}x"
