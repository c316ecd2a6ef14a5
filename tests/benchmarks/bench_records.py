"""Memory of an engine after many requests, with whose number it must not grow.

    python tests/benchmarks/bench_records.py [--cache] [--requests 50000] [--output-file results/records-off.json]

A random Stable Diffusion of the smallest size serves requests of six resolutions, one or two steps (up to four with the
cache), with and without guidance, at most 48 open at a time, so that batches, packings and masks change constantly;
some requests are discarded, some fail. Records are written to a file of JSON lines. The resident memory is noted as
requests end. Goal: the second half of 50,000 requests adds at most 20 MB. Linux only. Times do not matter: other
processes may run.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from patchedserve.data.files import write_json
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.engine.collectors import JsonLines
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.steady_load import NUM_OPEN, SIZES, SteadyLoad

RESULTS = Path(__file__).with_name("results")
WANTED_MB = 20
_NOTES = 20


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def measure(num_requests: int, *, with_cache: bool) -> dict[str, Any]:
    """Return the result in the form of the output file: resident memory in MB by number of ended requests."""
    noted_mb: dict[int, float] = {}
    ended: Counter[str] = Counter()

    def on_finish(record: RequestRecord) -> None:
        ended[record.status] += 1
        count = ended.total()
        if count * _NOTES % num_requests == 0:
            noted_mb[count] = round(resident_mb(), 1)
            print(f"{count} requests: {noted_mb[count]} MB", flush=True)

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "records.jsonl")
        with SteadyLoad(JsonLines(file), with_cache=with_cache, on_finish=on_finish) as load:
            load.feed(num_requests)
        num_lines = file.read_bytes().count(b"\n")
    assert isinstance(load.model.stepper, PatchedStepper)
    cache = load.model.stepper.model.cache
    return {
        "machine": cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cache": None if cache is None else cache.stats.to_json(),
        "requests": num_requests,
        "ended": dict(ended),
        "lines_of_records": num_lines,
        "resolutions": [str(size) for size in SIZES],
        "most_open": NUM_OPEN,
        "seconds": time.perf_counter() - started,
        "resident_mb": noted_mb,
        "second_half_mb": round(noted_mb[num_requests] - noted_mb[num_requests // 2], 1),
        "wanted_mb": WANTED_MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000, help=f"a multiple of {_NOTES}")
    parser.add_argument("--cache", action="store_true", help="with a patch cache")
    parser.add_argument("--output-file", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.requests, with_cache=arguments.cache)
    print(f"second half: {found['second_half_mb']:+} MB, wanted: at most {WANTED_MB} MB")
    write_json(arguments.output_file or RESULTS / f"records-{'cache' if arguments.cache else 'off'}.json", found)


if __name__ == "__main__":
    main()
