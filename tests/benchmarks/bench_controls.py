"""CPU time of a step of a mixed batch whose requests name ControlNets, compared with a batch without.

    python tests/benchmarks/bench_controls.py [--model emoji-xl] [--repeats 9]

Six guided requests of three sizes, on one thread in float32; the nets are new ones of the model's own U-Net, which cost
what trained ones do. Prints a Markdown table of medians in milliseconds of CPU time, on which other processes have
little effect.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel

from patchedserve.data.controls import Control
from patchedserve.data.requests import Request
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.tests.benchmarks.bench_adapters import SIZES, cpu_ms

CASES: dict[str, Callable[[int], str]] = {
    "none": lambda _: "",
    "one of six": lambda index: "a" * (index == 2),
    "one, half of them": lambda index: "a" * (index % 2),
    "one, all of them": lambda _: "a",
    "two each": lambda _: "ab",
}


def measure(spec: str, repeats: int) -> dict[str, float]:
    """Return the median CPU time of a step in milliseconds by case."""
    pipe: Any = load_model(spec, "cpu", "float32").pipe
    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            ControlNetModel.from_unet(pipe.unet).save_pretrained(Path(folder, name))
        nets = [f"{name}={Path(folder, name)}" for name in "ab"]
        model = load_model(spec, "cpu", "float32", EngineOptions(model=ModelOptions(controlnet=nets)))

    def request(index: int, names: str) -> Request:
        size = SIZES[index]
        image = np.zeros((size.height, size.width, 3), dtype=np.uint8)
        controls = tuple(Control(name, image) for name in names)
        return Request(index, "a red hat", size, repeats * 2 + 1, 4.0, controls=controls)

    batches = {
        case: [model.prepare(request(index, of(index))) for index in range(len(SIZES))] for case, of in CASES.items()
    }
    return cpu_ms(model, batches, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.model, arguments.repeats)
    print("| ControlNets of the requests | CPU ms | |\n|---|--:|--:|")
    for name, own_ms in found.items():
        print(f"| {name} | {own_ms:.1f} | {own_ms / found['none']:.2f} |")


if __name__ == "__main__":
    main()
