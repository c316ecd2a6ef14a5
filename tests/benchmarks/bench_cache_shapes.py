"""Shapes (width of the model, resolution) at which reuse by patch is faster than reuse by whole request.

    python tests/benchmarks/bench_cache_shapes.py [--model emoji-xl] [--output-file results/cache-shapes-emoji-xl.json]

A request that skips the share A of its steps takes 1 - A of the time. Patches save more computation at the same
limit on the change (figure 15 of `psctl reproduce patchedserve`), but a block that runs for a share of its patches
takes more than that share of its time; the difference shrinks as operators grow. The script prints the saving at which
patches are as fast as whole requests that save A, and whether they reach it by that figure: this is where they become
faster.

The weights are random, which does not change the times. Sides take turns, step by step.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_cache_masks import Timing, measure

from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.loading import load_model

_RESULTS = Path(__file__).parent / "results"
_SHARES = (0.5, 0.7, 0.8, 0.9)
_BATCH = {128: 8, 256: 2, 512: 1}
"""Requests by side: nearly the same number of pixels."""


def widened(name: str, width: int) -> Any:
    """Return the pipeline of a bundled model with a denoising model `width` times as wide and random weights."""
    pipe = load_model(name).pipe
    old = denoiser_of(pipe)
    config = dict(old.config)
    if "block_out_channels" in config:
        config["block_out_channels"] = [width * channels for channels in config["block_out_channels"]]
        config["attention_head_dim"] = [width * heads for heads in config["attention_head_dim"]]
    else:
        config["num_attention_heads"] *= width
        config["caption_projection_dim"] *= width
    torch.manual_seed(0)
    new = type(old).from_config(config).to(old.device, old.dtype).eval().requires_grad_(False)
    part = next(part for part, module in pipe.components.items() if module is old)
    setattr(pipe, part, new)
    return pipe


def as_fast_at(rows: list[dict[str, Any]], saved: float) -> float | None:
    """Return the saving at which patches take as long as whole requests that save `saved`; None if outside the range
    that was measured.
    """
    full_ms = rows[0]["step_ms"]
    points = [(share, row["step_ms"] / full_ms) for share, row in zip(_SHARES, rows[1:], strict=True)]
    for (low, low_time), (high, high_time) in pairwise(points):
        if low_time > 1 - saved >= high_time:
            return low + (high - low) * (low_time - (1 - saved)) / (low_time - high_time)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["emoji-xl", "emoji-3"], default="emoji-xl")
    parser.add_argument("--widths", default="1,2,4", help="times as wide, between commas")
    parser.add_argument("--sides", default="128,256,512", help="of square images, between commas")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    figure = json.loads((_RESULTS / "reproduce" / given.model / "figure-15.json").read_text())["ours"]
    by_size = figure["by_resolution"].values()
    # Savings at the largest size, where the advantage of patches over whole images is largest.
    whole, patches = ([found[side]["saved_computation"] for found in by_size][-1] for side in ("image", "patch"))
    print(
        f"{given.model}: whole requests save {whole:.0%}, patches {patches:.0%} at the same limit (figure 15, 256 px)"
    )
    print("| width | side, px | step, ms | half of the patches | a tenth | as fast where patches save | faster |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    results = []
    for width in map(int, given.widths.split(",")):
        model = build_model(widened(given.model, width), name=f"{given.model} x {width}")
        for side in map(int, given.sides.split(",")):
            batch = Combination((Resolution(side, side),), (_BATCH.get(side, 1),))
            found = measure(model, Timing(batch, _SHARES, warmup=2, repeats=given.repeats))
            rows, full_ms = found["rows"], found["rows"][0]["step_ms"]
            needed = as_fast_at(rows, whole)
            told = "not in 50 to 90%" if needed is None else f"{needed:.0%}"
            is_faster = needed is not None and needed <= patches
            half, tenth = (f"{rows[index]['step_ms'] / full_ms:.2f}" for index in (1, 4))
            cells = width, side, f"{full_ms:.0f}", half, tenth, told, "yes" if is_faster else "no"
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            facts = {"width": width, "side": side, "whole_saves": whole, "patches_save": patches}
            results.append(facts | {"as_fast_at": needed, "is_faster": is_faster} | found)
    if given.output_file is not None:
        write_json(given.output_file, {"model": given.model, "shapes": results})


if __name__ == "__main__":
    main()
