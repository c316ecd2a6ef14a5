"""kernels/launch.py: the choice between torch and Triton, and compilation of all Triton kernels for a real GPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.kernels.group_norm_stats import merge_stats_kernel, part_stats_kernel
from patchedserve.kernels.group_norm_stitch import group_norm_stitch_kernel
from patchedserve.kernels.halo import halo_gather, halo_gather_kernel
from patchedserve.kernels.launch import COMPILE_OPTIONS, TritonKernel, has_fast_bfloat16, power_of_two, tile, use_triton
from patchedserve.kernels.patch import patch_move_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_kernel_choice() -> None:
    assert not use_triton("auto", CPU)
    assert not use_triton("torch", CPU)
    assert not use_triton("torch", CUDA)
    with pytest.raises(ValueError, match="kernels is 'cuda', but it must be one of auto, torch, triton"):
        use_triton("cuda", CPU)


def test_bfloat16_is_fast_only_with_cpu_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for can, is_fast in (
        ({}, False),
        ({"avx512_f": True}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda can=can: can)
        assert has_fast_bfloat16(CPU) is is_fast


def test_kernel_choice_with_triton() -> None:
    pytest.importorskip("triton")
    assert use_triton("auto", CUDA)
    assert use_triton("triton", CUDA)
    with pytest.raises(ValueError, match="kernels is 'triton', but the tensors are on cpu"):
        use_triton("triton", CPU)


def test_kernel_choice_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    x, neighbours = torch.zeros(1, 1, 2, 2), torch.full((1, 8), -1)
    assert halo_gather(x, neighbours).shape == (1, 1, 4, 4)
    with pytest.raises(ModuleNotFoundError, match=r"triton is not installed; install it with: pip install 'psctl\[gpu"):
        halo_gather(x, neighbours, kernels="triton")
    with pytest.raises(ModuleNotFoundError, match="triton is not installed"):
        use_triton("auto", CUDA)


@pytest.mark.slow
def test_kernels_import_without_triton(repository: Path) -> None:
    names = ", ".join(path.stem for path in (repository / "kernels").glob("*.py") if path.stem != "__init__")
    code = f"import sys; sys.modules['triton'] = None; from patchedserve.kernels import {names}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tiles_are_powers_of_two_that_fit() -> None:
    assert [power_of_two(count) for count in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert tile(100, 320) == (64, 64)
    assert tile(100, 640) == (32, 128)
    assert tile(1000, 1920, 1024) == (8, 128)
    for channels in (320, 640, 960, 1280, 1920, 2560):
        assert channels % tile(64, channels)[1] == 0, "lanes of SDXL's channels are idle"
    assert tile(1, 1) == (1, 1)
    assert tile(9, 4) == (16, 4)


_STRIDES = dict.fromkeys(("stride_patch", "stride_channel", "stride_row", "stride_col"), "i32")
_SHAPE = {"height": 8, "width": 8, "block_pixels": 64, "block_channels": 64}
_STITCH: dict[str, str] = {
    **dict.fromkeys(("mean", "rstd"), "*fp32"),
    **dict.fromkeys(("request_index", "neighbours"), "*i64"),
    **dict.fromkeys(("num_channels", "num_groups"), "i32"),
    **_STRIDES,
}


def _of(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


@pytest.mark.product(most=3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("kernel", "pointers", "others", "constants"),
    [
        (
            halo_gather_kernel,
            ("x", "out"),
            {"neighbours": "*i64", "num_channels": "i32", **_STRIDES},
            {**_SHAPE, "halo": 1},
        ),
        (
            patch_move_kernel,
            ("images", "patches"),
            {
                **dict.fromkeys(("num_channels", "rows", "cols"), "i32"),
                **{
                    f"{side}_{name}": "i32"
                    for side in ("image", "patch")
                    for name in ("stride", *(f"stride_{axis}" for axis in ("channel", "row", "col")))
                },
            },
            {**_SHAPE, "is_join": False},
        ),
        (
            part_stats_kernel,
            ("x",),
            {"means": "*fp32", "squares": "*fp32", "num_channels": "i32", **_STRIDES},
            {**_SHAPE, "block_channels": 16},
        ),
        (group_norm_stitch_kernel, ("x", "out", "weight", "bias"), _STITCH, {**_SHAPE, "halo": 1, "activation": True}),
        (group_norm_stitch_kernel, ("x", "out", "weight", "bias"), _STITCH, {**_SHAPE, "halo": 0, "activation": False}),
    ],
    ids=["halo_gather", "patch_move", "part_stats", "group_norm_stitch", "group_norm_apply"],
)
def test_compiles(
    kernel: TritonKernel,
    pointers: tuple[str, ...],
    others: dict[str, str],
    constants: dict[str, Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter accepts code that the compiler rejects, and the compiler needs no GPU."""
    _compile(kernel, _of(dtype, *pointers) | others, constants, tmp_path, monkeypatch)


@pytest.mark.slow
def test_merge_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pointers = _of("fp32", "means", "squares", "mean", "rstd") | {"request_index": "*i64"}
    counts = dict.fromkeys(("num_parts", "parts_each", "group_channels", "part_pixels", "last_pixels"), "i32")
    blocks = {"block_parts": 64, "block_channels": 16}
    _compile(merge_stats_kernel, pointers | counts | {"eps": "fp32"}, blocks, tmp_path, monkeypatch)


def _compile(
    kernel: TritonKernel,
    types: dict[str, str],
    constants: dict[str, Any],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compile a kernel to machine code for an A100."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    names = kernel.jit.arg_names
    assert set(types) | set(constants) == set(names)
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel.jit, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=dict(COMPILE_OPTIONS))
    assert len(compiled.asm["cubin"]) > 0
