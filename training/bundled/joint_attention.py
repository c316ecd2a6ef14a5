"""Joint attention of SD3 in which one text token stands for many equal ones.

SD3 without its T5 encoder receives 256 zero tokens as the third part of its text. They are equal when they enter a
block, and text tokens have no position, so they are equal when they leave it. A single one with weight 256 in the
softmax (log 256 added to its logit) has exactly the effect of all 256 on every other token, at a tenth of the cost of
training with them.
"""

import math

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn import functional as F


class RepeatedTokenJointAttention:
    """Attention processor for SD3's joint blocks: the last text token counts `num_repeats` times.

    Args:
        num_repeats: number of equal tokens that the last one stands for, at least 1.
    """

    def __init__(self, num_repeats: int) -> None:
        self.num_repeats = num_repeats

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Map hidden_states [n, image tokens, c] and encoder_hidden_states [n, text tokens, c] to the same shapes."""
        assert encoder_hidden_states is not None
        assert attn.norm_q is None, "models with query norms are not trained here"

        def heads(states: Tensor) -> Tensor:
            return states.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        text = encoder_hidden_states
        query = torch.cat([heads(attn.to_q(hidden_states)), heads(attn.add_q_proj(text))], 2)  # type: ignore[operator]
        key = torch.cat([heads(attn.to_k(hidden_states)), heads(attn.add_k_proj(text))], 2)  # type: ignore[operator]
        value = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))], 2)  # type: ignore[operator]
        bias = torch.zeros(1, 1, 1, key.shape[2], dtype=query.dtype, device=query.device)
        bias[..., -1] = math.log(self.num_repeats)
        joined = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        joined = joined.transpose(1, 2).flatten(2).to(query.dtype)
        num_pixels = hidden_states.shape[1]
        image, text = joined[:, :num_pixels], joined[:, num_pixels:]
        if not attn.context_pre_only:
            text = attn.to_add_out(text)  # type: ignore[operator]
        assert attn.to_out is not None
        return attn.to_out[1](attn.to_out[0](image)), text
