"""Speed and memory with which `psctl eval fid` computes features of a folder, compared with the network alone.

    python tests/benchmarks/bench_fid.py [--images 5000] [--output-file results/fid-features.json]

Images of three alternating sizes are written to a temporary folder. The network alone runs on batches in memory, then
the whole path runs on the folder (checksum, decoding, grouping by size, network, writing features), then the network
alone again: its two figures show any drift. Finally the same folder is read from the cache. Memory is that of the
process at a quarter, half and the end of the path. Nothing else may run on the machine.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchedserve.data.datasets.folders import open_folder
from patchedserve.data.datasets.loading import iter_images
from patchedserve.data.files import sha256_of, write_json
from patchedserve.eval.metrics.features import BATCH_SIZE, features_of
from patchedserve.eval.metrics.inception import find_inception_weights, load_inception
from patchedserve.serving.runs.machine import cpu_name

SIDES_PX = (128, 192, 256)
BARE_IMAGES = 128
"""Images in each of the two measurements of the network alone."""


def make_images(folder: Path, count: int) -> None:
    """Write smooth random pictures, which decode about as fast as generated ones."""
    rng = np.random.default_rng(0)
    for i in range(count):
        side = SIDES_PX[i % len(SIDES_PX)]
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{i:05}.png", compress_level=1)


def memory_mb(name: str) -> float:
    """Return `VmRSS` (now) or `VmHWM` (the peak) of this process in MB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def bare_rate(network: torch.nn.Module, num_images: int) -> float:
    """Return the network's images per second on batches in memory, each of one size."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SIDES_PX[i % len(SIDES_PX)] for i in range(-(-num_images // BATCH_SIZE))]
    counts = [min(BATCH_SIZE, num_images - i * BATCH_SIZE) for i in range(len(sizes))]
    given = [
        torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
        for count, side in zip(counts, sizes, strict=True)
    ]
    started = time.perf_counter()
    for batch in given:
        network(batch).float().cpu()
    return num_images / (time.perf_counter() - started)


def measure(folder: Path, count: int, device: str) -> dict[str, Any]:
    weights = find_inception_weights()
    network, digest = load_inception(weights, device), sha256_of(weights)
    network(torch.zeros(2, 3, 128, 128, dtype=torch.uint8))
    source, cache = open_folder(folder), folder / "cache"
    num_bare = min(BARE_IMAGES, count)
    started = time.perf_counter()
    for _ in iter_images(source, crop="none"):
        pass
    decode_s = time.perf_counter() - started
    bare = [bare_rate(network, num_bare)]
    memory = {"start": memory_mb("VmRSS")}
    done = 0

    def on_images(number: int) -> None:
        nonlocal done
        done += number
        for name, share in (("quarter", 0.25), ("half", 0.5), ("end", 1.0)):
            if done >= share * count:
                memory.setdefault(name, memory_mb("VmRSS"))

    started = time.perf_counter()
    features = features_of(source, network, digest, cache, on_images=on_images)
    path_s = time.perf_counter() - started
    peak = memory_mb("VmHWM")
    bare.append(bare_rate(network, num_bare))
    started = time.perf_counter()
    assert torch.equal(features_of(source, network, digest, cache), features)
    kept_s = time.perf_counter() - started
    rate = count / path_s
    return {
        "images": count,
        "device": device,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "path_per_s": rate,
        "bare_per_s": bare,
        "path_to_bare": rate / (sum(bare) / len(bare)),
        "decode_only_per_s": count / decode_s,
        "from_cache_per_s": count / kept_s,
        "rss_mb": memory,
        "peak_rss_mb": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output-file", type=Path, help="write the figures as JSON here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), options.images)
        found = measure(Path(folder), options.images, options.device)
    if options.output_file is not None:
        write_json(options.output_file, found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
