"""Synthetic tables of step latencies that follow a known formula, for tests."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.run_facts import RunFacts
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, write_latencies
from patchedserve.data.templates import Keep
from patchedserve.profiling.steps.combinations import stratified_combinations
from patchedserve.serving.editing.profile import EditProfile, Fit

SIZES = parse_list("128,192,256")
CIRCUMSTANCES = RunFacts(
    model="emoji-xl",
    fingerprint="abc",
    device="cpu",
    device_name="a processor",
    dtype="float32",
    engine="patched",
    order="image",
    patch_size=None,
    strategy="auto",
    kernels="auto",
    threads=1,
    cpu="a processor",
    torch="2.13.0",
    guidance_scale=5.0,
    is_guided=True,
)


def law_ms(counts: Mapping[Resolution, int]) -> float:
    """Latency of a step as on a small machine: bound by the host for few images, by pixels and attention for more.

    Each resolution has a small cost, and a batch of a single resolution is cheaper, because it needs no patches.
    """
    megapixels = {resolution: resolution.pixels / 1e6 for resolution in counts}
    images = sum(count * (130 * megapixels[size] + 900 * megapixels[size] ** 2) for size, count in counts.items())
    return (4 + 2 * len(counts) + math.hypot(16, images)) * (0.95 if len(counts) == 1 else 1.0)


def law_rows(
    count: int = 300,
    *,
    noise: float = 0.02,
    seed: int = 0,
    sizes: tuple[Resolution, ...] = SIZES,
    max_batch_size: int = 16,
) -> list[LatencyRow]:
    """Return rows whose medians deviate from the law by `noise` (relative standard deviation)."""
    generator = random.Random(seed)
    rows = []
    for combination in stratified_combinations(sizes, count, max_batch_size, seed):
        counts = {size: number for size, number in zip(sizes, combination.counts, strict=True) if number}
        ms = law_ms(counts) * (1 + noise * generator.gauss(0, 1))
        rows.append(LatencyRow(counts, (ms * 0.99, ms, ms * 1.05), (ms * 1.6,)))
    return rows


def write_profiles(folder: Path, *, load_s: float = 1.0, keep: Keep = "all", engine: str = "patched") -> None:
    """Write to a workspace's tables: step latencies of two small sizes, from 50 ms on, and a profile of edits with 20
    ms a step, 5 ms an edit, and `load_s` for a record."""
    sizes, facts = parse_list("32,64x32"), replace(CIRCUMSTANCES, engine=engine)
    counts = [{size: number} for size in sizes for number in (1, 4)] + [dict.fromkeys(sizes, 2)]
    rows = [LatencyRow(each, (50.0 + 10 * sum(each.values()),), ()) for each in counts]
    write_latencies(folder / "latency-0.parquet", LatencyTable(tuple(rows), facts, {}))
    step, load = (Fit(line, 1, 0.0, None) for line in ((0.02, 0.005, 0.0, 0.0, 0.0), (load_s, 0.0)))
    EditProfile(facts, keep, 0.6, step, step, load, 150.0, {}, (), ()).write(folder / "edits-0.json")
