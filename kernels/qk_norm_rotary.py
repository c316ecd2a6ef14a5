"""RMSNorm and rotary embedding of queries and keys in one kernel, which reads and writes each of them once.

    q = q * rsqrt(average of q^2 over a head + eps) * weight                    if there is a norm
    q[2i], q[2i+1] = q[2i] cos[2i] - q[2i+1] sin[2i], q[2i+1] cos[2i+1] + q[2i] sin[2i+1]    if there are angles

and the same for keys. Torch's own operators move the queries and keys about ten times. Values are rounded where
`RMSNorm`, diffusers' or torch's, and `apply_rotary_emb` round them. Sources: Zhang and Sennrich, Root Mean Square Layer
Normalization (2019); Su et al., RoFormer (2021), section 3.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .launch import TritonKernel, ceil_div, check_floating, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
"""Elements of one program."""


Rotary = tuple[torch.Tensor, torch.Tensor]


class QkNorms(NamedTuple):
    """RMSNorms of queries and keys: their weights (width,) in the dtype of the values, and what they share.

    `eps` is added to the mean square. `rounds_twice`: whether they round before the weight and after it, as diffusers'
    do; torch's round after it only.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    rounds_twice: bool


def qk_norm_rotary(
    qkv: torch.Tensor,
    norms: QkNorms | None,
    rotary: Rotary | None,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """Normalise and rotate queries and keys in place; return the tensor that was given.

    Args:
        qkv: (tokens, 3, heads, width) queries, keys and values in float32, float16 or bfloat16; the values stay as they
            are. Tokens may have any stride, but each must be contiguous.
        norms: norms of queries and keys; None for none.
        rotary: cosines and sines, (tokens, width) float32, of pairs of neighbouring elements; None for no rotation.
        kernels: one of `KERNELS`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or `kernels` cannot be used for this tensor.
    """
    check_floating(qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3 or qkv.shape[3] % 2 or not _is_contiguous(qkv):
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} and strides {qkv.stride()}, but it must be (tokens, 3, heads, width), "
            "of an even width and contiguous for each token"
        )
    for name, given, shape, dtype in (
        ("a weight", norms[:2] if norms else (), qkv.shape[3:], qkv.dtype),
        ("rotary", rotary or (), (qkv.shape[0], qkv.shape[3]), torch.float32),
    ):
        for each in given:
            if each.shape != shape or each.dtype != dtype or each.device != qkv.device:
                raise ValueError(
                    f"{name} is {tuple(each.shape)} {each.dtype} on {each.device}, "
                    f"but it must be {tuple(shape)} {dtype} on {qkv.device}"
                )
    if use_triton(kernels, qkv.device):
        _qk_norm_rotary_triton(qkv, norms, rotary)
    else:
        qk_norm_rotary_torch(qkv, norms, rotary)
    return qkv


def _is_contiguous(qkv: torch.Tensor) -> bool:
    """Return whether each token's memory is contiguous. The stride of a dimension of one element does not matter."""
    return len(qkv) == 0 or qkv[0].is_contiguous()


def qk_norm_rotary_torch(qkv: torch.Tensor, norms: QkNorms | None, rotary: Rotary | None) -> None:
    """Torch reference of `qk_norm_rotary`; arguments are not checked."""
    for place in range(2):
        x = qkv[:, place]
        if norms is not None:
            x = x * (x.float().square().mean(-1, keepdim=True) + norms.eps).rsqrt()
            x = x.to(qkv.dtype) * norms[place] if norms.rounds_twice else (x * norms[place]).to(qkv.dtype)
        if rotary is not None:
            cosines, sines = (each[:, None] for each in rotary)
            first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            x = x.float() * cosines + torch.stack([-second, first], -1).flatten(-2) * sines
        qkv[:, place] = x


@TritonKernel
def qk_norm_rotary_kernel(
    qkv,
    query_weight,
    key_weight,
    cosines,
    sines,
    num_tokens,
    stride_token,
    num_heads,
    eps,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    rounds_twice: tl.constexpr,
    has_rotary: tl.constexpr,
    block_tokens: tl.constexpr,
    block_pairs: tl.constexpr,
):
    """Process one head of some tokens, queries (program 0 of axis 2) or keys (1), as pairs of elements.

    Each program reads only what it writes itself, so that it may write in place.
    """
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    head = tl.program_id(1)
    is_key = tl.program_id(2)
    column = 2 * tl.arange(0, block_pairs)[:, None] + tl.arange(0, 2)[None, :]
    is_column = column < width
    is_token = token < num_tokens
    mask = is_token[:, None, None] & is_column[None, :, :]
    of_head = ((is_key * num_heads + head) * width + column)[None, :, :]
    place = token.to(tl.int64)[:, None, None] * stride_token + of_head
    x = tl.load(qkv + place, mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        square = tl.sum(tl.sum(x * x, 2), 1) / width
        x = x * (1.0 / tl.sqrt_rn(square + eps))[:, None, None]
        if is_key == 0:
            weight = tl.load(query_weight + column, mask=is_column, other=0.0).to(tl.float32)
        else:
            weight = tl.load(key_weight + column, mask=is_column, other=0.0).to(tl.float32)
        if rounds_twice:
            x = x.to(qkv.dtype.element_ty).to(tl.float32)
        x = x * weight[None, :, :]
        x = x.to(qkv.dtype.element_ty).to(tl.float32)
    if has_rotary:
        angle = token.to(tl.int64)[:, None, None] * width + column[None, :, :]
        first, second = tl.split(x)
        first_cosine, second_cosine = tl.split(tl.load(cosines + angle, mask=mask, other=0.0))
        first_sine, second_sine = tl.split(tl.load(sines + angle, mask=mask, other=0.0))
        x = tl.join(
            first * first_cosine - second * first_sine,
            second * second_cosine + first * second_sine,
        )
    tl.store(qkv + place, x.to(qkv.dtype.element_ty), mask=mask)


def _qk_norm_rotary_triton(qkv: torch.Tensor, norms: QkNorms | None, rotary: Rotary | None) -> None:
    num_tokens, _, heads, width = qkv.shape
    block_pairs = power_of_two(width // 2)
    block_tokens = max(1, _TILE // (2 * block_pairs))
    # What is not used may be any tensor.
    none = QkNorms(qkv, qkv, 0.0, rounds_twice=True)
    weights, angles = (
        tuple(each.contiguous() for each in given) for given in ((norms or none)[:2], rotary or none[:2])
    )
    qk_norm_rotary_kernel.launch(
        (ceil_div(num_tokens, block_tokens), heads, 2),
        qkv.device,
        *(qkv, *weights, *angles, num_tokens, qkv.stride(0), heads, (norms or none).eps),
        width=width,
        has_norm=norms is not None,
        rounds_twice=(norms or none).rounds_twice,
        has_rotary=rotary is not None,
        block_tokens=block_tokens,
        block_pairs=block_pairs,
    )
