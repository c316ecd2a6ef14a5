"""Time of one rank for its own strip of an image without communication, compared with the whole image on one device
(DistriFusion's "No Comm.", table 2); and the images of two virtual ranks, compared with those of one.

    python tests/benchmarks/make_random_model.py sdxl /tmp/sdxl
    python tests/benchmarks/strip_times.py --model /tmp/sdxl --device cuda --dtype float16 --output-file strips.json

One device is enough: ranks of a real group compute the same. Steps are guided (two rows), and guidance is not split.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.profiling.parallel.bench import difference, lone_rank_stepper
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.lanes import BenchSettings, Lane, time_lanes
from patchedserve.profiling.steps.sides import RequestPool, StepperSide, plain_side
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.plain.formats import PlainModels
from patchedserve.serving.runs.machine import run_facts
from patchedserve.tests.support.kernel_time import kernel_s


def on_ranks(model: ServedModel, count: int) -> ServedModel:
    """Return the model on virtual ranks."""
    return with_engine(model, EngineOptions("parallel", parallel=options_of(count)))


def options_of(count: int) -> ParallelOptions:
    """Return options of `count` virtual ranks, none of which is used for guidance."""
    return ParallelOptions(f"virtual:{count}", mode="sync", cfg_split="off")


def strip_rows(model: ServedModel, size: Resolution, counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return the rows of one resolution: the whole image by plain diffusers, then one strip for each number of ranks.

    Args:
        model: model on the plain engine.
        size: size of the image.
        counts: numbers of ranks.
        repeats: timings of each row.
    """
    combination, lanes = Combination((size,), (1,)), {}
    requests = RequestPool(model).take(combination)
    for form in PlainModels(model.denoiser).formats:
        side = plain_side(model, PlainModels(model.denoiser, always=form), requests)
        lanes[f"1, {form}"] = Lane(side, model.device)
    with closing(on_ranks(model, counts[0])) as served:
        own = RequestPool(served).take(combination)  # the same for any number of ranks
    for count in counts:
        lanes[str(count)] = Lane(StepperSide(lone_rank_stepper(model, options_of(count)), own), model.device)
    time_lanes(lanes.values(), BenchSettings(repeats, 1))
    kernels = {}
    for name, lane in lanes.items():
        lane.make_room()
        kernels[name] = kernel_s(lane.side.step, model.device)
    one = min((name for name in lanes if name.startswith("1,")), key=lambda name: lanes[name].median_ms)
    rows = []
    for name in (one, *map(str, counts)):
        lane, of_kernels = lanes[name], kernels[name]
        row = {"resolution": str(size), "ranks": int(name.partition(",")[0]), "ms": lane.median_ms}
        row |= {"speedup": lanes[one].median_ms / lane.median_ms, "samples_ms": lane.samples_ms}
        if of_kernels is not None:
            row |= {"kernels_ms": of_kernels * 1e3, "kernels_speedup": kernels[one] / of_kernels}
        rows.append(row)
        print({name: value for name, value in row.items() if name != "samples_ms"}, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--resolutions", default="1024,2048,3840")
    parser.add_argument("--num-ranks", default="2,3,4,5,6,7,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    model = load_model(given.model, given.device, given.dtype, EngineOptions("plain"))
    sizes, counts = parse_list(given.resolutions), [int(each) for each in given.num_ranks.split(",")]
    with closing(on_ranks(model, 2)) as served:
        requests = RequestPool(served).take(Combination((sizes[0],), (1,)))
        apart = difference(model.stepper, served.stepper, requests)
    result = run_facts(model).to_json() | {"virtual_2_difference": apart, "rows": []}
    print(f"two virtual ranks: {result['virtual_2_difference']:.2e}", file=sys.stderr)
    for size in sizes:
        result["rows"] += strip_rows(model, size, counts, given.repeats)
        if given.output_file is not None:
            write_json(given.output_file, result)


if __name__ == "__main__":
    main()
