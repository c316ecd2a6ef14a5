"""MACs of unmodified diffusers models, counted by torch on the meta device: real shapes, no weights, no arithmetic."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ...data.errors import UsageError
from ...serving.core.denoiser import denoise
from ...serving.core.swap import check_model
from ...serving.families import transformer_of
from ...serving.parallel.cost import Call

_CLASSES = ("UNet2DConditionModel", "SD3Transformer2DModel")
_TEXT_WIDTHS = ("caption_channels", "joint_attention_dim", "cross_attention_dim")
"""Names of the width of text in the configurations of models, the first that a model has."""


def meta_model(config: Mapping[str, Any], source: str, option: str = "--config") -> Any:
    """Return the model of a configuration, on the meta device. Errors name it as the value `source` of an option.

    Raises:
        UsageError: the configuration is not that of a model that can be split into strips.
    """
    name = config.get("_class_name")
    if name not in _CLASSES:
        raise UsageError(f"{option} {source} is of {name or 'no class'}, but it must be of {' or '.join(_CLASSES)}")
    try:
        with torch.device("meta"):
            model = getattr(diffusers, name).from_config(dict(config)).eval()
    except Exception as error:  # diffusers hardly validates a user's file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{option} {source}: diffusers makes no {name} of it: {reason}") from error
    check_model(model, "--parallel", f"give another {option}", _CLASSES)
    return model


@torch.inference_mode()
def counted_macs(model: Any, call: Call) -> int:
    """Return the MACs of one call.

    On the meta device attention runs as two matrix products, which the counter counts; on a CPU it is one fused
    operation, which the counter does not count.
    """
    with FlopCounterMode(display=False) as counter:
        run_meta(model, call)
    return counter.get_total_flops() // 2


def reads_values(model: Any) -> bool:
    """Whether the forward of a model reads values, such as which text tokens are valid, to make its shapes."""
    transformer = transformer_of(model)
    return transformer is not None and transformer.layout in ("one row", "padded")


def run_meta(model: Any, call: Call, channels: int | None = None) -> None:
    """Run one call on the meta device, in the dtype of the model.

    Args:
        model: denoising model whose forward reads no values of its inputs, see `reads_values`.
        call: the call, with latents of its height and width.
        channels: channels of latents; None if the model takes them as they are.
    """
    rows, config = call.rows, model.config

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, device="meta", dtype=model.dtype)

    width = next(config[name] for name in _TEXT_WIDTHS if config.get(name))
    text = empty(call.text_length, width if isinstance(width, int) else width[0])
    given: dict[str, Any] = {"encoder_hidden_states": text}
    if config.get("pooled_projection_dim"):
        given["pooled_projections"] = empty(config["pooled_projection_dim"])
    if config.get("guidance_embeds"):
        given["guidance"] = empty()
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        given["added_cond_kwargs"] = {"text_embeds": empty(pooled), "time_ids": empty(6)}
    denoise(model, empty(channels or config["in_channels"], call.height, call.width), empty(), given)


class WholeAttention(TorchFunctionMode):
    """Attention as one operator without scores, as fused kernels run it; on the meta device torch runs it in parts.

    Results have no values. `on_attention` is called with the queries, keys and values of each.
    """

    def __init__(self, on_attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._on_attention = on_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        query, key, value = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        if self._on_attention is not None:
            self._on_attention(query, key, value)
        return torch.empty_like(query)
