"""Padded batches: a pass depends on its bucket only, so that one recorded pass serves different mixes of sizes."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.layout.bucket import Bucket, batches_by_bucket
from patchedserve.serving.layout.packing import Packing, pack_rows
from patchedserve.serving.layout.patch_layout import by_size, patch_size_of
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

from ...support.family_kit import BUILDS, denoised, served
from ...support.patched_models import relative_error
from ...support.plain import short_texts
from ...support.tape import Tape
from ...support.tiny_models import tiny_sdxl

SMALL, LARGE, WIDE = Resolution(32, 32), Resolution(64, 64), Resolution(96, 32)
CPU = torch.device("cpu")
PASS = 1e-5


def requests_of(sizes: Sequence[Resolution], *, seed: int, num_steps: int = 3) -> list[Request]:
    return [
        Request(n, f"a hat {n + seed}", size, num_steps, 2.0 + n, seed=10 * seed + n) for n, size in enumerate(sizes)
    ]


def padded(pipe: Any, patience: int) -> tuple[ServedModel, Tape]:
    """Return a model whose passes are recorded, and padded, on a tape."""
    model, tape = served(pipe, EngineOptions(order="patch"), **short_texts(pipe)), Tape()
    patched_stepper(model).model.use_graphs(tape, patience)
    return model, tape


def compositions(counts: Sequence[int], most: int) -> list[list[int]]:
    """Return the patches of the rows of all batches of up to `most` requests of sizes with these numbers of patches."""
    return [
        [patches for patches, number in zip(counts, numbers, strict=True) for _ in range(number)]
        for numbers in itertools.product(range(most + 1), repeat=len(counts))
        if 0 < sum(numbers) <= most
    ]


def test_less_than_a_quarter_of_a_bucket_is_padding() -> None:
    for count in range(1, 5000):
        assert count <= Bucket.of(count, 1).num_patches < 1.25 * count + 1e-9
    assert [Bucket.of(8, rows).num_rows for rows in (1, 2, 3, 4, 5, 16, 17, 32)] == [3, 3, 5, 5, 9, 17, 33, 33]


@pytest.mark.parametrize("sizes", [((64, 64), (96, 96), (128, 128)), ((16, 16), (24, 24), (32, 32))])
def test_padding_costs_a_tenth_in_the_mean_over_all_mixes_of_three_sizes(sizes: list[tuple[int, int]]) -> None:
    """Guided requests, as many as a batch holds."""
    side = patch_size_of(sizes)
    counts = [height * width // side**2 for height, width in sizes]
    shares = [
        Bucket.of(2 * sum(each), len(each)).num_patches / (2 * sum(each)) - 1 for each in compositions(counts, 16)
    ]
    assert statistics.mean(shares) <= 0.1
    assert max(shares) <= 0.25


@pytest.mark.parametrize("num_sizes", range(1, 7))
def test_many_mixes_have_few_buckets(num_sizes: int) -> None:
    """10,000 random mixes of 1 to 16 requests, some guided."""
    draw = random.Random(num_sizes)
    sides = [8 * draw.randint(4, 16) for _ in range(num_sizes)]
    sizes = [(side, 8 * draw.randint(4, 16)) for side in sides]
    side = patch_size_of(sizes)
    found = set()
    for _ in range(10_000):
        batch = [(*draw.choice(sizes), draw.choice((1, 2))) for _ in range(draw.randint(1, 16))]
        num_patches = sum(rows * height * width // side**2 for height, width, rows in batch)
        found.add(Bucket.of(num_patches, sum(rows for *_, rows in batch)))
    most = 2 * 16 * max(height * width for height, width in sizes) // side**2
    # Four numbers of patches for each doubling, and 2, 4, 8, 16 or 32 rows with the dummy's.
    assert len(found) <= 4 * math.ceil(math.log2(most)) * 5
    assert {bucket.num_rows for bucket in found} <= {3, 5, 9, 17, 33}


@pytest.mark.parametrize("rows_each", [1, 2])
def test_every_bucket_has_a_batch_to_be_recorded_with(rows_each: int) -> None:
    counts = (16, 36, 64)
    found = batches_by_bucket(counts, rows_each, 7)
    for bucket, numbers in found.items():
        patches = sum(number * count for number, count in zip(numbers, counts, strict=True))
        assert Bucket.of(rows_each * patches, rows_each * sum(numbers), max(counts)) == bucket
    assert set(found) == {
        Bucket.of(rows_each * sum(each), rows_each * len(each), max(counts)) for each in compositions(counts, 7)
    }
    assert next(iter(found)) == max(found, key=lambda bucket: (bucket.num_patches, bucket.num_rows))


def _pack(sizes: Sequence[tuple[int, int]], *, is_padded: bool) -> Packing:
    ordered = sorted(sizes, key=by_size)
    return pack_rows(
        ordered, order="patch", patch_size=8, num_levels=3, unit=1, device=CPU, kernels="torch", is_padded=is_padded
    )


def test_padding_patches_belong_to_the_last_dummy_and_have_no_neighbours() -> None:
    sizes = [(16, 16), (8, 8), (16, 24)]  # 4 + 1 + 6 patches of 3 rows
    plain, packing = (_pack(sizes, is_padded=is_padded) for is_padded in (False, True))
    assert packing.bucket == Bucket(12, 5, longest=8)
    assert (plain.num_patches, plain.num_rows) == (11, 3)
    for level, own in zip(packing.levels, plain.levels, strict=True):
        assert level.neighbours is not None
        assert own.neighbours is not None
        assert (level.num_patches, level.num_rows, level.num_padding) == (12, 5, level.grain**2)
        assert torch.equal(level.row_index, torch.cat([own.row_index, torch.tensor([4])]))
        assert torch.equal(level.neighbours, torch.cat([own.neighbours, torch.full((1, 8), -1)]))
        assert torch.equal(
            level.row_tokens[:, 0], torch.cat([own.row_tokens[:, 0], torch.tensor([0.0, level.grain**2])])
        )
    images = [torch.randn(2, *size) for size in sorted(sizes, key=by_size)]
    patches = torch.nn.functional.pad(packing.pack(images), (0,) * 6 + (0, 1))
    for row, image in enumerate(images):
        assert torch.equal(packing.unpack(patches, row), image)


@pytest.mark.product(most=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_padded_batches_equal_the_pipeline(name: str) -> None:
    """Eagerly, with requests that leave one by one, so that the batch passes through several buckets."""
    pipe = BUILDS[name]()
    requests = [
        Request(0, "a red apple", SMALL, 4, 3.5, seed=20),
        Request(1, "a car in the rain, at night", LARGE, 1, 1.0, seed=21),
        Request(2, "two birds", SMALL, 2, 7.0, seed=22, negative_prompt="blur"),
        Request(3, "", WIDE, 3, 2.0, seed=23),
    ]
    expected = denoised(served(pipe, EngineOptions("plain"), **short_texts(pipe)), requests)
    model, tape = padded(pipe, patience=1000)
    assert relative_error(denoised(model, requests), expected) <= 10 * PASS
    assert tape.recorded == 0


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_mixes_of_a_bucket_share_a_recorded_pass(name: str) -> None:
    """The second and the third batch have other sizes, texts and guidance than the one that was recorded."""
    pipe = BUILDS[name]()
    mixes = [[SMALL, LARGE, SMALL, WIDE], [LARGE, WIDE, WIDE], [WIDE, SMALL, LARGE, SMALL]]
    batches = [requests_of(sizes, seed=seed) for seed, sizes in enumerate(mixes)]
    eager = served(pipe, EngineOptions(order="patch"), **short_texts(pipe))
    model, tape = padded(pipe, patience=0)
    for batch in batches:
        assert relative_error(denoised(model, batch), denoised(eager, batch)) <= PASS
    assert tape.recorded == 1
    assert tape.played >= 2 * len(batches)
    assert patched_stepper(model).recording_failure is None


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", BUILDS)
def test_compiled_blocks_are_parts_of_a_recorded_pass(name: str) -> None:
    """They are compiled in the eager passes only, and cut in two where attention pauses a recording."""
    pipe = BUILDS[name]()
    batches = [requests_of(sizes, seed=seed) for seed, sizes in enumerate([[SMALL, LARGE, WIDE], [LARGE, SMALL, WIDE]])]
    eager = served(pipe, EngineOptions(order="patch"), **short_texts(pipe))
    model, tape = padded(pipe, patience=1)
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(tape.recorded)
        return graph.forward

    assert patched_stepper(model).model.compile(backend=count) > 0
    for batch in batches:
        assert relative_error(denoised(model, batch), denoised(eager, batch)) <= PASS
    assert patched_stepper(model).recording_failure is None
    assert (tape.recorded, set(graphs)) == (1, {0})
    assert tape.played >= 3


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_requests_that_a_cache_computes_are_replayed(name: str) -> None:
    """They join and leave, so that some steps compute all requests, some a few, and some none."""
    pipe = BUILDS[name]()
    patch_size, _ = served(pipe).family.geometry.latent_size(SMALL)
    cache = CacheOptions("accumulated", 1e9, warmup_steps=1, max_reuse=2, patch_size=patch_size)
    options = EngineOptions(order="patch", cache=cache)
    requests = [
        Request(n, f"a hat {n}", size, num_steps, 3.0, seed=n)
        for n, (size, num_steps) in enumerate([(SMALL, 9), (LARGE, 7), (WIDE, 8), (SMALL, 6)])
    ]
    eager, recorded = (served(pipe, options, **short_texts(pipe)) for _ in range(2))
    tape = Tape()
    patched_stepper(recorded).model.use_graphs(tape, patience=0)
    found, expected = (denoised(model, requests, joins=[0, 1, 1, 3]) for model in (recorded, eager))
    assert relative_error(found, expected) <= 10 * PASS
    used = patched_stepper(recorded).model.cache
    assert used is not None
    assert min(skipped for _, skipped in used.stats.by_block.values()) > 0
    assert tape.played >= 3
    captured = patched_stepper(recorded).model.captured
    assert captured is not None
    places: Any = captured._recorded
    for (shape, _), _ in places:
        assert isinstance(shape, Bucket), f"the computed requests have a recording for {shape} alone"
    exact = denoised(served(pipe, EngineOptions(order="patch"), **short_texts(pipe)), requests)
    assert relative_error(found, exact) > 100 * PASS, "nothing was reused"


@pytest.mark.product(most=1)
@pytest.mark.parametrize("cache", [CacheOptions(), CacheOptions("accumulated", 1e9, warmup_steps=1, patch_size=4)])
def test_passes_are_recorded_at_the_start(cache: CacheOptions, tmp_path: Path) -> None:
    """Requests of the tuned sizes then replay passes, from their first step on."""
    pipe, options = tiny_sdxl(), EngineOptions(order="patch", cache=cache)
    model, tape = served(pipe, options, **short_texts(pipe)), Tape()
    patched_stepper(model).model.use_graphs(tape)
    progress: list[tuple[str, int, int]] = []
    model.tune([SMALL, LARGE], tmp_path, 2, lambda *each: progress.append(each))
    assert progress == [("recording", number, len(progress)) for number in range(len(progress))] != []
    assert patched_stepper(model).recording_failure is None
    recorded, tape.played = tape.recorded, 0
    assert recorded > 3
    requests = requests_of([SMALL, LARGE, SMALL], seed=1, num_steps=3)
    expected = denoised(served(pipe, options, **short_texts(pipe)), requests, joins=[0, 1, 3])
    assert relative_error(denoised(model, requests, joins=[0, 1, 3]), expected) <= 10 * PASS
    assert tape.recorded == recorded
    assert tape.played == (6 if not cache.is_on else tape.played) > 0


def test_odd_mixes_have_patches_that_divide_them() -> None:
    """The served sizes give the side of a patch; a batch with another size is cut smaller."""
    model, _ = padded(tiny_sdxl(), patience=0)
    patched = patched_stepper(model).model
    patched.use_sizes([(16, 16), (32, 32)])
    assert patched.pack([(32, 32)]).layout.patch_size == 16
    assert patched.pack([(16, 24)]).layout.patch_size == 8
