"""The patch cache is exact if nothing is reused or nothing has changed, and no request reads another's slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.serving.cache.options import CacheOptions, default_patch_size
from patchedserve.serving.cache.patch_batch import CachedRequest
from patchedserve.serving.cache.patch_cache import PatchCache, ReuseDecision
from patchedserve.serving.cache.rules import Booleans, InputThreshold, NeverReuse, PatchView, ReuseRule
from patchedserve.serving.conflicts import conflict_in
from patchedserve.serving.families.table import FAMILIES
from patchedserve.serving.patched.patched_model import PatchedModel

from ...support.cached_models import (
    SIZES,
    STEPS,
    PlaceRule,
    RequestRule,
    Switch,
    begin,
    cached_model,
    step,
)
from ...support.imposed_reuse import FixedShare
from ...support.patched_models import Row, draw_rows, relative_error, run_patched
from ...support.random_models import MODELS, TRANSFORMERS


def test_every_family_supports_the_cache() -> None:
    assert not {name for name in FAMILIES if conflict_in({"--cache": "", name: ""})}


def test_invalid_options_list_what_is_allowed() -> None:
    for wrong, message in (
        ({"mode": "all"}, "must be one of off, schedule, patch, image, interval, accumulated"),
        ({"max_reuse": 0}, "max reuse is 0"),
        ({"interval": 1}, "interval is 1"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"mode": "accumulated"}, "needs --cache-threshold"),
        ({"mode": "patch", "threshold": 0.1, "predictor": "x"}, "not both"),
        ({"mode": "interval", "predictor": "x"}, "belongs to --cache patch or image"),
    ):
        with pytest.raises(UsageError, match=message):
            CacheOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("sd35", ["transformer0", "transformer1", "transformer2"]),
        ("flux", ["transformer0", "transformer1", "single0", "single1"]),
        ("aura", ["transformer0", "transformer1", "single0", "single1"]),
        ("lumina2", ["transformer0", "single0", "single1"]),  # one block for the image alone, two for image and text
        ("qwen", ["transformer0", "transformer1"]),
        ("z-image", ["transformer0", "single0", "single1"]),
    ],
)
def test_blocks_of_all_lists_are_cached(name: str, blocks: list[str]) -> None:
    _, _, cache = cached_model(name, "image", NeverReuse())
    assert cache.names == blocks


@pytest.mark.product(most=4)
@pytest.mark.slow
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", ["sdxl", *TRANSFORMERS])
@pytest.mark.parametrize("rule", [NeverReuse(), InputThreshold(0.0)], ids=["never", "threshold 0"])
def test_nothing_reused_is_bit_equal(name: str, order: Any, rule: Any) -> None:
    model, patched, cache = cached_model(name, order, rule)
    plain = PatchedModel(model, order=order, patch_size=8 if order == "patch" else None, strategy="regroup")
    rows = draw_rows(model, SIZES)
    with torch.inference_mode():
        expected = run_patched(plain, rows)
    begin(patched, rows)
    # The second step has the same input: a threshold of 0 computes even what has not changed at all.
    for done in (5, 6):
        for one, other in zip(step(patched, rows, [done] * len(rows)), expected, strict=True):
            assert torch.equal(one, other)
    assert cache.stats.skipped == 0
    assert cache.stats.patches == 2 * len(cache.names) * sum(height * width // 64 for height, width in SIZES)


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", list(MODELS))
def test_masked_computation_is_exact_where_nothing_has_changed(name: str, order: Any) -> None:
    """With unchanged inputs, the values kept for reused patches equal those that they would compute."""
    rule = Switch(0.6)
    model, patched, cache = cached_model(name, order, rule)
    rows = draw_rows(model, SIZES)
    begin(patched, rows)
    expected = step(patched, rows, [3] * len(rows))
    rule.is_on = True
    for done in (4, 5, 6, 7):
        assert relative_error(step(patched, rows, [done] * len(rows)), expected) < 1e-5
    assert cache.stats.masked >= 4 * len(cache.names)
    assert 0.3 < cache.stats.saved_share < 0.6


@pytest.mark.product(most=1)
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", list(MODELS))
def test_fully_computed_requests_equal_the_plain_model(name: str, order: Any) -> None:
    """A request whose blocks are all computed reads nothing from the cache, whatever else is in the batch."""
    model, patched, cache = cached_model(name, order, RequestRule())
    plain = PatchedModel(model, order=order, patch_size=8 if order == "patch" else None, strategy="regroup")
    first = draw_rows(model, SIZES)
    begin(patched, first)
    num_computed = 0
    for done in (4, 5, 6):
        latents = [row.latents for row in draw_rows(model, SIZES, seed=done)]
        rows = [replace(row, latents=new) for row, new in zip(first, latents, strict=True)]
        expected = run_patched(plain, rows)
        found = step(patched, rows, [done] * len(rows))
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            height, width = SIZES[number]
            is_computed = done == 4 or (done * 2 + number + height * width // 64) % 3 == 0
            num_computed += is_computed
            assert (relative_error([one], [other]) < 1e-5) == is_computed
    assert len(SIZES) < num_computed < 3 * len(SIZES)
    assert (cache.stats.whole, cache.stats.rows) == (len(cache.names), 2 * len(cache.names))


@pytest.mark.product(most=1)
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", list(MODELS))
def test_fully_computed_requests_equal_masked_ones(name: str, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions give equal outputs as batches of their own and cell by cell, while requests join and leave."""
    found = []
    for is_masked in (False, True):
        if is_masked:
            monkeypatch.setattr("patchedserve.serving.cache.patch_batch.PatchBatch.fill", lambda *_: None)
        model, patched, cache = cached_model(name, order, RequestRule())
        outputs = []
        for keys, steps in (
            ([0, 1, 2, 3, 4], range(4, 9)),
            ([0, 5, 2, 3, 6], range(9, 14)),
            ([5, 7, 3, 6, 4], range(14, 18)),
        ):
            begin(patched, draw_rows(model, SIZES), keys)
            for done in steps:
                rows = draw_rows(model, SIZES, seed=done)
                outputs += step(patched, rows, [done] * len(rows))
        found.append(outputs)
        assert (cache.stats.rows == 0) == is_masked
        assert cache.stats.masked > len(cache.names)
    assert relative_error(*found) < 1e-4


@pytest.mark.parametrize("name", ["sdxl", *TRANSFORMERS])
def test_masked_computation_uses_new_inputs(name: str) -> None:
    """The test above can fail: computed patches see the new input, and reused ones do not."""
    rule = Switch(0.5)
    model, patched, _ = cached_model(name, "image", rule)
    rows, others = (draw_rows(model, SIZES, seed=seed) for seed in (0, 1))
    begin(patched, rows)
    old = step(patched, rows, [3] * len(rows))
    rule.is_on = True
    new = step(patched, others, [4] * len(rows))
    assert relative_error(new, old) > 0.1
    assert relative_error(new, run_plain_patched(model, others)) > 0.01


def run_plain_patched(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    with torch.inference_mode():
        return run_patched(PatchedModel(model, order="image", strategy="regroup"), rows)


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", ["sdxl", "sd15", *TRANSFORMERS])
def test_joining_and_leaving_requests_never_read_other_slots(name: str, order: Any) -> None:
    """Every request's outputs in a changing batch equal those that it has when served alone."""
    options = CacheOptions("patch", threshold=0.0, patch_size=8, warmup_steps=2, max_reuse=2, full_above=1)
    model, patched, cache = cached_model(name, order, PlaceRule(), options)
    rng = np.random.default_rng(7)
    sizes = [(16, 16), (24, 16), (24, 24), (32, 16)]
    histories: dict[int, list[Row]] = {}
    results: dict[int, list[Tensor]] = {}
    active: dict[int, int] = {}
    for _ in range(14):
        for key in [key for key in active if rng.random() < 0.2]:
            del active[key]
        while len(active) < 4 and (not active or rng.random() < 0.7):
            key = len(histories)
            active[key] = 0
            size = sizes[int(rng.integers(len(sizes)))]
            # A row per step: the same conditions, other latents, as denoising would have them.
            base = draw_rows(model, [size], seed=key)[0]
            histories[key] = [
                Row(base.latents + 0.2 * torch.randn(base.latents.shape), base.timestep - 10 * k, base.conditions)
                for k in range(14)
            ]
            results[key] = []
        keys = sorted(active, key=lambda key: (np.prod(histories[key][0].size), histories[key][0].size, key))
        rows = [histories[key][active[key]] for key in keys]
        begin(patched, rows, keys)
        for key, out in zip(keys, step(patched, rows, [active[key] for key in keys]), strict=True):
            results[key].append(out)
            active[key] += 1
    assert cache.stats.saved_share > 0.15
    assert len(histories) > 5
    for key, outputs in results.items():
        _, alone, _ = cached_model(name, order, PlaceRule(), options)
        begin(alone, histories[key][:1], [key])
        for done, out in enumerate(outputs):
            expected = step(alone, [histories[key][done]], [done])
            assert relative_error([out], expected) < 1e-5, f"request {key}, step {done}"


def test_all_reused_skips_every_block() -> None:
    rule = Switch(1.0)
    model, patched, cache = cached_model("sdxl", "image", rule)
    rows = draw_rows(model, SIZES)
    begin(patched, rows)
    first = step(patched, rows, [3] * len(rows))
    rule.is_on = True
    calls: list[str] = []
    for name, module in patched.model.named_modules():
        if name.startswith(("down_blocks", "mid_block", "up_blocks")):
            module.register_forward_pre_hook(lambda module, arguments, name=name: calls.append(name))
    again = step(patched, rows, [4] * len(rows))
    assert relative_error(again, first) < 1e-6
    assert all(name.count(".") <= 1 for name in calls), "only the wrapped blocks themselves are called"
    assert cache.stats.skipped_blocks == len(cache.names)


def test_reuse_is_bounded_and_first_and_last_steps_are_computed() -> None:
    rule = FixedShare(1.0)
    model, patched, cache = cached_model("sd3", "image", rule)
    rows = draw_rows(model, [(16, 16)])
    begin(patched, rows)
    computed = []
    for done in range(STEPS):
        before = cache.stats.whole
        step(patched, rows, [done])
        computed.append(cache.stats.whole > before)
    # The first step is computed, then at most three in a row are reused; the last step is computed.
    assert computed == [done % 4 == 0 or done == STEPS - 1 for done in range(STEPS)]


class RecordingRule(ReuseRule):
    """Rule that reuses nothing and records its observations of the steps."""

    observes = True

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[float], list[bool]]] = []

    def observe(self, keys: Sequence[int], changes: NDArray[np.float64], is_forced: Booleans) -> None:
        self.seen.append((list(keys), changes.tolist(), is_forced.tolist()))

    def may_reuse(self, view: PatchView) -> Booleans:
        return np.zeros(len(view.request), bool)


def test_any_rule_can_observe_input_changes_of_a_step() -> None:
    rule = RecordingRule()
    model, patched, cache = cached_model("sdxl", "image", rule)
    rows = draw_rows(model, [(16, 16), (24, 24)])
    begin(patched, rows, [3, 8])
    inputs = [tokens.clone() for tokens in observed_inputs(patched, cache, rows, [1, 1])]
    moved = [Row(1.5 * row.latents, row.timestep, row.conditions) for row in rows]
    after = observed_inputs(patched, cache, moved, [2, STEPS - 1])
    assert [keys for keys, _, _ in rule.seen] == [[3, 8]] * 2, "once a step, not once a block"
    assert rule.seen[0][1] == [float("inf")] * 2
    places = [slice(0, 16 * 16), slice(16 * 16, None)]
    expected = [
        float((after[0][own] - inputs[0][own]).square().mean().sqrt() / inputs[0][own].square().mean().sqrt())
        for own in places
    ]
    assert rule.seen[1][1] == pytest.approx(expected, rel=0.2)  # the cache looks at every fourth token
    assert rule.seen[1][2] == [False, True]


def observed_inputs(
    patched: PatchedModel, cache: PatchCache, rows: Sequence[Row], steps_done: Sequence[int]
) -> tuple[Tensor, ...]:
    """Take a step and return the tokens that its first block received."""
    found: list[tuple[Tensor, ...]] = []
    cache.on_computed = lambda block, inputs, _: found.append(inputs) if block == 0 else None
    step(patched, rows, steps_done)
    return found[0]


def test_decision_selects_reuse_masked_or_full_computation() -> None:
    rule = FixedShare(0.0)
    model, patched, cache = cached_model("sd3", "image", rule)
    rows = draw_rows(model, SIZES)
    begin(patched, rows)
    step(patched, rows, [3] * len(rows))
    inputs = cache.stores[0].outputs
    found = []
    for rule.share in (0.0, 0.5, 1.0):
        cache.begin_step([4] * len(rows))
        found.append(cache.decide(0, inputs))
    whole, masked, skipped = found
    assert (whole, skipped) == (ReuseDecision("whole"), ReuseDecision("skipped"))
    assert masked.kind == "masked"
    assert masked.active is not None
    assert 0 < len(masked.active) < cache.tables.num_cells


@pytest.mark.parametrize(
    ("model_side", "num_levels", "unit", "size"),
    # SDXL, Stable Diffusion 1.5, Stable Diffusion 3, emoji-xl, emoji-3, and models too small for four patches.
    [(128, 3, 1, 32), (64, 4, 1, 16), (128, 1, 2, 16), (32, 3, 1, 8), (32, 1, 2, 8), (8, 3, 1, 4), (12, 1, 2, 2)],
)
def test_default_patch_size_suits_the_model(model_side: int, num_levels: int, unit: int, size: int) -> None:
    assert default_patch_size(model_side, num_levels, unit) == size


def test_refused_and_expired_decisions_are_counted() -> None:
    rule = Switch(1.0)
    model, patched, cache = cached_model("sdxl", "image", rule)
    rows = draw_rows(model, SIZES[:2])
    begin(patched, rows)
    patches, blocks = cache.batch.num_patches, len(cache.stores)
    step(patched, rows, [0, 0])
    assert (cache.stats.refused, cache.stats.expired) == (0, 0), "the first step is nobody's decision"
    step(patched, rows, [1, 1])
    assert (cache.stats.refused, cache.stats.expired) == (patches * blocks, 0)
    rule.is_on = True
    for done in range(2, 6):
        step(patched, rows, [done, done])
    # After three reuses in a row, the counter forces a computation.
    assert (cache.stats.refused, cache.stats.expired) == (patches * blocks, patches * blocks)
    assert cache.stats.to_json()["patches_expired"] == patches * blocks


def test_image_mode_skips_only_if_all_patches_agree() -> None:
    options = CacheOptions("image", threshold=0.0, patch_size=8, warmup_steps=1, max_reuse=3, full_above=1)
    model, patched, cache = cached_model("sdxl", "image", PlaceRule(), options)
    rows = draw_rows(model, SIZES)
    begin(patched, rows)
    for done in range(2, 6):
        step(patched, rows, [done] * len(rows))
    assert cache.stats.masked == 0
    assert cache.stats.skipped == 0, "among so many patches one always disagrees"


@pytest.mark.slow
def test_guided_requests_decide_jointly_for_both_rows() -> None:
    model, patched, cache = cached_model("sdxl", "image", Switch(0.5))
    cache.rule.is_on = True  # type: ignore[attr-defined]
    rows = draw_rows(model, [(16, 16), (24, 24)], num_each=2)
    patched.begin(
        patched.pack([row.size for row in rows]),
        requests=[CachedRequest(5, 2, STEPS, 128 * 128), CachedRequest(9, 2, STEPS, 192 * 192)],
    )
    for done in (2, 3):
        step(patched, rows, [done, done])
    assert cache.batch.num_patches == 4 + 9
    for store in cache.stores:
        reused = store.reuses > 0
        assert reused[cache.batch.first_cell].tolist() == reused[cache.batch.last_cell].tolist()
        assert reused.any()


def test_sizes_that_patches_do_not_divide_are_refused() -> None:
    _, _, cache = cached_model("sdxl", "image", NeverReuse())
    cache.check_sizes([(16, 24)])
    with pytest.raises(UsageError, match="latents of 20x16 cannot be cut into the cache's patches of 8"):
        cache.check_sizes([(16, 20)])
    with pytest.raises(UsageError, match="needs a multiple of 4"):
        PatchedModel(MODELS["sdxl"]()).use_cache(CacheOptions("patch", 0.0, patch_size=6), NeverReuse())
