"""The memory bound of the patch cache, and the blocks that run uncached under it."""

from dataclasses import replace

import pytest
import torch

from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.cache.slots import SlotBuffer

from ...support.cached_models import (
    OPTIONS,
    Switch,
    begin,
    cached_model,
    step,
)
from ...support.patched_models import draw_rows, relative_error


def test_memory_limit_runs_blocks_uncached() -> None:
    rule = Switch(0.5)
    options = CacheOptions("patch", threshold=0.0, patch_size=8, warmup_steps=1, max_reuse=3, memory_mb=1, full_above=1)
    model, patched, cache = cached_model("sdxl", "image", rule, options)
    rows = draw_rows(model, [(32, 32)] * 4)
    begin(patched, rows)
    expected = step(patched, rows, [3] * 4)
    rule.is_on = True
    for done in (4, 5):
        assert relative_error(step(patched, rows, [done] * 4), expected) < 1e-5
        assert cache.num_bytes <= 1e6
    assert cache.stats.uncached
    assert cache.stats.to_json()["uncached_blocks"] == sorted(cache.stats.uncached)
    assert set(cache.stats.uncached) <= set(cache.names)
    assert 0 < cache.stats.saved_share < 0.5


def test_operators_store_inputs_from_the_first_mask_on() -> None:
    """Until then, or without room for those inputs, only outputs are kept and requests are computed whole."""
    rule = Switch(0.5)
    for memory_mb in (2048, 2):
        options = replace(OPTIONS, memory_mb=memory_mb)
        model, patched, cache = cached_model("sdxl", "image", rule, options)
        cache.uses_masks[:] = [False] * len(cache.names)
        rows = draw_rows(model, [(32, 32)] * 4)
        begin(patched, rows)
        rule.is_on = False
        expected = step(patched, rows, [3] * 4)
        outputs_only = cache.num_bytes
        assert not any(kept.num_bytes for block in cache._input_buffers for kept in block)
        rule.is_on = True
        for done, is_masked in ((4, False), (5, memory_mb == 2048), (6, memory_mb == 2048)):
            before = cache.stats.masked
            assert relative_error(step(patched, rows, [done] * 4), expected) < 1e-5
            assert (cache.stats.masked - before == len(cache.names)) == is_masked
            assert cache.num_bytes <= memory_mb * 1e6
        assert cache.num_bytes > 2 * outputs_only or memory_mb == 2
        assert not cache.stats.uncached


def test_memory_limit_holds_when_requests_join_reusing_ones() -> None:
    rule = Switch(1.0)
    options = CacheOptions("patch", threshold=0.0, patch_size=8, warmup_steps=1, max_reuse=9, memory_mb=1)
    model, patched, cache = cached_model("sdxl", "image", rule, options)
    rows = draw_rows(model, [(32, 32)] * 4)
    begin(patched, rows[:1])
    step(patched, rows[:1], [3])
    assert 0 < cache.num_bytes <= 1e6
    rule.is_on = True
    begin(patched, rows)
    step(patched, rows, [4] * 4)
    assert 0 < cache.num_bytes <= 1e6
    assert cache.stats.uncached
    assert cache.stats.to_json()["uncached_blocks"] == sorted(cache.stats.uncached)
    assert set(cache.stats.uncached) <= set(cache.names)


def test_memory_limit_includes_batch_and_stored_tensors() -> None:
    """If free slots were counted, a small batch after a large one would appear to need too much memory."""
    rule = Switch(0.5)
    model, patched, cache = cached_model("sdxl", "image", rule, OPTIONS)
    needed = []
    for count in (8, 1):
        rows = draw_rows(model, [(32, 32)] * count)
        begin(patched, rows)
        for done in (3, 4):
            rule.is_on = done == 4
            step(patched, rows, [done] * count)
        assert cache.stats.masked > 0
        needed.append({block: sum(both) for block, both in cache._bytes_per_cell.items()})
    for block, bytes_per_cell in needed[1].items():
        assert bytes_per_cell == pytest.approx(needed[0][block], rel=0.2)
    buffer = SlotBuffer(lambda *_: pytest.fail("nothing is placed"))
    buffer.store(torch.zeros(10, 3, 4)[:, 1:], cache.tables, 0)
    assert buffer.num_bytes == 10 * 3 * 4 * 4  # a view holds all of its storage
