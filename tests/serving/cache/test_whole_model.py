"""All blocks cached as one: a request computes a step in full or skips it with a forecast output."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.tables.block_facts import WHOLE_MODEL
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.cache.patch_batch import CachedRequest
from patchedserve.serving.cache.rules import Booleans, PatchView, ReuseRule
from patchedserve.serving.patched.patched_model import PatchedModel

from ...support.cached_models import OPTIONS, SIZES, STEPS, begin, step
from ...support.patched_models import draw_rows, relative_error
from ...support.random_models import MODELS, TRANSFORMERS

WHOLE = replace(OPTIONS, full_above=None, max_reuse=STEPS)


class Skips(ReuseRule):
    """Rule that lets requests skip a step by their place in the batch, and records the changes it receives."""

    needs_change = True
    is_whole = True

    def __init__(self) -> None:
        self.places: set[int] = set()
        self.changes: list[float] = []

    def may_reuse(self, view: PatchView) -> Booleans:
        assert view.change is not None
        assert view.block == view.num_blocks, "all blocks are asked about as one"
        starts = np.searchsorted(view.request, range(view.request[-1] + 1))
        self.changes = view.change[torch.from_numpy(starts)].tolist()
        return np.isin(view.request, list(self.places))


def whole_model(name: str, order: Any = "image", options: CacheOptions = WHOLE) -> tuple[Any, PatchedModel, Skips]:
    model = MODELS[name]()
    patched = PatchedModel(model, order=order, patch_size=8 if order == "patch" else None, strategy="regroup")
    rule = Skips()
    patched.use_cache(options, rule)
    return model, patched, rule


@pytest.mark.product(most=2)
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", ["sdxl", *TRANSFORMERS])
def test_computed_requests_equal_those_alone_and_others_their_forecast(name: str, order: Any) -> None:
    model, patched, rule = whole_model(name, order)
    plain = PatchedModel(model, order=order, patch_size=8 if order == "patch" else None, strategy="regroup")
    # Requests join and leave in between. Keys identify them, and two of SIZES are equal.
    said: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for keys, steps in (([0, 1, 2, 3, 4], range(1, 8)), ([0, 5, 2, 3, 6], range(8, 14))):
        for done in steps:
            drawn = draw_rows(model, SIZES, seed=done)
            rows = [replace(row, latents=own.latents) for row, own in zip(draw_rows(model, SIZES), drawn, strict=True)]
            if done == steps[0]:
                begin(patched, rows, keys)
                begin(plain, rows, keys)
            rule.places = set() if done < 3 else {place for place in range(5) if (done + keys[place]) % 3}
            expected, found = (step(each, rows, [done] * 5) for each in (plain, patched))
            assert patched.reused is not None
            assert set(np.flatnonzero(patched.reused)) == {place for place in rule.places if said.get(keys[place])}
            assert plain.reused is None
            for place, key in enumerate(keys):
                outputs = said.setdefault(key, [])
                if place not in rule.places or not outputs:
                    assert relative_error([found[place]], [expected[place]]) < 1e-5
                    outputs.append((done, expected[place]))
                    continue
                last, output = outputs[-1]
                before, previous = outputs[-2] if len(outputs) > 1 else (last - 1, output)
                skipped, gap = done - last, last - before
                forecast = output + (output - previous) * skipped / (skipped + gap)
                assert relative_error([found[place]], [forecast]) < 1e-5
    cache = patched.cache
    assert cache is not None
    assert cache.names == [WHOLE_MODEL]
    assert cache.stats.rows > 5
    assert cache.stats.masked == 0


@pytest.mark.parametrize("name", ["sdxl", *TRANSFORMERS])
def test_guided_requests_and_steps_that_all_skip(name: str) -> None:
    model, patched, rule = whole_model(name)
    rows = draw_rows(model, [(16, 16), (24, 24)], num_each=2)
    requests = [CachedRequest(5, 2, STEPS, 128 * 128), CachedRequest(9, 2, STEPS, 192 * 192)]
    patched.begin(patched.pack([row.size for row in rows]), requests=requests)
    expected = step(patched, rows, [2, 2])
    for done, places, computed in ((3, {0, 1}, set()), (4, {1}, {0, 1}), (5, {0}, {2, 3}), (6, set(), {0, 1, 2, 3})):
        rule.places = places
        found = step(patched, rows, [done, done])
        # The inputs are the same, so computed rows and forecasts of unchanged outputs are the same, too.
        assert relative_error(found, expected) < 1e-5
        assert patched.cache is not None
        reuses = patched.cache.stores[0].reuses
        assert {row for row in range(4) if not reuses[patched.cache.tables.row_start[row]]} == computed
    assert rule.changes == pytest.approx([0.0, 0.0], abs=1e-9)


def test_whole_model_cache_needs_little_memory() -> None:
    """The cache keeps two outputs and the samples of one input, not the output of every block."""
    model, patched, _ = whole_model("sdxl")
    rows = draw_rows(model, SIZES)
    begin(patched, rows)
    for done in (3, 4):
        step(patched, rows, [done] * len(rows))
    cache = patched.cache
    assert cache is not None
    latents = sum(row.latents.numel() for row in rows) * 4
    assert (
        2 * latents < cache.num_bytes < 2 * latents + cache.tables.num_cells * 16 * model.conv_in.out_channels * 4 + 1
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_memory_all_requests_are_computed() -> None:
    options = replace(WHOLE, memory_mb=1)
    model, patched, rule = whole_model("sdxl", options=options)
    rows = draw_rows(model, [(64, 64)] * 24)
    begin(patched, rows)
    rule.places = set(range(24))
    expected = step(patched, rows, [3] * 24)
    assert relative_error(step(patched, rows, [4] * 24), expected) < 1e-5
    assert patched.cache is not None
    assert patched.cache.stats.to_json()["uncached_blocks"] == [WHOLE_MODEL]
    assert patched.cache.stats.skipped == 0


def test_full_above_without_whole_steps_decides_block_by_block() -> None:
    model = MODELS["sdxl"]()
    cache = PatchedModel(model).use_cache(OPTIONS, Skips())
    assert not cache.is_whole
    assert len(cache.names) == cache.num_blocks > 1
