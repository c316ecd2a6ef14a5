"""Times of building the patch layout: 16 requests in each of several mixes, median of many runs.

    python tests/benchmarks/bench_layout.py [--runs 2000]

Prints a Markdown table in microseconds; the goal is 1000 for 16 requests of 32x32 latents with patch size 8.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from patchedserve.serving.layout.device_tables import index_tensors
from patchedserve.serving.layout.patch_layout import PatchLayout

MIXES = {
    "16 of 32x32": [(32, 32)] * 16,
    "16 of 16x16, 24x24, 32x32": [((16, 24, 32)[i % 3],) * 2 for i in range(16)],
    "16 of 128x128": [(128, 128)] * 16,
}


def median_us(function: Callable[[], object], runs: int) -> float:
    """Return the median time of a call in microseconds, after a tenth of the runs as warm-up."""
    times: list[float] = []
    for i in range(runs + runs // 10):
        start = time.perf_counter()
        function()
        if i >= runs // 10:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="timed runs of each figure")
    runs = parser.parse_args().runs
    print("| requests (latents) | patch size | patches | build us | tensors us |")
    print("|---|--:|--:|--:|--:|")
    for name, sizes in MIXES.items():
        for patch_size in (8, 4):
            layout = PatchLayout.build(sizes, patch_size)
            build = median_us(lambda s=sizes, p=patch_size: PatchLayout.build(s, p), runs)
            tensors = median_us(lambda at=layout: index_tensors(at, "cpu"), runs)
            print(f"| {name} | {patch_size} | {layout.num_patches} | {build:.0f} | {tensors:.0f} |")


if __name__ == "__main__":
    main()
