"""Step time of the patch engine when a given share of the patches is reused, compared with the ideal line.

    python tests/benchmarks/make_random_model.py sdxl /tmp/sdxl
    python tests/benchmarks/bench_cache_masks.py --model /tmp/sdxl --device cuda --dtype float16 \
        --resolutions 512,768,1024 --cache-patch-size 32 --output-file masks-sdxl.json

Each block reuses a different random share of its patches in every step, so the weights do not matter. All sides take
turns, step by step. The ideal is the time of a step without reuse times the computed share.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import parse_list
from patchedserve.data.workspace import Workspace
from patchedserve.eval.cache.sides import CacheSetting, make_side
from patchedserve.profiling.steps.combinations import Combination, parse_combinations
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.timing import synchronize
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.runs.machine import run_facts
from patchedserve.tests.support.imposed_reuse import FixedShare


@dataclass(frozen=True, slots=True)
class Timing:
    """Parameters of the timing: requests of a batch, reused shares, and repetitions."""

    batch: Combination
    shares: Sequence[float]
    cache_patch_size: int = 8
    guidance_scale: float = 4.0
    warmup: int = 5
    repeats: int = 20


def measure(model: ServedModel, timing: Timing) -> dict[str, Any]:
    """Return the result in the form of the output file: step times by share, with the circumstances."""
    sizes = timing.batch.resolutions
    # The rule alone decides about reuse, and masks apply at any number of computed patches.
    options = CacheOptions(
        "patch", 0.0, None, timing.cache_patch_size, max_reuse=1_000_000, warmup_steps=1, full_above=1.0
    )
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(folder).for_model("masks", model.device.type)
        settings = [CacheSetting("off", "off", CacheOptions())]
        settings += [CacheSetting(f"{share:.0%}", "masks", options, FixedShare(share)) for share in timing.shares]
        sides = [make_side(model, setting, workspace, sizes) for setting in settings]
    requests = [
        Request(number, "a hat", size, 1_000, guidance_scale=timing.guidance_scale, seed=number)
        for number, size in enumerate(
            size for size, count in zip(sizes, timing.batch.counts, strict=True) for _ in range(count)
        )
    ]
    times: list[list[float]] = [[] for _ in sides]
    active = [[side.model.prepare(request) for request in requests] for side in sides]
    for number in range(timing.warmup + timing.repeats):
        for side, own, found in zip(sides, active, times, strict=True):
            synchronize(model.device)
            started = time.perf_counter()
            failures = side.step(own)
            synchronize(model.device)
            if failures:
                raise SystemExit(f"a step failed: {failures[0]}")
            if number >= timing.warmup:
                found.append((time.perf_counter() - started) * 1e3)
    rows = []
    for side, found in zip(sides, times, strict=True):
        row: dict[str, Any] = {"label": side.setting.label, "step_ms": statistics.median(found), "samples_ms": found}
        if side.cache is not None:
            saved = side.cache.stats.saved_share
            row |= {"saved_computation": saved, "ideal_ms": statistics.median(times[0]) * (1 - saved)}
            row["cache_overhead_ms"] = side.cache.stats.overhead_s * 1e3 / (timing.warmup + timing.repeats)
        rows.append(row)
    circumstances = run_facts(model).to_json()
    return circumstances | {"combination": timing.batch.by_resolution, "label": timing.batch.label, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl", help="bundled name or diffusers directory")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--resolutions", default="128,192,256", help="sizes between commas")
    parser.add_argument("--combination", help="requests of each resolution; default: 2 of each")
    parser.add_argument("--cache-patch-size", type=int, default=8, help="side of a patch in latent pixels")
    parser.add_argument("--shares", default="0,0.2,0.4,0.6,0.8", help="reused shares between commas")
    parser.add_argument("--guidance-scale", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--output-file", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    sizes = parse_list(arguments.resolutions)
    batch = Combination(sizes, (2,) * len(sizes))
    if arguments.combination is not None:
        batch = parse_combinations(arguments.combination, sizes)[0]
    shares = [float(share) for share in arguments.shares.split(",")]
    timing = Timing(
        batch, shares, arguments.cache_patch_size, arguments.guidance_scale, arguments.warmup, arguments.repeats
    )
    options = EngineOptions(cuda_graphs=False)
    result = measure(load_model(arguments.model, arguments.device, arguments.dtype, options), timing)
    if arguments.output_file is not None:
        write_json(arguments.output_file, result)
    print("| reused | step, ms | ideal, ms | deciding and keeping, ms |")
    print("|---|--:|--:|--:|")
    for row in result["rows"]:
        ideal, overhead = row.get("ideal_ms"), row.get("cache_overhead_ms")
        figures = [f"{value:.1f}" if value is not None else "-" for value in (row["step_ms"], ideal, overhead)]
        print(f"| {row['label']} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
