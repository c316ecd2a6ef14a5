"""Parts of attention that do not depend on the layout of tokens: fused projections, heads, norms, rotary angles."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from ...kernels.launch import use_triton
from ...kernels.qk_norm_rotary import QkNorms, qk_norm_rotary
from .adapters import adapted_of
from .derived import Derived
from .float8 import Float8Linear

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each (tokens, width of a head)."""


class FusedLinear(nn.Module):
    """Several linear layers on the same input, run as one.

    They are joined at first use, unless their weights are tensors of torchao: then each layer runs separately. Adapters
    change each layer's part of the output.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self._layers = layers
        # A quantised weight is a tensor that is made of others.
        self._is_quantised = hasattr(layers[0].weight, "__tensor_flatten__")
        self._joined = Derived(self._join)
        ends = list(accumulate((layer.out_features for layer in layers), initial=0))
        found = zip(map(adapted_of, layers), ends, ends[1:], strict=False)
        self._adapted = [(adapted, *place) for adapted, *place in found if adapted is not None]

    def _join(self) -> Callable[[Tensor], Tensor]:
        float8 = [layer for layer in self._layers if isinstance(layer, Float8Linear)]
        if len(float8) == len(self._layers):
            return Float8Linear.joined(float8)
        has_bias = self._layers[0].bias is not None
        bias = _together([layer.bias for layer in self._layers]) if has_bias else None
        return partial(F.linear, weight=_together([layer.weight for layer in self._layers]), bias=bias)

    def fuse(self) -> None:
        """Join the layers now, rather than at first use."""
        if not self._is_quantised:
            self._joined.of(self._layers[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        if self._is_quantised:
            return torch.cat([layer(x) for layer in self._layers], -1)
        out = self._joined.of(self._layers[0].weight)(x)
        for adapted, start, end in self._adapted:
            adapted.add(x, out[..., start:end])
        return out


def _together(parts: list[Tensor]) -> Tensor:
    # A parameter, as the compiler makes the sizes of other tensors symbols.
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def constant(number: int) -> Callable[[], int]:
    """Return a function that returns the number.

    The compiler treats a default value as a constant, while an integer attribute of a module would become a symbol
    (`core.compiled`).
    """

    def given(number: int = number) -> int:
        return number

    return given


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """Attention of [rows, tokens, heads, width] -> the same, contiguous if torch returns it so.

    Scores are multiplied by `scale`; None for 1 / sqrt(width).
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale).transpose(1, 2)


_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_WIDTHS = {*range(8, 97, 8), 160}
"""Widths of heads for which Flash attention within a recording is faster than an interruption of it."""


def takes_sequences(query: Tensor, bias: Tensor | None) -> bool:
    """Return whether `attend_sequences` should compute attention from queries [tokens, heads, width].

    It is one call of Flash attention in a recorded pass. Otherwise `attend` runs once per resolution, and a recorded
    pass is interrupted for it.

    * Bias: Flash attention has none.
    * Dtype: on CUDA it takes float16 and bfloat16.
    * Width of heads: it takes multiples of 8. With heads of 64, torch's fastest attention on an H100 (cuDNN, 408
      TFLOP/s for 4096 tokens) is a quarter faster than Flash (321), less than an interruption costs. With heads of 128
      it is faster by two thirds (609 against 368), and tokens are many. Heads of 160 are those of the deepest levels
      of Stable Diffusion 1.x: with 256 tokens for an image of 512 px, launches count and kernels do not.
    """
    is_allowed = query.device.type != "cuda" or query.dtype in _FLASH_DTYPES
    return bias is None and is_allowed and query.shape[-1] in _FLASH_WIDTHS


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None = None,
) -> Tensor:
    """Attention within sequences of packed tokens: [tokens, heads, width] -> the same.

    The result is zero for sequences without keys.

    Args:
        query, key, value: tokens of all sequences.
        offsets: (sequences + 1,) where the queries of each sequence begin and the last ones end, int32; then the same
            of its keys.
        longest: bounds for the number of queries and keys of a sequence.
        scale: see `attend`.
    """
    flash = varlen_attn if query.device.type == "cuda" else _attend_masked
    found = flash(query, key, value, *offsets, *longest, scale=scale)
    assert isinstance(found, Tensor)
    return found


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """The same as `varlen_attn`, on any device: each query scores the keys of all sequences. Reads no offset."""

    def sequences(tokens: Tensor, offsets: Tensor) -> Tensor:
        places = torch.arange(len(tokens), dtype=offsets.dtype, device=offsets.device)
        return torch.bucketize(places, offsets[1:], right=True)

    mask = sequences(query, query_offsets)[:, None] == sequences(key, key_offsets)
    return attend(query[None], key[None], value[None], scale, mask)[0]


def heads_of(packed: Tensor, count: int, heads: int) -> Tensor:
    """[..., count * heads * width] -> [..., count, heads, width]."""
    return packed.view(*packed.shape[:-1], count, heads, -1)


def grouped_heads_of(packed: Tensor, heads: int, sharing: int) -> Tensor:
    """Queries of `heads` heads, then keys and values that `sharing` of them share -> [..., 3, heads, width]."""
    if sharing == 1:
        return heads_of(packed, 3, heads)
    parts = packed.unflatten(-1, (heads + 2 * heads // sharing, -1))
    query, keys_values = parts.split([heads, 2 * heads // sharing], -2)
    return torch.cat([query, keys_values.repeat_interleave(sharing, -2)], -2).unflatten(-2, (3, heads))


def normed(
    qkv: Tensor,
    norm_q: nn.Module | None,
    norm_k: nn.Module | None,
    rotary: Rotary | None = None,
    *,
    kernels: str = "auto",
) -> Tensor:
    """Normalise queries and keys [..., 3, heads, width] if the model has norms for them.

    With `rotary`, also rotate each token's queries and keys by its angles, for [tokens, 3, heads, width]. With Triton's
    kernels, this may change `qkv` in place.
    """
    if norm_q is None and norm_k is None and rotary is None:
        return qkv
    if not torch.compiler.is_compiling() and use_triton(kernels, qkv.device):
        norms = None if norm_q is None and norm_k is None else _qk_norms(qkv, norm_q, norm_k)
        is_float32 = rotary is None or all(each.dtype == torch.float32 for each in rotary)
        if is_float32 and (norms is not None or norm_q is norm_k is None):
            tokens = qkv.flatten(0, -4)  # a copy, if the tokens of each row are a part of a stream
            return qk_norm_rotary(tokens, norms, rotary, kernels=kernels).view(qkv.shape)
    query, key, value = qkv.unbind(-3)
    query = query if norm_q is None else norm_q(query)
    key = key if norm_k is None else norm_k(key)
    if rotary is not None:
        turns: Any = rotary  # diffusers annotates a tuple of one
        query, key = (apply_rotary_emb(each[None], turns, sequence_dim=1)[0] for each in (query, key))
    return torch.stack([query, key, value], -3)


def _qk_norms(qkv: Tensor, norm_q: Any, norm_k: Any) -> QkNorms | None:
    """Return two norms as `qk_norm_rotary` computes them; None if it does not."""
    kinds, norms = {type(norm_q), type(norm_k)}, (norm_q, norm_k)
    if kinds not in ({RMSNorm}, {nn.RMSNorm}) or any(getattr(norm, "bias", None) is not None for norm in norms):
        return None
    weights = norm_q.weight, norm_k.weight
    epsilons = {torch.finfo(qkv.dtype).eps if norm.eps is None else norm.eps for norm in norms}
    fits = [each is not None and (each.shape, each.dtype) == (qkv.shape[-1:], qkv.dtype) for each in weights]
    return QkNorms(*weights, epsilons.pop(), kinds == {RMSNorm}) if all(fits) and len(epsilons) == 1 else None


def check_unused(arguments: dict[str, object]) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"no engine but plain supports the attention arguments {', '.join(given)}")
