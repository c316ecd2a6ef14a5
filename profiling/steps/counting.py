"""MACs of unmodified diffusers models, counted by torch on the meta device: real shapes, no weights, no arithmetic."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ...data.errors import UsageError
from ...serving.core.swap import check_model
from ...serving.parallel.cost import Call

_CLASSES = ("UNet2DConditionModel", "SD3Transformer2DModel")


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


def run_meta(model: Any, call: Call) -> None:
    """Run one call on the meta device, in the dtype of the model."""
    rows, config = call.rows, model.config

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=model.dtype)

    given: dict[str, Any] = {"timestep": empty(rows)}
    if "down_block_types" in config:
        width = config["cross_attention_dim"]
        given["encoder_hidden_states"] = empty(rows, call.text_length, width if isinstance(width, int) else width[0])
        if config["addition_embed_type"] is not None:
            ids = 6 * config["addition_time_embed_dim"]
            pooled = empty(rows, config["projection_class_embeddings_input_dim"] - ids)
            given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": empty(rows, 6)}
    else:
        given["encoder_hidden_states"] = empty(rows, call.text_length, config["joint_attention_dim"])
        given["pooled_projections"] = empty(rows, config["pooled_projection_dim"])
    model(empty(rows, config["in_channels"], call.height, call.width), **given)


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
