"""The memory of sampling stays flat."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from patchedserve.data.datasets.sampling import sample_pairs

from ...support.sampled_sets import captions_file

PEAKS = """
import re, sys
from pathlib import Path
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import _in_hash_order
dataset = open_dataset(sys.argv[1])
# Not ru_maxrss, which a child takes over from the process that started it.
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
start = peak()
if sys.argv[2] == "read first":
    for _ in dataset.entries(): pass
read = peak()
groups = [group for _, group in zip(range(100), _in_hash_order(dataset, 0, 101))]
print(len(groups), read - start, peak() - read)
"""


def peaks_in_kib(spec: str, what: str) -> list[int]:
    """Return the number of entries drawn, and the increases of a process's peak memory by reading and by sampling.

    The peak is the operating system's, because these sets take a minute with tracemalloc.
    """
    run = subprocess.run([sys.executable, "-c", PEAKS, spec, what], capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_of_sampling_does_not_grow_with_the_set(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": {i}, "caption": "caption number {i}"}}\n' for i in range(200_000))
    num_drawn, _, sampling = peaks_in_kib(f"captions:{path}", "sample only")
    assert num_drawn == 100
    # A list of 200,000 entries takes 80 MB.
    assert sampling < 8192


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sampling_coco_needs_no_more_memory_than_its_json(tmp_path: Path):
    count = 100_000
    images = ",".join(f'{{"id":{i},"file_name":"{i:012d}.jpg"}}' for i in range(count))
    captions = ",".join(f'{{"image_id":{i},"caption":"c {i}"}}' for i in range(count))
    (tmp_path / "val2017").mkdir()
    (tmp_path / "captions_val2017.json").write_text(f'{{"images":[{images}],"annotations":[{captions}]}}')
    num_drawn, reading, sampling = peaks_in_kib(f"coco:{tmp_path}", "read first")
    assert num_drawn == 100
    assert reading > 20_000
    assert sampling < 0.15 * reading


def test_sampling_small_sets_needs_little_memory(tmp_path: Path):
    dataset = captions_file(tmp_path / "c.jsonl", 4000)
    tracemalloc.start()
    try:
        sample = sample_pairs(dataset, 20, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(sample) == 20
    # A list of all 4,000 would take 1.6 MB.
    assert peak < 300_000
