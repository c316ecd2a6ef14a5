"""Distance of plans of masked passes, among them the paper's greedy one, from the optimal plan; no model, no clock.

    python tests/benchmarks/edit_plans.py [--instances 100] [--output-file results/edit-plans.json]

Passes have 70 units, as SDXL has transformer blocks. In `alike` all units take the same time, as in the paper's
Algorithm 1; in `mixed` each has times of its own. Computing active tokens only takes 0.1 to 0.6 of the time of all
tokens, and loading their inputs takes `load` times the mean time of computing all tokens of a unit. With `return`, a
unit that computes all tokens after one that computed active tokens loads a third of that; where records hold outputs,
as the paper's do, this is free.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchedserve.data.files import write_json
from patchedserve.serving.editing.plan import PLANS, ReusePlan, UnitTimes

RESULTS = Path(__file__).with_name("results")
NUM_UNITS = 70
LOADS = (0.1, 0.25, 0.5, 1.0, 2.0)


def sequential_plan(units: Sequence[UnitTimes]) -> ReusePlan:
    """All units reuse, and each waits for its own load, which starts when the unit before it is done."""
    return ReusePlan((True,) * len(units), sum(unit.load_s + unit.active_s for unit in units))


def ideal_plan(units: Sequence[UnitTimes]) -> ReusePlan:
    """The fastest plan if loads take no time, which is a bound for all others."""
    reuses = tuple(unit.active_s <= unit.all_s for unit in units)
    return ReusePlan(reuses, sum(min(unit.active_s, unit.all_s) for unit in units))


COMPARED: Mapping[str, Callable[[Sequence[UnitTimes]], ReusePlan]] = {
    **PLANS,
    "sequential": sequential_plan,
    "ideal": ideal_plan,
}


def instance(rng: np.random.Generator, load: float, *, is_mixed: bool, has_return: bool) -> list[UnitTimes]:
    """Return a random pass; `load` is the mean time of a unit's load, relative to computing all of its tokens."""
    count = NUM_UNITS if is_mixed else 1
    all_s = rng.uniform(0.5, 1.5, count)
    active_s = all_s * rng.uniform(0.1, 0.6, count)
    load_s = load * rng.uniform(0.5, 1.5, count)
    # Rounding makes nearly equal times equal, which leaves fewer plans to compare.
    times = np.round(np.stack([all_s, active_s, load_s, load_s / 3 * has_return], 1), 3)
    return [UnitTimes(*map(float, row)) for row in times] * (NUM_UNITS // count)


def compare(num: int, load: float, *, is_mixed: bool, has_return: bool) -> dict[str, Any]:
    """Return each plan's mean and largest latency relative to the optimal plan, and how often it is optimal."""
    rng, found = np.random.default_rng(0), []
    for _ in range(num):
        units = instance(rng, load, is_mixed=is_mixed, has_return=has_return)
        latencies = {name: make(units).latency_s for name, make in COMPARED.items()}
        found.append({name: latency / latencies["optimal"] for name, latency in latencies.items()})
    ratios = {name: np.array([each[name] for each in found]) for name in COMPARED}
    return {
        "units": "mixed" if is_mixed else "alike",
        "return": has_return,
        "load": load,
        "plans": {
            name: {
                "mean": round(float(each.mean()), 4),
                "worst": round(float(each.max()), 4),
                "is_optimal": round(float((each <= 1 + 1e-9).mean()), 4),
            }
            for name, each in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100, help="of each kind")
    parser.add_argument("--output-file", type=Path, default=RESULTS / "edit-plans.json")
    arguments = parser.parse_args()
    kinds = [
        compare(arguments.instances, load, is_mixed=is_mixed, has_return=has_return)
        for is_mixed in (False, True)
        for has_return in (False, True)
        for load in LOADS
    ]
    for kind in kinds:
        means = ", ".join(f"{name} {each['mean']:.3f}" for name, each in kind["plans"].items())
        print(f"{kind['units']} units, load {kind['load']}, return {kind['return']}: {means}")
    paper = [kind["plans"]["paper"]["mean"] for kind in kinds]
    content = {
        "instances": arguments.instances,
        "units": NUM_UNITS,
        "paper_to_optimal": round(float(np.mean(paper)), 4),
    }
    write_json(arguments.output_file, content | {"kinds": kinds})
    print(f"the paper's plan takes {content['paper_to_optimal']:.3f} times as long as the optimal one")


if __name__ == "__main__":
    main()
