"""Computation and communication of a loaded model by level: from a U-Net's configuration or a transformer's layers."""

import re
from collections.abc import Iterator
from typing import Any

from ..families import transformer_of
from ..families.table import entry_of, token_side
from ..families.transformer import Blocks
from .levels import Levels

_OF_TEXT = re.compile(r"context_(embedder|refiner)|ff_context|caption_|cap_embedder|\.add_|to_add_out|txt_(in|mlp)")
"""Names of a transformer's layers that run once for each text token."""
_OF_ROW = re.compile(r"^(time|t_embedder|distilled)|norm(?!_out\.linear_2)|_mod|adaln", re.IGNORECASE)
"""Names of other layers that run once for each row. Lumina 2's `norm_out` holds its last layer, too."""


def levels_of(model: Any) -> Levels:
    """Count the levels of a model that can run in strips, with weights or without.

    The count of a transformer is exact but for few of its layers: of Chroma the network that modulates, of AuraFlow the
    register tokens, of Lumina 2 and Z-Image the attention of refined text, and pads.
    """
    transformer = transformer_of(model)
    if transformer is None:
        return Levels.of(model.config)
    levels, text_once = Levels(), set[str]()
    level, stream = levels.by_factor[unit_of(model)], transformer.single
    for blocks in transformer.lists:
        for name, attention in attentions_of(model, blocks):
            is_parallel = not hasattr(attention, "to_k")
            width = attention.inner_dim if is_parallel else attention.to_q.out_features
            key_values = 2 * (width if is_parallel else attention.to_k.out_features)
            if attends_to_text_only(attention):
                text_once |= {f"{name}.to_k", f"{name}.to_v"}
                level.per_text_pair += 2 * width
                continue
            level.per_pair += 2 * width
            level.key_values += key_values
            if blocks is stream or getattr(attention, "add_k_proj", None) is not None:
                level.per_text_pair += 2 * width
                levels.per_text_query += 2 * width
                levels.text_key_values += key_values
                # SD3's last block leaves the text as it is.
                levels.per_idle_query += 2 * width * bool(getattr(attention, "context_pre_only", False))
    for name, module in model.named_modules():
        if type(module).__name__ not in ("Linear", "Conv2d"):
            continue
        macs = module.weight.numel()
        if name in text_once or (text_once and _OF_TEXT.search(name)):
            levels.per_text_once += macs
        elif _OF_TEXT.search(name):
            levels.per_text += macs
        elif _OF_ROW.search(name):
            levels.per_row += macs
        else:
            level.per_pixel += macs
            levels.per_text += macs if stream is not None and name.startswith(f"{stream.name}.") else 0
    return levels


def unit_of(model: Any) -> int:
    """Return the number of rows of latents that must stay together: those of one row at the model's deepest level."""
    if transformer_of(model) is None:
        return 2 ** (len(model.down_blocks) - 1)
    return token_side(entry_of(type(model).__name__), model.config)


def attentions_of(model: Any, blocks: Blocks) -> Iterator[tuple[str, Any]]:
    """Iterate over the attention modules of a list of blocks, with their names in the model."""
    for number, block in enumerate(getattr(model, blocks.name)):
        for name in blocks.attention:
            if (attention := getattr(block, name, None)) is not None:
                yield f"{blocks.name}.{number}.{name}", attention


def attends_to_text_only(attention: Any) -> bool:
    """Return whether image tokens attend to the text, and not to each other."""
    return getattr(attention, "is_cross_attention", False) and getattr(attention, "add_k_proj", None) is None
