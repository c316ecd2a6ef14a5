"""CPU time of a step of a mixed batch whose requests have adapters (LoRA), compared with a batch without.

    python tests/benchmarks/bench_adapters.py [--model emoji-xl] [--rank 16] [--repeats 9]

Six guided requests of three sizes, on one thread in float32; adapters of random weights change the attention layers.
Prints a Markdown table of medians in milliseconds of CPU time, on which other processes have little effect.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from patchedserve.data.adapters import Adapters
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.tests.support.loras import save_lora

SIZES = [Resolution(side, side) for side in (128, 192, 256) for _ in range(2)]
CASES: dict[str, Callable[[int], Adapters]] = {
    "none": lambda _: (),
    "one, half of them": lambda index: (("a", 1.0),) * (index % 2),
    "one, all of them": lambda _: (("a", 1.0),),
    "one of two each": lambda index: (("ab"[index % 2], 1.0),),
    "two each": lambda _: (("a", 1.0), ("b", 1.0)),
}


def measure(spec: str, rank: int, repeats: int) -> dict[str, float]:
    """Return the median CPU time of a step in milliseconds by case."""
    pipe = load_model(spec, "cpu", "float32").pipe
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"{name}={save_lora(Path(folder, f'{name}.safetensors'), pipe, part, seed=seed, rank=rank)}"
            for seed, name in enumerate("ab")
        ]
        model = load_model(spec, "cpu", "float32", EngineOptions(model=ModelOptions(adapter=given)))
    steps = repeats * 2 + 1
    batches = {
        name: [model.prepare(Request(i, "a red hat", SIZES[i], steps, 4.0, adapters=of(i))) for i in range(len(SIZES))]
        for name, of in CASES.items()
    }
    return cpu_ms(model, batches, repeats)


def cpu_ms(model: ServedModel, batches: Mapping[str, Sequence[PreparedRequest]], repeats: int) -> dict[str, float]:
    """Return the median CPU time of a step of each batch in milliseconds; batches take turns."""
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(repeats):
        for name, batch in batches.items():
            model.stepper.step(batch)  # assembles the batch
            start = time.process_time()
            model.stepper.step(batch)
            times[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.model, arguments.rank, arguments.repeats)
    print("| adapters of the requests | CPU ms | |\n|---|--:|--:|")
    for name, own_ms in found.items():
        print(f"| {name} | {own_ms:.1f} | {own_ms / found['none']:.2f} |")


if __name__ == "__main__":
    main()
