"""Displaced rows: a rank reads the other strips' values of the previous call, never older ones, row by row."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchedserve.serving.parallel.attention import StripSelfAttention
from patchedserve.serving.parallel.leaves import StripConv, StripGroupNorm
from patchedserve.serving.parallel.options import NormOptions, ParallelOptions
from patchedserve.serving.parallel.strip_model import flat
from patchedserve.serving.parallel.strips import Strips
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.patched_models import draw_rows, stack_conditions
from ...support.random_models import flux_transformer, sd3_transformer, sdxl_unet
from ...support.virtual_ranks import in_calls, relative

HEIGHTS = Strips.of(11, 2, [1, 1, 1])
MODES = {None: [(), ()], "displaced": [(), (0, 1)], "mixed": [(), (1,)]}


def images(count: int, height: int = 11) -> list[Tensor]:
    torch.manual_seed(count)
    rise = torch.arange(height)[:, None] / 3
    return [(1 + number) * torch.randn(2, 8, height, 5) + rise + number for number in range(count)]


@pytest.mark.parametrize("stale", [(0, 1), (1,), (0,)])
def test_convolution_reads_neighbour_rows_of_the_previous_call(stale: tuple[int, ...]) -> None:
    conv = nn.Conv2d(8, 3, 3, padding=1)
    before, now = images(2)
    found = in_calls([before, now], HEIGHTS, lambda context: StripConv(conv, context), [(), stale])
    assert relative(found[0], conv(before)) <= 1e-6
    parts = []
    for start, end in zip(HEIGHTS.starts, HEIGHTS.starts[1:], strict=False):
        # A rank sees its own rows of this call and all others of the previous one.
        seen = now.clone()
        for row in stale:
            seen[row, :, :start], seen[row, :, end:] = before[row, :, :start], before[row, :, end:]
        parts.append(conv(seen)[:, :, start:end])
    assert relative(found[1], torch.cat(parts, 2)) <= 1e-6


@pytest.mark.parametrize("stale", [(0, 1), (1,)])
def test_nothing_older_than_the_previous_call_is_read(stale: tuple[int, ...]) -> None:
    conv = nn.Conv2d(8, 3, 3, padding=1)
    first, second, third = images(3)
    calls = [(), stale, stale]
    found = in_calls([first, second, third], HEIGHTS, lambda context: StripConv(conv, context), calls)
    other = in_calls([second, second, third], HEIGHTS, lambda context: StripConv(conv, context), calls)
    assert torch.equal(found[2], other[2])
    with_older = in_calls([first, first, third], HEIGHTS, lambda context: StripConv(conv, context), calls)
    assert not torch.equal(found[2], with_older[2]), "what is older must show"


def group_statistics(x: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return mean and mean square [rows, groups] of 4 groups, in float64."""
    values = x.double().numpy().reshape(len(x), 4, -1)
    return values.mean(2), (values**2).mean(2)


@pytest.mark.parametrize("stale", [(0, 1), (1,)])
@pytest.mark.parametrize(
    ("mode", "guard"), [("corrected", 0.0), ("corrected", 0.25), ("sync", 0.25), ("stale", 0.25), ("separate", 0.25)]
)
def test_group_norm_of_strips(mode: str, guard: float, stale: tuple[int, ...]) -> None:
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    before, now = images(2)
    found = in_calls(
        [before, now],
        HEIGHTS,
        lambda context: StripGroupNorm(norm, context, 1),
        [(), stale],
        mode=mode,
        guard=guard,
    )
    assert relative(found[0], norm(before)) <= 1e-6
    spans = list(zip(HEIGHTS.starts, HEIGHTS.starts[1:], strict=False))
    weights = [(end - start) / 11 for start, end in spans]
    parts, guarded = [], 0
    for place, (start, end) in enumerate(spans):
        own_mean, own_square = group_statistics(now[:, :, start:end])
        primes = [group_statistics(before[:, :, low:high]) for low, high in spans]
        fresh = [group_statistics(now[:, :, low:high]) for low, high in spans]
        if mode == "separate":
            mean, square = own_mean, own_square
        elif mode == "sync":
            mean, square = np.tensordot(weights, np.array(fresh), 1)
        else:
            known = [fresh[place] if index == place else each for index, each in enumerate(primes)]
            used = known if mode == "stale" else primes
            mean, square = np.tensordot(weights, np.array(used), 1)
            if mode == "corrected":
                mean = mean + own_mean - primes[place][0]
                square = square + own_square - primes[place][1]
        variance = square - mean**2
        if mode == "corrected":
            own_variance = own_square - own_mean**2
            variance = np.where(variance < guard * own_variance, own_variance, variance)
            guarded += int((variance == own_variance).sum())
        exact = [group_statistics(now)[k] for k in (0, 1)]
        for row in {0, 1} - set(stale):
            mean[row], variance[row] = exact[0][row], exact[1][row] - exact[0][row] ** 2
        x = now[:, :, start:end].double().numpy().reshape(2, 4, -1)
        x = (x - mean[:, :, None]) / np.sqrt(variance[:, :, None] + norm.eps)
        shaped = torch.from_numpy(x.reshape(2, 8, end - start, 5))
        parts.append(shaped * norm.weight[:, None, None] + norm.bias[:, None, None])
    assert relative(found[1].double(), torch.cat(parts, 2).detach()) <= 2e-6
    assert guarded or not guard or mode != "corrected", "the guard has something to do"


def test_negative_variance_is_replaced_by_that_of_the_strip() -> None:
    norm = nn.GroupNorm(1, 8)
    strips = Strips.of(4, 2, [1, 1])
    torch.manual_seed(0)
    # Strips with very different means become nearly equal, so that the corrected statistics give a negative variance.
    before = torch.cat([torch.full((1, 8, 2, 5), -4.0), torch.full((1, 8, 2, 5), 4.0)], 2)
    now = before * 0.1 + 0.01 * torch.randn(1, 8, 4, 5)
    found = in_calls([before, now], strips, lambda context: StripGroupNorm(norm, context, 1), [(), (0,)])[1]
    assert bool(found.isfinite().all())
    upper = now[:, :, :2].double()
    mean = (0.5 * -4 + 0.5 * 4) + (upper.mean() + 4)
    square = 16 + upper.square().mean() - 16
    assert square - mean**2 < 0, "the case is one"
    wanted = (upper - mean) / (upper.var(correction=0) + norm.eps).sqrt()
    assert relative(found[:, :, :2].double(), wanted) <= 1e-4


def run(model: Any, rows: list[Any], steps: list[int], count: int = 2, **options: Any) -> list[list[Tensor]]:
    """Return the predictions of every request's calls; request i begins in call `steps[i]`."""
    each = 2
    requests = [rows[each * number : each * number + each] for number in range(len(rows) // each)]
    found: list[list[Tensor]] = [[] for _ in requests]
    virtual = VirtualRanks(model, ParallelOptions(f"virtual:{count}", cfg_split="off", **options))
    with closing(virtual), virtual.end, torch.inference_mode():
        for call in range(max(steps) + 4):
            active = [number for number, begin in enumerate(steps) if begin <= call < begin + 4]
            names = [(number, row) for number in active for row in range(each)]
            own = [row for number in active for row in requests[number]]
            virtual.ranks.retain(names)
            virtual.ranks.learn(names, flat(stack_conditions(own)))
            ages = [call - steps[number] for number in active for _ in range(each)]
            ending = {name for name, age in zip(names, ages, strict=True) if age == 3}
            latents = torch.stack([(1 + age / 3) * row.latents for age, row in zip(ages, own, strict=True)])
            timesteps = torch.tensor([row.timestep - 9 * age for age, row in zip(ages, own, strict=True)])
            predicted = virtual.ranks.predict(names, latents, timesteps, ending)
            for place, number in enumerate(active):
                found[number].append(predicted[each * place : each * place + each])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [sdxl_unet, sd3_transformer, flux_transformer])
@pytest.mark.parametrize("norms", ["corrected", "sync", "stale", "separate"])
def test_rows_are_independent_of_their_batch(make: Any, norms: str) -> None:
    model = make()
    options = {"mode": "displaced", "warmup": 1, "norms": NormOptions(norms)}  # type: ignore[arg-type]
    rows = draw_rows(model, [(16, 12)] * 3, num_each=2)
    together = run(model, rows, [0, 1, 3], **options)
    for number in range(3):
        alone = run(model, rows[2 * number : 2 * number + 2], [0], **options)[0]
        for one, other in zip(together[number], alone, strict=True):
            assert relative(one, other) <= 1e-5


@pytest.mark.product(most=1)
@pytest.mark.parametrize("make", [sdxl_unet, sd3_transformer, flux_transformer])
def test_only_warm_up_calls_are_bit_exact(make: Any) -> None:
    model = make()
    rows = draw_rows(model, [(16, 12)], num_each=2)
    [sync], [long], [short] = (
        run(model, rows, [0], **options)
        for options in ({}, {"mode": "displaced", "warmup": 3}, {"mode": "displaced", "warmup": 1})
    )
    assert all(map(torch.equal, sync, long))
    assert [torch.equal(*both) for both in zip(sync, short, strict=True)] == [True, True, False, False]


@pytest.mark.exhaustive
def test_requests_beyond_the_memory_limit_are_exact() -> None:
    model: Any = sdxl_unet()
    rows = draw_rows(model, [(64, 64)] * 2, num_each=2)
    options: dict[str, Any] = {"mode": "displaced", "warmup": 0}
    sync, displaced = run(model, rows, [0, 0]), run(model, rows, [0, 0], **options)
    with closing(VirtualRanks(model, ParallelOptions("virtual:2"))) as virtual, virtual.end:
        row_bytes = virtual.ranks._model.slot_bytes(64, 64)
    bounded = run(model, rows, [0, 0], **options, memory_mb=-(-2 * row_bytes >> 20))
    assert all(map(torch.equal, bounded[0], displaced[0]))
    for one, exact in zip(bounded[1], sync[1], strict=True):
        assert relative(one, exact) <= 1e-5
    assert relative(displaced[1][1], sync[1][1]) > 1e-5


def test_attention_reads_keys_of_the_previous_call() -> None:
    model: Any = sdxl_unet()
    attention = model.down_blocks[1].attentions[0].transformer_blocks[0].attn1
    width = attention.to_q.in_features
    torch.manual_seed(0)
    before, now = torch.randn(2, 1, width, 6, 4)

    def leaf(context: Any) -> Any:
        own = StripSelfAttention(attention, context, 1)

        def as_image(x: Tensor) -> Tensor:
            tokens = own(x.flatten(2).transpose(1, 2))
            return tokens.transpose(1, 2).view(x.shape)

        return as_image

    strips = Strips.of(6, 1, [1, 1])
    found = in_calls([before, now], strips, leaf, [(), (0,)])[1]
    for start, end in ((0, 3), (3, 6)):
        seen = before.clone()
        seen[:, :, start:end] = now[:, :, start:end]
        with torch.inference_mode():
            whole = attention(seen.flatten(2).transpose(1, 2)).transpose(1, 2).view(now.shape)
        assert relative(found[:, :, start:end], whole[:, :, start:end]) <= 1e-5
