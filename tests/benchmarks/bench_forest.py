"""Times of the cache predictor's decision over the patches of mixed batches: forests of several sizes, one thread.

    python tests/benchmarks/bench_forest.py [--runs 2000] [--patches 512]

Prints a Markdown table in microseconds; the goal is 200 for 512 patches on a CPU. Every run decides over different
rows, as in serving: with the same rows the processor would learn the branches of the searches.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier

from patchedserve.kernels.forest import forest_predict
from patchedserve.kernels.forest_tables import FlatForest
from patchedserve.training.cache.predictor import features_of

FORESTS = ((8, 8, 63), (16, 6, 63), (16, 8, 63), (24, 8, 63), (16, 10, 126))
NUM_BLOCKS, NUM_BATCHES = 9, 32


def batch(num_patches: int, generator: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Return the arguments of one call of `features_of`: requests of mixed sizes and steps, with all their patches."""
    patches, sides, steps = [], [], []
    while sum(patches) < num_patches:
        side = int(generator.choice([128, 192, 256]))
        patches.append((side // 32) ** 2)
        sides.append(float(side * side))
        steps.append(float(generator.integers(1, 50)) / 50)
    pixels, fractions = (np.repeat(values, patches)[:num_patches] for values in (sides, steps))
    change = 10 ** generator.normal(-2.5, 1, num_patches)
    reuses = generator.integers(0, 4, num_patches)
    block = np.full(num_patches, generator.integers(0, NUM_BLOCKS))
    return tuple(torch.from_numpy(np.ascontiguousarray(v)).float() for v in (change, block, fractions, reuses, pixels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="timed runs of each figure")
    parser.add_argument("--patches", type=int, default=512, help="rows of a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    rows = torch.cat([features_of(*batch(512, generator)) for _ in range(60)]).numpy()
    gain = generator.normal(0, 0.7, NUM_BLOCKS)[rows[:, 1].astype(int)]
    labels = rows[:, 0] + gain + 0.3 * rows[:, 3] + generator.normal(0, 0.3, len(rows)) < -2.3
    batches = [batch(options.patches, generator) for _ in range(NUM_BATCHES)]
    print("| trees | depth | leaves | features us | decision us | p10 to p90 us | tables KiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for trees, depth, leaves in FORESTS:
        forest = RandomForestClassifier(trees, max_depth=depth, max_leaf_nodes=leaves, random_state=0).fit(rows, labels)
        flat = FlatForest.of_trees([tree.tree_ for tree in forest.estimators_], rows.shape[1])
        of_features, of_decision = [], []
        with torch.inference_mode():
            for i in range(options.runs + options.runs // 10):
                start = time.perf_counter()
                features = features_of(*batches[i % NUM_BATCHES])
                middle = time.perf_counter()
                forest_predict(features, flat)
                if i >= options.runs // 10:
                    of_features.append((middle - start) * 1e6)
                    of_decision.append((time.perf_counter() - middle) * 1e6)
        deciles = statistics.quantiles(of_decision, n=10)
        print(
            f"| {trees} | {flat.depth} | {leaves} | {statistics.median(of_features):.0f} | "
            f"{statistics.median(of_decision):.0f} | {deciles[0]:.0f} to {deciles[-1]:.0f} | {flat.num_bytes >> 10} |"
        )


if __name__ == "__main__":
    main()
