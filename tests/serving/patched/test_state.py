"""The patch engine's models: state between calls, and weights shared with the given model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from patchedserve.serving.patched import leaves
from patchedserve.serving.patched.attention import PatchedCrossAttention
from patchedserve.serving.patched.context import PatchContext
from patchedserve.serving.patched.swap import PatchSwap
from patchedserve.serving.patched.unet_layers import unet_level

from ...support.patched_cases import (
    FEW_WAYS,
    IMAGE,
    MASKED,
    MIXED,
    PATCH_STITCH,
    SOME,
    TOLERANCE,
    TRANSFORMERS,
    UNETS,
    WITH_POSITIONS,
    model_of,
    modules_of,
    ways_for,
)
from ...support.patched_models import (
    Alternation,
    Row,
    Way,
    call_patched,
    draw_rows,
    relative_error,
    run_patched,
    run_plain,
)
from ...support.random_models import MODELS, gelu_unet, scale_shift_unet, sdxl_unet


def with_text(row: Row, text: Tensor) -> Row:
    return replace(row, conditions=row.conditions | {"encoder_hidden_states": text})


# State between calls


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_text_keys_and_values_are_cached_until_the_next_batch(way: Way) -> None:
    model = model_of("sdxl")
    patched = way.build(model)
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    attentions = [module for module in patched.model.modules() if isinstance(module, PatchedCrossAttention)]
    for attention in attentions:
        attention.keys_values.register_forward_hook(counted)
    first, second = draw_rows(model, MIXED, seed=8), draw_rows(model, MIXED, seed=9)
    assert relative_error(run_patched(patched, first), run_plain(model, first)) <= TOLERANCE
    later = [replace(row, timestep=row.timestep - 20, latents=0.9 * row.latents) for row in first]
    assert relative_error(call_patched(patched, later), run_plain(model, later)) <= TOLERANCE
    assert count == len(attentions) > 0
    # The sizes are the same, and so is the packing; only `begin` says that these are other rows.
    assert relative_error(run_patched(patched, second), run_plain(model, second)) <= TOLERANCE
    assert count == 2 * len(attentions)


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_batches_of_different_shapes_in_sequence(name: str) -> None:
    model = model_of(name)
    few, many = draw_rows(model, [(16, 8)], seed=10), draw_rows(model, MIXED, seed=11)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model)
        first = run_patched(patched, few)
        assert relative_error(first, run_plain(model, few)) <= TOLERANCE, way
        assert relative_error(run_patched(patched, many), run_plain(model, many)) <= TOLERANCE, way
        assert all(torch.equal(one, other) for one, other in zip(run_patched(patched, few), first, strict=True)), way


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_failing_pass_leaves_no_state(way: Way) -> None:
    model = model_of("sdxl")
    rows = draw_rows(model, MIXED, seed=12)
    patched = way.build(model)
    expected = run_patched(patched, rows)
    for name in ("down_blocks.1.resnets.0.nonlinearity", "up_blocks.1.upsamplers.0.conv", "conv_act"):
        handle = patched.model.get_submodule(name).register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="half way"):
            call_patched(patched, rows)
        handle.remove()
        assert all(torch.equal(*pair) for pair in zip(call_patched(patched, rows), expected, strict=True)), name


def _fail(*_: object) -> None:
    raise RuntimeError("half way")


@pytest.mark.product(most=2)
@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name not in MASKED + WITH_POSITIONS])
def test_repeated_text_tokens(name: str) -> None:
    """Without T5, SD3's text ends in many equal tokens, which are passed once with their number."""
    model, num_equal = model_of(name), 50
    rows = draw_rows(model, MIXED, seed=13)
    texts = [row.conditions["encoder_hidden_states"] for row in rows]
    long = [
        with_text(row, torch.cat([text, text[-1:].expand(num_equal - 1, -1)]))
        for row, text in zip(rows, texts, strict=True)
    ]
    expected = run_plain(model, long)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model)
        assert relative_error(run_patched(patched, rows, repeats=num_equal), expected) <= TOLERANCE, way
        assert relative_error(call_patched(patched, rows), expected) <= TOLERANCE, way
        assert relative_error(run_patched(patched, rows), expected) > 1000 * TOLERANCE, "too easy a test"
        # The next batch counts its own tokens.
        assert relative_error(run_patched(patched, rows), run_plain(model, rows)) <= TOLERANCE, way
        assert relative_error(run_patched(patched, long), expected) <= TOLERANCE, way


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_equal_text_tokens_with_distinct_positions_are_kept(name: str) -> None:
    model = model_of(name)
    rows = draw_rows(model, MIXED, seed=13)
    rows = [with_text(row, row.conditions["encoder_hidden_states"][-1:].expand(9, -1)) for row in rows]
    patched = IMAGE.build(model)
    assert patched.shorten is None
    assert relative_error(run_patched(patched, rows), run_plain(model, rows)) <= TOLERANCE
    once = [with_text(row, row.conditions["encoder_hidden_states"][:1]) for row in rows]
    found = run_patched(patched, once, repeats=9)
    assert relative_error(found, run_plain(model, rows)) > 1000 * TOLERANCE, "their places do not matter"


# The given model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_swap_can_be_undone(name: str) -> None:
    model = MODELS[name](seed=14)
    rows = draw_rows(model, [(16, 16), (8, 16)], seed=14)
    modules, state, expected = modules_of(model), list(model.state_dict()), run_plain(model, rows)
    swap = PatchSwap(model, PatchContext(Alternation()))
    assert modules_of(model) != modules
    with pytest.raises(AssertionError):
        run_plain(model, rows)
    swap.undo()
    assert modules_of(model) == modules
    assert list(model.state_dict()) == state
    assert all(torch.equal(*pair) for pair in zip(run_plain(model, rows), expected, strict=True))
    swap.undo()  # nothing is left to undo
    assert modules_of(model) == modules


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_given_model_is_unmodified_and_its_weights_are_shared(name: str) -> None:
    model = MODELS[name](seed=15)
    rows = draw_rows(model, MIXED, seed=15)
    modules, expected = modules_of(model), run_plain(model, rows)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model)
        assert relative_error(run_patched(patched, rows), expected) <= TOLERANCE
        assert modules_of(model) == modules
        assert all(torch.equal(*pair) for pair in zip(run_plain(model, rows), expected, strict=True))
        theirs = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        ours = {tensor.data_ptr() for tensor in [*patched.model.parameters(), *patched.model.buffers()]}
        assert ours == theirs
        assert not {id(module) for module in patched.model.modules()} & {id(module) for module in model.modules()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sd15", ["conv_in.bias", "time_embedding.linear_1.weight", "down_blocks.1.resnets.0.norm1.bias"]),
        ("sd15", ["mid_block.attentions.0.proj_in.weight", "up_blocks.1.upsamplers.0.conv.bias", "conv_out.bias"]),
        ("sd3", ["pos_embed.proj.weight", "transformer_blocks.1.attn.to_out.0.bias", "norm_out.linear.weight"]),
    ],
)
def test_changed_weights_take_effect(name: str, changed: list[str]) -> None:
    """Exempt are weights of 3 x 3 convolutions and of queries, keys and values, which are copied at first use."""
    model = MODELS[name](seed=16)
    rows = draw_rows(model, MIXED, seed=16)
    patched = IMAGE.build(model)
    before = run_patched(patched, rows)
    for weight in changed:
        model.get_parameter(weight).mul_(1.5).add_(0.1)
        expected = run_plain(model, rows)
        assert relative_error(before, expected) > 100 * TOLERANCE, f"{weight} does not matter"
        before = run_patched(patched, rows)
        assert relative_error(before, expected) <= TOLERANCE, weight


@pytest.mark.parametrize("name", UNETS)
def test_level_of_a_convolution_follows_its_name(name: str) -> None:
    model = model_of(name)
    for way in ways_for(name, MIXED, [Way("image", None, "mixed"), Way("patch", 8, "mixed")]):
        patched = way.build(model)
        run_patched(patched, draw_rows(model, MIXED, seed=17))
        assert isinstance(patched.context.choose, Alternation)
        found = {(id(conv), level) for conv, level in patched.context.choose.chosen}
        convs = {name: conv for name, conv in patched.swap.convs.items() if not conv.is_pointwise}
        assert found == {(id(conv), unet_level(name, patched.num_levels)) for name, conv in convs.items()}
        assert {id(conv) for conv, _ in patched.convolutions} <= {id(conv) for conv in convs.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "num_per_resnet", "num_outside"), [(sdxl_unet, 2, 1), (scale_shift_unet, 1, 1), (gelu_unet, 0, 0)]
)
def test_norms_are_fused_only_if_silu_follows(
    build: Callable[..., Any], num_per_resnet: int, num_outside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same with and without fusion, so the test counts the calls."""
    num_calls = 0
    original = leaves.group_norm_silu_stitch

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(leaves, "group_norm_silu_stitch", counted)
    model = build(seed=18)
    rows = draw_rows(model, MIXED, seed=18)
    num_resnets = sum(isinstance(module, ResnetBlock2D) for module in model.modules())
    for way in FEW_WAYS:
        num_calls = 0
        run_patched(way.build(model), rows)
        assert num_calls == (num_per_resnet * num_resnets + num_outside if way is PATCH_STITCH else 0), way
