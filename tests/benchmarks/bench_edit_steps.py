"""Steps of edits that read a template's record, beside the same edits computed whole, by turns.

    python tests/benchmarks/bench_edit_steps.py [--model emoji-xl] [--side 256] [--batch 8] [--device auto]
        [--dtype auto] [--shares 0.1,0.3] [--memory-mb 16000] [--output-file edit.json]

The masks are boxes that cover more and more of the image. Nothing else may run.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.machine import cpu_name
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.core.timing import synchronize
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import TemplateTiers
from patchedserve.tests.support.kernel_time import kernel_s

_STEPS, _WARM_UP, _REPEATS = 4, 1, 5


@dataclass(frozen=True, slots=True)
class Point:
    """Medians of one mask: a step with and without the record, and of their ratios by turns; and for how much of a step
    kernels ran, on a GPU.
    """

    active_share: float
    masked_s: float
    whole_s: float
    ratio: float
    masked_kernels_s: float | None
    whole_kernels_s: float | None


def edits_of(model: ServedModel, side: int, batch: int, cells: int) -> list[Request]:
    """Edits of one picture, whose mask is a square of so many cells on a side."""
    geometry, size = model.family.geometry, Resolution(side, side)
    mask = np.zeros((side, side), bool)
    mask[: cells * geometry.cell * geometry.latent_factor, : cells * geometry.cell * geometry.latent_factor] = True
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    edit, scale = EditSpec(image, mask, template=TemplateSpec()), model.defaults.guidance_scale
    return [Request(number, "a red hat", size, _STEPS, scale, seed=number, edit=edit) for number in range(batch)]


def measured(model: ServedModel, requests: list[Request]) -> Point:
    """Steps with and without the record, by turns."""
    masked_s, whole_s = [], []
    kernels_s: list[float | None] = []

    def step(active: list[PreparedRequest]) -> float:
        start_s = time.perf_counter()
        failures = model.stepper.step(active)
        synchronize(model.device)
        assert not failures, failures
        return time.perf_counter() - start_s

    for _ in range(_REPEATS):
        masked = [model.prepare(request) for request in requests]
        whole = [replace(model.prepare(request), template=None) for request in requests]
        assert all(each.template is not None for each in masked)
        for number in range(_STEPS - (not kernels_s)):
            pair = step(masked), step(whole)
            if number >= _WARM_UP:
                masked_s.append(pair[0])
                whole_s.append(pair[1])
        if not kernels_s:
            # Of the last step, which is left for this.
            kernels_s = [kernel_s(partial(step, each), model.device) for each in (masked, whole)]
    ratio = median(whole / masked for masked, whole in zip(masked_s, whole_s, strict=True))
    edit = requests[0].edit
    assert edit is not None
    return Point(model.family.geometry.active_share(edit), median(masked_s), median(whole_s), ratio, *kernels_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shares", default="0.05,0.1,0.2,0.3,0.5,0.7,1.0", help="about so much of the image is masked")
    parser.add_argument("--memory-mb", type=float, default=16_000.0, help="a larger record is read from its files")
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    model = load_model(given.model, given.device, given.dtype)
    model.reuse.masked_up_to = 1.0
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        model.reuse.store = TemplateStore(Path(folder) / "templates", TemplateTiers(memory_mb=given.memory_mb))
        model.tune([Resolution(given.side, given.side)], Path(folder))
        geometry = model.family.geometry
        most = given.side // (geometry.cell * geometry.latent_factor)
        shares = [float(each) for each in given.shares.split(",")]
        for cells in sorted({max(1, round(most * share**0.5)) for share in shares}):
            requests = edits_of(model, given.side, given.batch, cells)
            model.reuse.use_template(requests[0], Path(folder) / "templates", lambda count: None)
            points.append(measured(model, requests))
            print(points[-1], file=sys.stderr, flush=True)
    x, y = (np.array([getattr(point, name) for point in points]) for name in ("active_share", "masked_s"))
    about = {
        "machine": cpu_name() if model.device.type == "cpu" else torch.cuda.get_device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": given.model,
        "side": given.side,
        "batch": given.batch,
        "memory_mb": given.memory_mb,
    }
    result = {**about, "points": [asdict(point) for point in points], "r2_linear": float(np.corrcoef(x, y)[0, 1] ** 2)}
    print(json.dumps(result, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)


if __name__ == "__main__":
    main()
