"""Steps of edits that read a template's record, compared with the same edits computed whole, by turns.

    python tests/benchmarks/bench_edit_steps.py [--model emoji-xl] [--side 256] [--batch 8] [--device auto]
        [--dtype auto] [--shares 0.1,0.3] [--templates 1] [--cuda-graphs] [--memory-mb 16000] [--output-file edit.json]

The masks are boxes of increasing size. With `--templates 4` the edits alternate between four pictures; with
`--cuda-graphs` both sides replay recorded passes. Nothing else may run.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.core.cuda_graphs import CudaRecorder
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.core.timing import synchronize
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.build import check_graphs
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import TemplateTiers
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.kernel_time import kernel_s

_STEPS, _REPEATS = 4, 5
_DISK_MB = 100_000.0


@dataclass(frozen=True, slots=True)
class Point:
    """Medians for one mask: times of a step with and without the record, their ratios by turn, and on a GPU the time
    of a step in which kernels ran.
    """

    active_share: float
    masked_s: float
    whole_s: float
    ratio: float
    masked_kernels_s: float | None
    whole_kernels_s: float | None


@dataclass(frozen=True, slots=True)
class EditBench:
    """Parameters of a measurement.

    Attributes:
        side: side of the pictures in pixels.
        batch: number of edits in a batch.
        shares: approximate shares of a picture that masks cover.
        num_templates: number of pictures between which the edits alternate.
        repeats: batches of each mask.
    """

    side: int
    batch: int
    shares: Sequence[float]
    num_templates: int = 1
    repeats: int = _REPEATS


def edits_of(model: ServedModel, bench: EditBench, cells: int) -> list[Request]:
    """Return edits whose mask is a square of `cells` x `cells` cells."""
    side = bench.side
    geometry, size = model.family.geometry, Resolution(side, side)
    mask = np.zeros((side, side), bool)
    mask[: cells * geometry.cell * geometry.latent_factor, : cells * geometry.cell * geometry.latent_factor] = True
    generators = map(np.random.default_rng, range(bench.num_templates))
    images = [generator.integers(0, 256, (side, side, 3), np.uint8) for generator in generators]
    edits, scale = [EditSpec(image, mask, template=TemplateSpec()) for image in images], model.defaults.guidance_scale
    return [
        Request(number, "a red hat", size, _STEPS, scale, seed=number, edit=edits[number % len(edits)])
        for number in range(bench.batch)
    ]


def edit_points(model: ServedModel, bench: EditBench, folder: Path, memory_mb: float) -> Iterator[Point]:
    """Yield a point for each mask, from small to large.

    Args:
        model: model on the patch engine, with graphs if the passes are to be recorded.
        bench: parameters of the measurement.
        folder: folder for records and tuning results; existing ones are used.
        memory_mb: limit on the records in memory; a larger record is read from its files.
    """
    model.reuse.masked_up_to = 1.0
    model.reuse.store = TemplateStore(folder / "templates", TemplateTiers(memory_mb=memory_mb, disk_mb=_DISK_MB))
    model.tune([Resolution(bench.side, bench.side)], folder)
    geometry = model.family.geometry
    most = bench.side // (geometry.cell * geometry.latent_factor)
    for cells in sorted({max(1, round(most * share**0.5)) for share in bench.shares}):
        requests = edits_of(model, bench, cells)
        for request in requests[: bench.num_templates]:
            model.reuse.use_template(request, folder / "templates", lambda count: None)
        yield measured(model, requests, bench.repeats)


def measured(model: ServedModel, requests: list[Request], repeats: int) -> Point:
    """Measure steps with and without the record, by turns."""
    is_recorded = patched_stepper(model).model.captured is not None
    masked_s, whole_s = [], []
    kernels_s: list[float | None] = []

    def step(active: list[PreparedRequest]) -> float:
        start_s = time.perf_counter()
        failures = model.stepper.step(active)
        synchronize(model.device)
        assert not failures, failures
        return time.perf_counter() - start_s

    for _ in range(repeats):
        masked = [model.prepare(request) for request in requests]
        whole = [replace(model.prepare(request), template=None) for request in requests]
        assert all(each.template is not None for each in masked)
        # The first pass of a batch computes the tensors that it keeps; with graphs, the third of all is recorded.
        warm_up = 3 if is_recorded and not kernels_s else 1
        for number in range(_STEPS - (not kernels_s)):
            pair = step(masked), step(whole)
            if number >= warm_up:
                masked_s.append(pair[0])
                whole_s.append(pair[1])
        if not kernels_s:
            # Measured on the last step, which is reserved for it.
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
    parser.add_argument("--templates", type=int, default=1, help="pictures that the edits are of, by turns")
    parser.add_argument("--cuda-graphs", action="store_true", help="play back recorded passes, on a GPU")
    parser.add_argument("--memory-mb", type=float, default=16_000.0, help="a larger record is read from its files")
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    if not 1 <= given.templates <= given.batch:
        parser.error(f"--templates is {given.templates}, but it must be from 1 to the batch of {given.batch}")
    model = load_model(given.model, given.device, given.dtype)
    if given.cuda_graphs:
        check_graphs(model.device)
        patched_stepper(model).model.use_graphs(CudaRecorder(model.device), patience=1)
    points: list[Point] = []
    bench = EditBench(given.side, given.batch, [float(each) for each in given.shares.split(",")], given.templates)
    with tempfile.TemporaryDirectory() as folder:
        for point in edit_points(model, bench, Path(folder), given.memory_mb):
            points.append(point)
            print(point, file=sys.stderr, flush=True)
    x, y = (np.array([getattr(point, name) for point in points]) for name in ("active_share", "masked_s"))
    about = {
        "machine": cpu_name() if model.device.type == "cpu" else torch.cuda.get_device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": given.model,
        "side": given.side,
        "batch": given.batch,
        "templates": given.templates,
        "cuda_graphs": given.cuda_graphs,
        "recording_failure": patched_stepper(model).recording_failure,
        "memory_mb": given.memory_mb,
    }
    r2 = float(np.corrcoef(x, y)[0, 1] ** 2) if len(points) > 1 else None
    result = {**about, "points": [asdict(point) for point in points], "r2_linear": r2}
    print(json.dumps(result, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)


if __name__ == "__main__":
    main()
