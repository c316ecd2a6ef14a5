"""Routers of edits (InstGenIE, section 4.4) in the simulator, on a virtual clock.

    python tests/benchmarks/edit_routing.py [--requests 1000] [--seeds 10] [--output-file results/edit-routing.json]
        [--edit-profile FILE --latency FILE]

Workers serve edits with the mask ratios of the public trace, 30 steps each, in batches of up to 8. Step times are the
committed ones for emoji-xl in float32: whole images by `steps-emoji-xl-float32.json`, parts by a line through
`edit-emoji-xl-256.json` and `edit-emoji-xl-512.json`; both were measured on quiet machines of two cores, but not on the
same one. If a profile of emoji-xl's edits (psctl profile edits) and step latencies of the same machine (psctl profile
latency) are given, they determine steps, records and loads instead, with mixed sizes. Loads are shares of the rate at
which the workers complete edits that all wait at once.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.edits import EditDraws, read_mask_ratios
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.data.work import Work
from patchedserve.serving.editing.costs import EditCosts, MaskShares, profiled_edits
from patchedserve.serving.editing.profile import EditProfile
from patchedserve.serving.editing.step_latency import EditStepLatency
from patchedserve.serving.models.loading import model_geometry
from patchedserve.serving.runs.step_file import load_step_file
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.routers import ROUTERS
from patchedserve.serving.scheduling.step_latency import TableLatency
from patchedserve.serving.simulator.simulator import SimulationResult, simulate

RESULTS = Path(__file__).with_name("results")
WORKERS, MAX_BATCH_SIZE, LOADS = 8, 8, (0.3, 0.8)
UP_TO = 0.6
"""Share of the cells above which the engine computes whole images."""
BYTES_PER_PIXEL_STEP = 302e6 / (256 * 256 * 30)
"""Size of the model's records (docs/editing.md)."""
PROFILED = "128, 192, 256 px, as profiled"
S, M, L = (Resolution(side, side) for side in (128, 192, 256))
KINDS: Mapping[str, tuple[tuple[Resolution, ...], float]] = {
    "256 px": ((L,), 0.0),
    "128, 192, 256 px": ((S, M, L), 0.0),
    "128, 192, 256 px, records read": ((S, M, L), 1e-9),
}
"""Sizes, and an assumed number of seconds per byte of a record that is not in a worker's 2 GB; 0: all are in memory."""


def step_latency() -> EditStepLatency:
    """Return the committed step latencies of emoji-xl in float32 on two cores."""
    rows = json.loads((RESULTS / "steps-emoji-xl-float32.json").read_text())["rows"]
    whole = {
        tuple(size for size in (S, M, L) for _ in range(row["combination"][str(size)])): row["patched_ms"] / 1e3
        for row in rows
    }
    parts: dict[tuple[Work, ...], float] = {}
    for side in (256, 512):
        measured = json.loads((RESULTS / f"edit-emoji-xl-{side}.json").read_text())
        for point in measured["points"]:
            if point["active_share"] <= UP_TO:
                parts[(Work(side, side, point["active_share"]),) * measured["batch"]] = point["masked_s"]
    return EditStepLatency.fitted(TableLatency(whole), parts)


def trace(sizes: tuple[Resolution, ...], rate: float, count: int, seed: int) -> list[Request]:
    """Return edits of 20 pictures with Zipf popularity."""
    edits = EditDraws(1.0, read_mask_ratios("public"))
    config = TraceConfig(request_rate=rate, num_prompts=count, resolutions=sizes, seed=seed, edits=edits)
    return generate_trace(config, ["a red hat"])


def edits_of(byte_s: float) -> EditCosts:
    """Return the assumed costs of edits."""
    return EditCosts(
        MaskShares(model_geometry("emoji-xl"), UP_TO),
        lambda record: BYTES_PER_PIXEL_STEP * record.resolution.pixels * record.num_inference_steps,
        lambda num_bytes: byte_s * num_bytes,
    )


def served(
    requests: Sequence[Request], latency: EditStepLatency, edits: EditCosts
) -> Callable[[str], SimulationResult]:
    """Return a function that simulates a trace under a router."""
    policy = get_policy("continuous")
    return lambda router: simulate(
        requests, policy, latency, max_batch_size=MAX_BATCH_SIZE, num_gpus=WORKERS, router=router, edits=edits
    )


def compare(
    kind: str,
    load: float,
    sizes: tuple[Resolution, ...],
    latency: EditStepLatency,
    edits: EditCosts,
    count: int,
    seeds: int,
) -> dict[str, Any]:
    """Return means over seeds for each router: P95, mean latency, and mask-aware's P95 relative to the router's."""
    at_once = [replace(request, arrival_s=0.0) for request in trace(sizes, 1.0, count, seeds)]
    capacity = count / served(at_once, latency, edits)("least-requests").duration_s
    p95_s: dict[str, list[float]] = {name: [] for name in ROUTERS}
    mean_s: dict[str, list[float]] = {name: [] for name in ROUTERS}
    for seed in range(seeds):
        run = served(trace(sizes, capacity * load, count, seed), latency, edits)
        for name in ROUTERS:
            latencies_s = [record.latency_s for record in run(name).records if record.latency_s is not None]
            p95_s[name].append(float(np.percentile(latencies_s, 95)))
            mean_s[name].append(float(np.mean(latencies_s)))
    own = np.array(p95_s["mask-aware"])
    routers = {
        name: {
            "p95_s": round(float(np.mean(p95_s[name])), 4),
            "mean_s": round(float(np.mean(mean_s[name])), 4),
            "mask_aware_p95_ratio": round(float(own.mean() / np.mean(p95_s[name])), 4),
            "mask_aware_p95_ratio_by_seed": (own / p95_s[name]).round(4).tolist(),
        }
        for name in ROUTERS
    }
    return {"kind": kind, "load": load, "capacity_per_s": round(capacity, 3), "routers": routers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of each trace")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output-file", type=Path, default=RESULTS / "edit-routing.json")
    parser.add_argument("--edit-profile", type=Path, help="of psctl profile edits")
    parser.add_argument("--latency", type=Path, help="with --edit-profile: a table or a predictor of the same machine")
    given = parser.parse_args()
    if (given.edit_profile is None) != (given.latency is None):
        parser.error("--edit-profile and --latency go together")
    if given.edit_profile is None:
        latency = step_latency()
        kinds = {kind: (sizes, edits_of(byte_s)) for kind, (sizes, byte_s) in KINDS.items()}
    else:
        profile, table = EditProfile.read(given.edit_profile), load_step_file(given.latency)
        table.with_edits(profile)  # raises an error if they do not match
        latency = profile.steady_latency(table.steady)
        kinds = {PROFILED: ((S, M, L), profiled_edits(profile, model_geometry("emoji-xl")))}
    found = []
    for kind, (sizes, edits) in kinds.items():
        for load in LOADS:
            found.append(compare(kind, load, sizes, latency, edits, given.requests, given.seeds))
            p95 = ", ".join(f"{name} {each['p95_s']:.3f}" for name, each in found[-1]["routers"].items())
            print(f"{kind}, load {load}: P95 in s: {p95}", flush=True)
    content = {
        "workers": WORKERS,
        "max_batch_size": MAX_BATCH_SIZE,
        "requests": given.requests,
        "seeds": given.seeds,
        "seconds_of_terms": latency.coefficients,
        "runs": found,
    }
    write_json(given.output_file, content)


if __name__ == "__main__":
    main()
