"""Speed at which f(t) of a cascade follows changing prompts (DiffServe section 3.3).

    python tests/benchmarks/cascade_mix.py --bank DIR [--draws 500] [--output-file mix.json]

A controller that starts with the confidences of a bank by `psctl profile cascade` scores 500 light images of one
object, then images of two objects. After several numbers of these, its f(t) is compared with the share among all
images of two objects in the bank, at all thresholds of its grid. Images come in random order and may repeat, as
requests do.

The bar is 0.05 after 500 requests. The limit of a window of 500 is known: the largest difference between a sample and
its population has Kolmogorov's distribution, which is the column `kolmogorov` of the table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kstwo

from patchedserve.data.files import write_json
from patchedserve.profiling.cascade.bank import Bank
from patchedserve.serving.cascade.deferral import GRID, WINDOW, OnlineDeferral

BAR = 0.05
SEEN = (0, 100, 250, 500, 1000)
"""Numbers of images of two objects after which the curves are compared."""


def has_two_objects(caption: str) -> bool:
    """Return whether a prompt names two objects, by the phrasings of the bundled captions."""
    return " and " in caption or "two " in caption


def differences(bank: Bank, num_draws: int) -> np.ndarray:
    """Return the differences of f(t) from the truth, by draw, number of images seen, and threshold."""
    by_kind: tuple[list[float], list[float]] = ([], [])
    for entry in bank.entries:
        by_kind[has_two_objects(entry.prompt)].append(entry.confidence)
    single, double = map(np.asarray, by_kind)
    grid = np.arange(GRID, 1 + GRID / 2, GRID)
    truth = np.searchsorted(np.sort(double), grid) / len(double)
    rng = np.random.default_rng(0)
    found = np.empty((num_draws, len(SEEN), len(grid)))
    for draw in range(num_draws):
        online = OnlineDeferral(bank.confidences)
        for confidence in rng.choice(single, WINDOW):
            online.note(confidence)
        seen = 0
        for place, count in enumerate(SEEN):
            for confidence in rng.choice(double, count - seen):
                online.note(confidence)
            seen = count
            found[draw, place] = np.abs([online.curve.share(each) for each in grid] - truth)
    return found


def rows_of(found: np.ndarray) -> list[dict[str, Any]]:
    """Return the statistics of the differences after each number of images."""
    return [
        {
            "seen": count,
            "worst_threshold_mean": each.max(axis=1).mean(),
            "worst_threshold_p95": np.quantile(each.max(axis=1), 0.95),
            "draws_within_everywhere": (each.max(axis=1) <= BAR).mean(),
            "thresholds_within": (each <= BAR).mean(),
        }
        for place, count in enumerate(SEEN)
        for each in [found[:, place]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    bank = Bank.load(given.bank)
    found = {
        "num_prompts": len(bank.entries),
        "of_two_objects": sum(has_two_objects(entry.prompt) for entry in bank.entries),
        "draws": given.draws,
        "window": WINDOW,
        "bar": BAR,
        "kolmogorov": float(kstwo.cdf(BAR, WINDOW)),
        "rows": rows_of(differences(bank, given.draws)),
    }
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)


if __name__ == "__main__":
    main()
