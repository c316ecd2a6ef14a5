"""Stored values of a block, and the measured changes of its inputs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchedserve.serving.cache.cells import SlotTable, match_keys
from patchedserve.serving.cache.patch_cache import PatchCache
from patchedserve.serving.cache.rules import Booleans, InputThreshold, NeverReuse, PatchView
from patchedserve.serving.cache.store import BlockStore, sampled

from ...support.cached_models import SIZES, PlaceRule, begin, cached_model, step
from ...support.patched_models import draw_rows
from ...support.random_models import TRANSFORMERS


@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", ["sdxl", "sd35"])
def test_changes_are_measured_on_a_fair_sample(name: str, order: Any) -> None:
    model, patched, cache = cached_model(name, order, NeverReuse())
    begin(patched, draw_rows(model, SIZES))
    tables, generator = cache.tables, torch.Generator().manual_seed(0)
    for level in tables.packing.levels:
        sample, of_cell = tables.sample(level.index), tables.tokens(level.index)
        for cell, own in zip(sample.tolist(), of_cell.tolist(), strict=True):
            assert set(cell) <= set(own)
        tensor = torch.randn(level.num_tokens, 8, generator=generator)
        expected = torch.stack([tensor[cell].flatten() for cell in sample.tolist()])
        assert torch.equal(sampled(tensor, tables), expected)
        some = torch.arange(0, tables.num_cells, 2)
        assert torch.equal(sampled(tensor, tables, some), expected[some])
    assert tables.sample(0).shape[1] < tables.tokens(0).shape[1], "the finest level is worth sampling"


class ChangeRecorder(InputThreshold):
    """Rule that reuses all it may, and from step 15 follows `PlaceRule`; records the changes it receives by block."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.by_place, self.told = PlaceRule(), dict[int, Tensor]()

    def may_reuse(self, view: PatchView) -> Booleans:
        assert view.change is not None
        self.told[view.block] = view.change
        return self.by_place.may_reuse(view) if view.steps_done[0] >= 15 else np.ones(len(view.request), bool)


@pytest.mark.parametrize("name", ["sdxl", *TRANSFORMERS])
def test_unchanged_inputs_need_no_comparison(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes derived from the blocks that have run equal those of all inputs, while requests join and leave."""
    rule, ask, num_compared, looked = ChangeRecorder(), PatchCache._apply_rule, 0, 0

    def compared(self: PatchCache, block: int, inputs: tuple[Tensor, ...], must: Booleans) -> Booleans:
        nonlocal num_compared
        answer, store, batch = ask(self, block, inputs, must), self.stores[block], self.batch
        assert store.square is not None
        sums = sum((sampled(x, self.tables) - y).square().sum(1) for x, y in zip(inputs, store.samples, strict=True))
        change = sums / sum(sample.shape[1] for sample in store.samples) / store.square
        expected = torch.maximum(change[batch.first_cell_tensor], change[batch.last_cell_tensor])
        asked = torch.from_numpy(~must)
        assert torch.allclose(rule.told[block][asked], expected[asked], rtol=1e-4, atol=1e-7)
        num_compared += int((~must).sum())
        return answer

    def counted(*arguments: Any) -> Tensor:
        nonlocal looked
        looked += len(arguments) == 2  # samples all cells
        return sampled(*arguments)

    monkeypatch.setattr(PatchCache, "_apply_rule", compared)
    monkeypatch.setattr("patchedserve.serving.cache.store.sampled", counted)
    model, patched, cache = cached_model(name, "image", rule)
    num_inputs = 0
    for keys, steps in (([0, 1, 2, 3, 4], range(3, 9)), ([0, 5, 2, 3, 6], range(9, 17))):
        begin(patched, draw_rows(model, SIZES), keys)
        for done in steps:
            step(patched, draw_rows(model, SIZES, seed=done), [done] * len(SIZES))
            num_inputs += sum(len(store.samples) for store in cache.stores)
    assert num_compared > 100
    assert cache.stats.rows >= len(cache.names)
    assert cache.stats.masked >= len(cache.names)
    # The inputs of these two blocks are made or concatenated by the model itself.
    others = len(cache.names) - sum(name in ("transformer0", "single0") for name in cache.names)
    assert looked < (1 - 0.4 * others / len(cache.names)) * num_inputs


def test_inputs_are_stored_only_for_rules_that_compare() -> None:
    kept = {}
    for rule in (InputThreshold(0.0), NeverReuse()):
        model, patched, cache = cached_model("sdxl", "image", rule)
        rows = draw_rows(model, SIZES)
        begin(patched, rows)
        step(patched, rows, [5] * len(rows))
        kept[rule.needs_change] = cache.num_bytes
        assert all(bool(store.samples) == rule.needs_change for store in cache.stores)
    assert kept[False] < kept[True]


def test_mask_indices_must_be_in_the_common_set() -> None:
    store = BlockStore()
    store.is_known = np.array([True, False, True])
    store.check_mask(np.array([True, False, True]))
    with pytest.raises(RuntimeError, match=r"not in the cache: \[1\]"):
        store.check_mask(np.array([False, True, True]))


def test_slots_follow_their_keys() -> None:
    table, rng, owner = SlotTable(), np.random.default_rng(0), {}
    for _ in range(50):
        keys = rng.permutation(40)[: int(rng.integers(1, 30))]
        slots = table.assign(keys)
        assert len(set(slots.tolist())) == len(keys)
        assert slots.min() >= 1
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            assert owner.get(key, slot) == slot, "a request that stays keeps its slot"
        owner = dict(zip(keys.tolist(), slots.tolist(), strict=True))
        assert table.num_slots <= 30


def test_common_sets_match() -> None:
    new, old = np.array([5, 1, 9, 3]), np.array([3, 4, 5])
    here, there = match_keys(new, old)
    assert new[here].tolist() == old[there].tolist() == [5, 3]
    assert not len(match_keys(new, old[:0])[0])


def test_texts_have_the_length_of_those_of_the_batch() -> None:
    """Tokens that batches trim from the end of texts are padding, or repeats of the last token."""
    store = BlockStore()
    text = torch.arange(12.0).view(2, 3, 2)
    store.row_outputs = (text,)
    store.fit_text(3)
    assert store.row_outputs[0] is text
    store.fit_text(5)
    assert torch.equal(store.row_outputs[0], torch.cat([text, text[:, 2:], text[:, 2:]], 1))
    store.fit_text(2)
    assert torch.equal(store.row_outputs[0], text[:, :2])
