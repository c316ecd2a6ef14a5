"""Check that the simulator ranks policies as the engine does, from the result of `psctl bench slo --on both --json`.

At each rate, any two policies have served the same traces, over which their real difference has a 95 % interval
(Student's t). The simulated difference should have the same sign if that interval excludes 0, and lie within 5 points.

    python tests/benchmarks/paired_points.py RESULT.json
"""

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

_WITHIN = 5.0


def main(path: str) -> None:
    """Print a line for each pair at each rate, and the number that agree."""
    result = json.loads(Path(path).read_text())
    by_seed = {
        (side, point["request_rate"], point["policy"]): np.array(list(point["attainment_by_seed"].values()))
        for side, sides in result["engines"].items()
        for point in sides["points"]
    }
    rates = sorted({rate for _, rate, _ in by_seed})
    names = result["settings"]["systems"]
    print(
        f"{result['described']}; points of SLO attainment, first less second, {len(result['settings']['seeds'])} traces"
    )
    num_clear = num_signs = num_within = num_pairs = 0
    for rate in rates:
        for first, second in combinations(names, 2):
            real, simulated = (
                100 * (by_seed[side, rate, first] - by_seed[side, rate, second]) for side in ("real", "simulator")
            )
            half = stats.t.ppf(0.975, len(real) - 1) * real.std(ddof=1) / len(real) ** 0.5
            is_clear, off = abs(real.mean()) > half, simulated.mean() - real.mean()
            num_pairs += 1
            num_clear += is_clear
            num_signs += is_clear and bool(np.sign(real.mean()) == np.sign(simulated.mean()))
            num_within += abs(off) <= _WITHIN
            pair = f"{first.split(':')[-1]} - {second.split(':')[-1]}"
            print(
                f"{rate:4g}/s  {pair:30} real {real.mean():+6.1f} +- {half:4.1f}{'*' if is_clear else ' '}  "
                f"simulated {simulated.mean():+6.1f}  off {off:+5.1f}"
            )
    print(
        f"beyond their interval (*): {num_clear} of {num_pairs}, of one sign {num_signs}; within 5 points: {num_within}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
