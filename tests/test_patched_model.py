"""The patch engine's models (serving/patched) against unmodified diffusers, which runs every row by itself."""

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from patchedserve.data.errors import UsageError
from patchedserve.serving.loading import load_model
from patchedserve.serving.patched import leaves, packing
from patchedserve.serving.patched.attention import PatchedCrossAttention
from patchedserve.serving.patched.leaves import PatchContext
from patchedserve.serving.patched.patched_model import PatchedModel, unet_level
from patchedserve.serving.patched.swap import Swap

from . import patched_models
from .patched_models import (
    MODELS,
    Alternation,
    Row,
    Size,
    Way,
    call_patched,
    draw_rows,
    gelu_unet,
    relative_error,
    run_patched,
    run_plain,
    scale_shift_unet,
    sd3_transformer,
    sd15_unet,
    sdxl_unet,
    small_unet,
    to_dtype,
    triton_case,
)

TOLERANCE = 1e-5
UNETS = ["sd15", "sd2", "sdxl", "scale-shift", "gelu"]
TRANSFORMERS = ["sd3", "sd35"]
SOME = ["sd15", "sdxl", "scale-shift", "sd3", "sd35"]
FOUR_LEVELS = ["sd15", "sd2"]  # patches of 8 and more
BUNDLED = ["emoji-xl", "emoji-3"]

STRATEGIES = ["regroup", "stitch", "mixed"]
WAYS = [
    *(Way("image", None, strategy) for strategy in STRATEGIES),
    *(Way("patch", 8, strategy) for strategy in STRATEGIES),
    *(Way("patch", patch_size, strategy) for patch_size in (4, 16) for strategy in ("regroup", "stitch")),
    Way("patch", None, "stitch"),
]
IMAGE, IMAGE_STITCH = Way("image", None, "regroup"), Way("image", None, "stitch")
PATCH, PATCH_STITCH = Way("patch", 8, "regroup"), Way("patch", 8, "stitch")
FEW_WAYS = [IMAGE, IMAGE_STITCH, PATCH, PATCH_STITCH]

# Latent sizes (height, width) and rows of each; images have eight times as many pixels on a side.
BATCHES: dict[str, tuple[list[Size], int]] = {
    "one row": ([(16, 16)], 1),
    "all three sizes": ([(16, 16), (24, 24), (32, 32)], 1),
    "128x256 and 256x128": ([(16, 32), (32, 16), (16, 16)], 1),
    "160x224 and 224x160": ([(20, 28), (28, 20), (20, 28), (16, 32)], 1),
    "16 guided requests": ([*[(8, 8)] * 6, *[(8, 16)] * 5, *[(16, 16)] * 5], 2),
    "one resolution": ([(16, 24)] * 4, 1),
    "many resolutions": ([(8, 8), (8, 16), (16, 8), (16, 16), (8, 24), (24, 8), (24, 16), (16, 24), (32, 8)], 1),
    "odd sides": ([(15, 18), (17, 16), (15, 18), (9, 7)], 1),
    "few pixels": ([(2, 2), (4, 4), (2, 6)], 1),
    # At the deeper levels every image is one position, so that levels have equal shapes.
    "one position": ([(2, 2), (2, 2)], 1),
}
MIXED: list[Size] = [(16, 16), (16, 16), (16, 16), (24, 24), (16, 32), (8, 8)]


@functools.cache
def model_of(name: str) -> Any:
    """A model that tests must leave as it is."""
    if name in MODELS:
        return MODELS[name](seed=1)
    pipe: Any = load_model(name, device="cpu", dtype="float32").pipe
    return pipe.transformer if getattr(pipe, "unet", None) is None else pipe.unet


def ways_for(name: str, sizes: Sequence[Size], ways: Sequence[Way] = tuple(WAYS)) -> list[Way]:
    """The ways that the model and these sizes allow. SD3 has no convolutions, and so nothing to choose."""
    has_choice = name in UNETS or name == "emoji-xl"
    return [way for way in ways if way.fits(model_of(name), sizes) and (has_choice or way.strategy == "regroup")]


def rms_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    error = sum(float((one.float() - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return (error / sum(float(other.square().sum()) for other in expected)) ** 0.5


def modules_of(model: nn.Module) -> list[tuple[str, int]]:
    """Every module with its place, in order."""
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]


def with_text(row: Row, text: Tensor) -> Row:
    return replace(row, conditions=row.conditions | {"encoder_hidden_states": text})


# Mixed batches


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [*UNETS, *TRANSFORMERS])
def test_mixed_batch_equals_plain(name: str, batch: str) -> None:
    sizes, num_each = BATCHES[batch]
    ways = ways_for(name, sizes)
    if name in TRANSFORMERS and batch == "odd sides":
        assert ways == []
        return
    model = model_of(name)
    rows = draw_rows(model, sizes, num_each=num_each, seed=2)
    expected = run_plain(model, rows)
    errors = {}
    for way in ways:
        patched = way.build(model)
        errors[str(way)] = relative_error(run_patched(patched, rows), expected)
        if way.strategy == "mixed":
            assert isinstance(patched.context.choose, Alternation)
            assert set(patched.context.choose.chosen.values()) == {"stitch", "regroup"}
    assert max(errors.values()) <= TOLERANCE, errors


def test_every_way_is_tried() -> None:
    """On each model; a way that no batch allows would be left out above in silence."""
    for name in [*UNETS, *TRANSFORMERS]:
        tried = {way for sizes, _ in BATCHES.values() for way in ways_for(name, sizes)}
        assert tried == {
            way
            for way in WAYS
            if (name in UNETS or way.strategy == "regroup") and ((way.patch_size or 8) >= 8 or name not in FOUR_LEVELS)
        }


@pytest.mark.parametrize("batch", ["all three sizes", "128x256 and 256x128"])
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_model_equals_plain(name: str, batch: str) -> None:
    sizes, _ = BATCHES[batch]
    model = model_of(name)
    rows = draw_rows(model, sizes, num_each=2, seed=3)
    expected = run_plain(model, rows)
    errors = {str(way): relative_error(run_patched(way.build(model), rows), expected) for way in ways_for(name, sizes)}
    assert len(errors) >= 3
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", MODELS)
def test_every_input_matters(name: str) -> None:
    """Otherwise equality with plain would not show that two rows were mixed up."""
    model = model_of(name)
    row = draw_rows(model, [(16, 16)], seed=4)[0]
    other = draw_rows(model, [(8, 8), (24, 24)], seed=5)[1]
    changed = {"timestep": replace(row, timestep=row.timestep - 37)}
    for key, value in other.conditions.items():
        for inner in value if isinstance(value, dict) else [None]:
            new = value if inner is None else row.conditions[key] | {inner: value[inner]}
            changed[inner or key] = replace(row, conditions=row.conditions | {key: new})
    assert len(changed) == {"sdxl": 4, "sd3": 3, "sd35": 3}.get(name, 2)
    before = run_plain(model, [row])
    for what, changed_row in changed.items():
        assert relative_error(run_plain(model, [changed_row]), before) > 1000 * TOLERANCE, what


# Rows do not see each other


@pytest.mark.parametrize("name", SOME)
def test_row_does_not_depend_on_its_company(name: str) -> None:
    rows = draw_rows(model_of(name), MIXED, seed=6)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model_of(name))
        together = run_patched(patched, rows)
        for place, row in enumerate(rows):
            assert relative_error(run_patched(patched, [row]), [together[place]]) <= TOLERANCE, way
        for kept in ([0, 3], [1, 2, 5], [0, 1, 3, 4]):
            found = run_patched(patched, [rows[place] for place in kept])
            assert relative_error(found, [together[place] for place in kept]) <= TOLERANCE, way


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SOME)
def test_row_that_is_not_finite_spoils_no_other(name: str, value: float) -> None:
    rows = draw_rows(model_of(name), MIXED, seed=7)
    spoilt = list(rows)
    # The first row, which patches at an edge read in place of a missing neighbour; a row between two of its own
    # resolution; and the corners of another, where patches of other rows are next.
    for place in (0, 2):
        spoilt[place] = replace(rows[place], latents=torch.full_like(rows[place].latents, value))
    corners = rows[4].latents.clone()
    corners[:, [0, -1], [0, -1]] = value
    spoilt[4] = replace(rows[4], latents=corners)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model_of(name))
        before, after = run_patched(patched, rows), run_patched(patched, spoilt)
        for place in range(len(rows)):
            if place in (0, 2, 4):
                assert not after[place].isfinite().all(), way
            else:
                assert after[place].isfinite().all(), way
                assert torch.equal(after[place], before[place]), way


# What is kept between calls


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_text_keys_and_values_last_until_the_next_batch(way: Way) -> None:
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


@pytest.mark.parametrize("name", SOME)
def test_batches_of_other_shapes_follow_each_other(name: str) -> None:
    model = model_of(name)
    few, many = draw_rows(model, [(16, 8)], seed=10), draw_rows(model, MIXED, seed=11)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model)
        first = run_patched(patched, few)
        assert relative_error(first, run_plain(model, few)) <= TOLERANCE, way
        assert relative_error(run_patched(patched, many), run_plain(model, many)) <= TOLERANCE, way
        assert all(torch.equal(one, other) for one, other in zip(run_patched(patched, few), first, strict=True)), way


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_pass_that_fails_half_way_leaves_no_trace(way: Way) -> None:
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


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_repeated_text_tokens(name: str) -> None:
    """What SD3 feeds without T5: many equal tokens at the end, given once with their number."""
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


# The given model


@pytest.mark.parametrize("name", MODELS)
def test_swap_can_be_undone(name: str) -> None:
    model = MODELS[name](seed=14)
    rows = draw_rows(model, [(16, 16), (8, 16)], seed=14)
    modules, state, expected = modules_of(model), list(model.state_dict()), run_plain(model, rows)
    swap = Swap(model, PatchContext(Alternation()))
    assert modules_of(model) != modules
    with pytest.raises(AssertionError):
        run_plain(model, rows)
    swap.undo()
    assert modules_of(model) == modules
    assert list(model.state_dict()) == state
    assert all(torch.equal(*pair) for pair in zip(run_plain(model, rows), expected, strict=True))
    swap.undo()  # nothing is left to undo
    assert modules_of(model) == modules


@pytest.mark.parametrize("name", SOME)
def test_given_model_is_left_alone_and_its_weights_are_shared(name: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sd15", ["conv_in.bias", "time_embedding.linear_1.weight", "down_blocks.1.resnets.0.norm1.bias"]),
        ("sd15", ["mid_block.attentions.0.proj_in.weight", "up_blocks.1.upsamplers.0.conv.bias", "conv_out.bias"]),
        ("sd3", ["pos_embed.proj.weight", "transformer_blocks.1.attn.to_out.0.bias", "norm_out.linear.weight"]),
    ],
)
def test_changed_weights_are_seen(name: str, changed: list[str]) -> None:
    """But for those that are laid out anew at first use: of 3 x 3 convolutions, and of queries, keys and values."""
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
def test_level_of_a_convolution_is_known_by_its_name(name: str) -> None:
    model = model_of(name)
    for way in ways_for(name, MIXED, [Way("image", None, "mixed"), Way("patch", 8, "mixed")]):
        patched = way.build(model)
        run_patched(patched, draw_rows(model, MIXED, seed=17))
        assert isinstance(patched.context.choose, Alternation)
        found = {(id(conv), level) for conv, level in patched.context.choose.chosen}
        convs = {name: conv for name, conv in patched.swap.convs.items() if not conv.is_pointwise}
        assert found == {(id(conv), unet_level(name, patched.num_levels)) for name, conv in convs.items()}
        assert {id(conv) for conv, _ in patched.convolutions} <= {id(conv) for conv in convs.values()}


@pytest.mark.parametrize(
    ("build", "num_per_resnet", "num_outside"), [(sdxl_unet, 2, 1), (scale_shift_unet, 1, 1), (gelu_unet, 0, 0)]
)
def test_norms_are_fused_where_nothing_but_silu_follows(
    build: Callable[..., Any], num_per_resnet: int, num_outside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same either way, so only the calls tell."""
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


# Other dtypes and kernels


@pytest.mark.parametrize("name", [*SOME, *BUNDLED])
def test_bfloat16_is_as_accurate_as_plain(name: str) -> None:
    low = nn.Module.to(copy.deepcopy(model_of(name)), torch.bfloat16)
    # The same weights and inputs, so that the errors are those of the arithmetic alone.
    high = copy.deepcopy(low).float()
    rows = [to_dtype(row, torch.bfloat16) for row in draw_rows(low, MIXED, seed=19)]
    exact = run_plain(high, [to_dtype(row, torch.float32) for row in rows])
    allowed = 1.5 * rms_error(run_plain(low, rows), exact)
    assert 0.001 < allowed < 0.1
    for way in ways_for(name, MIXED, FEW_WAYS):
        found = run_patched(way.build(low), rows)
        assert {one.dtype for one in found} == {torch.bfloat16}
        assert rms_error(found, exact) <= allowed, way


def test_choice_of_kernels_reaches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are the same either way, so only the calls tell."""
    asked: dict[str, set[str]] = {}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, kernels: str = "none", **kwargs: Any) -> Any:
            asked.setdefault(original.__name__, set()).add(kernels)
            return original(*args, kernels="torch", **kwargs)

        return run

    names = {
        "halo_gather",
        "group_norm_stats",
        "group_norm_apply",
        "group_norm_silu_stitch",
        "patch_split",
        "patch_join",
    }
    for module in (leaves, packing):
        for name in names & vars(module).keys():
            monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    model, rows = triton_case()
    assert (
        relative_error(
            run_patched(Way("patch", None, "stitch").build(model, kernels="triton"), rows), run_plain(model, rows)
        )
        <= TOLERANCE
    )
    assert asked == {name: {"triton"} for name in names}


def test_triton_kernels_in_a_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model, rows = triton_case()
    assert len({row.size for row in rows}) > 1
    # Asked for Triton, the kernels run nowhere else.
    with pytest.raises(ValueError, match="Triton kernels need CUDA"):
        patched_models.run_triton_case()
    # The interpreter must be chosen before diffusers imports triton: in a process of its own.
    path = tmp_path / "found.pt"
    command = [sys.executable, str(patched_models.__file__), str(path)]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)
    assert relative_error(torch.load(path), run_plain(model, rows)) <= TOLERANCE


# Refusals


class Louder(nn.SiLU):
    """A module that the patch engine cannot know."""


class Processor(AttnProcessor2_0):
    """A processor that it cannot know."""


class Subclass(patched_models.UNet2DConditionModel):
    """A model whose forward it cannot know."""


def _with(name: str, module: nn.Module, **changes: Any) -> nn.Module:
    model = small_unet(**changes)
    model.set_submodule(name, module)
    return model


def _after(method: str, *arguments: Any, build: Callable[..., Any] = small_unet) -> nn.Module:
    model = build()
    getattr(model, method)(*arguments)
    return model


_SIMPLE: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "UpBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
}
_RESNET: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
}
_FIRST_RESNET = "down_blocks.0.resnets.0"
_TRANSFORMER = "down_blocks.1.attentions.0"

REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "model": (lambda: nn.Linear(2, 2), "Linear is not one of UNet2DConditionModel, SD3Transformer2DModel"),
    "subclass": (lambda: Subclass(**small_unet().config), "Subclass is not one of UNet2DConditionModel, SD3"),
    "module": (lambda: _with("conv_act", Louder()), r"module conv_act \(Louder\) is not known to work on patches"),
    "activation": (lambda: small_unet(act_fn="mish"), r"module \S+ \(Mish\) is not known"),
    "mid block": (lambda: small_unet(mid_block_type="UNetMidBlock2D"), r"module mid_block \(UNetMidBlock2D\) is not"),
    "simple cross": (
        lambda: small_unet(**_SIMPLE),
        r"module down_blocks.1 \(SimpleCrossAttnDownBlock2D\) is not known",
    ),
    "resnet down": (lambda: small_unet(**_RESNET), r"module down_blocks.0 \(ResnetDownsampleBlock2D\) is not known"),
    "gligen": (lambda: small_unet(attention_type="gated"), r"\(GatedSelfAttentionDense\) is not known"),
    "dual cross": (lambda: small_unet(dual_cross_attention=True), r"\(DualTransformer2DModel\) is not known"),
    "fourier": (lambda: small_unet(time_embedding_type="fourier"), r"time_proj \(GaussianFourierProjection\) is not"),
    "kernel": (lambda: small_unet(conv_in_kernel=5), r"module conv_in \(Conv2d\) is neither .*kernel_size=\(5, 5\)"),
    "dilation": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, dilation=2)),
        r"module conv_in \(Conv2d\) is neither .*dilation=\(2, 2\)",
    ),
    "groups": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, groups=2)),
        r"module conv_in \(Conv2d\) is neither .*groups=2",
    ),
    "circular": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")),
        r"module conv_in \(Conv2d\) is neither .*padding_mode=circular",
    ),
    "stride": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, stride=3)),
        r"module conv_in \(Conv2d\) is neither .*stride=\(3, 3\)",
    ),
    "padding": (
        lambda: small_unet(downsample_padding=0),
        r"module down_blocks.0.downsamplers.0.conv \(Conv2d\) is neither .*stride=\(2, 2\)",
    ),
    "resnet up": (
        lambda: _with(_FIRST_RESNET, ResnetBlock2D(in_channels=8, temb_channels=32, groups=2, up=True)),
        rf"module {_FIRST_RESNET} \(ResnetBlock2D\) changes the resolution",
    ),
    "processor": (
        lambda: _after("set_attn_processor", Processor()),
        rf"module {_TRANSFORMER}.transformer_blocks.0.attn1 \(Attention\) has the processor Processor",
    ),
    "sliced": (lambda: _after("set_attention_slice", "max"), r"\(Attention\) has the processor SlicedAttnProcessor"),
    "fused": (
        lambda: _after("fuse_qkv_projections"),
        r"attn1 \(Attention\) has fused projections .* first \(unfuse_qkv_projections\)",
    ),
    "fused sd3": (
        lambda: _after("fuse_qkv_projections", build=sd3_transformer),
        r"module transformer_blocks.0.attn \(Attention\) has fused projections .*unfuse_qkv_projections",
    ),
    "cross only": (
        lambda: small_unet(only_cross_attention=True),
        r"attn1 \(Attention\) attends to the text .*only_cross_attention",
    ),
    "freeu": (
        lambda: _after("enable_freeu", 0.9, 0.2, 1.2, 1.4),
        r"module up_blocks.0 \(CrossAttnUpBlock2D\) uses FreeU, .*disable_freeu",
    ),
    "classes": (lambda: small_unet(num_class_embeds=10), r"module class_embedding \(Embedding\) is not known"),
    "class embedding": (
        lambda: small_unet(class_embed_type="timestep"),
        r"module UNet2DConditionModel \(UNet2DConditionModel\) has conditions besides timestep, text",
    ),
    "text projection": (
        lambda: small_unet(encoder_hid_dim_type="text_proj", encoder_hid_dim=8),
        r"\(UNet2DConditionModel\) has encoder_hid_dim_type text_proj",
    ),
    "positions": (
        lambda: sd3_transformer(pos_embed_max_size=None),
        r"module pos_embed \(PatchEmbed\) embeds positions in another way than SD3",
    ),
}


@pytest.mark.parametrize("problem", REFUSALS)
def test_model_that_patches_cannot_run_is_refused(problem: str) -> None:
    build, pattern = REFUSALS[problem]
    model = build()
    modules = modules_of(model)
    with pytest.raises(UsageError, match=pattern) as refusal:
        PatchedModel(model)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("the patch engine cannot run this model: ")
    assert str(refusal.value).endswith("; use --engine plain")
    with pytest.raises(UsageError, match=pattern):
        Swap(model, PatchContext(Alternation()))
    assert modules_of(model) == modules


@pytest.mark.parametrize(
    ("build", "on", "off"),
    [
        (small_unet, ("fuse_qkv_projections",), "unfuse_qkv_projections"),
        (sd3_transformer, ("fuse_qkv_projections",), "unfuse_qkv_projections"),
        (small_unet, ("enable_freeu", 0.9, 0.2, 1.2, 1.4), "disable_freeu"),
    ],
)
def test_advice_of_a_refusal_helps(build: Callable[..., Any], on: tuple[Any, ...], off: str) -> None:
    model = build()
    rows = draw_rows(model, MIXED, seed=20)
    getattr(model, on[0])(*on[1:])
    getattr(model, off)()
    assert relative_error(run_patched(IMAGE.build(model), rows), run_plain(build(), rows)) <= TOLERANCE


@pytest.mark.parametrize(
    ("build", "patch_size", "message"),
    [
        (sdxl_unet, 12, r"patch size 12 does not fit: .*\(common divisor 8\).*multiple of 4 .*allowed here: 4, 8"),
        (sdxl_unet, 2, r"patch size 2 does not fit: .*multiple of 4 for this model; allowed here: 4, 8"),
        (sdxl_unet, 16, r"patch size 16 does not fit: .*allowed here: 4, 8"),
        (sd15_unet, 4, r"patch size 4 does not fit: .*multiple of 8 for this model; allowed here: 8"),
        (sd3_transformer, 1, r"patch size 1 does not fit: .*multiple of 2 for this model; allowed here: 2, 4, 8"),
    ],
)
def test_patch_size_that_does_not_fit_is_refused(build: Callable[..., Any], patch_size: int, message: str) -> None:
    patched = PatchedModel(build(), order="patch", patch_size=patch_size)
    with pytest.raises(UsageError, match=message) as refusal:
        patched.pack([(16, 16), (24, 24)])
    assert "\n" not in str(refusal.value)


def test_text_mask_is_refused() -> None:
    model = model_of("sdxl")
    rows = draw_rows(model, [(8, 8)], seed=21)
    patched = IMAGE.build(model)
    run_patched(patched, rows)
    masked = [replace(rows[0], conditions=rows[0].conditions | {"encoder_attention_mask": torch.ones(7)})]
    with pytest.raises(ValueError, match="does not support the attention arguments attention_mask"):
        call_patched(patched, masked)
