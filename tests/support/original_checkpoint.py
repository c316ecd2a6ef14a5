"""Single-file checkpoints, as Stable Diffusion was published before diffusers: the mapping of tensor names inverted.

Names follow the original implementation (CompVis' latent diffusion; Stability's generative models for SDXL).
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
_RESNET = {
    "norm1.": "in_layers.0.",
    "conv1.": "in_layers.2.",
    "norm2.": "out_layers.0.",
    "conv2.": "out_layers.3.",
    "time_emb_proj.": "emb_layers.1.",
    "conv_shortcut.": "skip_connection.",
}
_UNET = {
    "conv_in.": "input_blocks.0.0.",
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
    "add_embedding.linear_1.": "label_emb.0.0.",
    "add_embedding.linear_2.": "label_emb.0.2.",
    "conv_norm_out.": "out.0.",
    "conv_out.": "out.2.",
}
_ATTENTION = {"group_norm.": "norm.", "to_q.": "q.", "to_k.": "k.", "to_v.": "v.", "to_out.0.": "proj_out."}
_OPEN_CLIP = {"layer_norm1.": "ln_1.", "layer_norm2.": "ln_2.", "mlp.fc1.": "mlp.c_fc.", "mlp.fc2.": "mlp.c_proj."}


def save_original(pipe: Any, path: Path) -> Path:
    """Write Stable Diffusion 1.x or SDXL as one file; SDXL's encoders must differ in width, as the published ones."""
    tensors = {f"model.diffusion_model.{name}": value for name, value in _unet(pipe.unet).items()}
    tensors |= {f"first_stage_model.{name}": value for name, value in _autoencoder(pipe.vae).items()}
    is_xl = hasattr(pipe, "text_encoder_2")
    first = "conditioner.embedders.0.transformer." if is_xl else "cond_stage_model.transformer."
    for name, value in pipe.text_encoder.state_dict().items():
        tensors[f"{first}text_model.{name.removeprefix('text_model.')}"] = value
    if is_xl:
        second = _open_clip(pipe.text_encoder_2.state_dict())
        tensors |= {f"conditioner.embedders.1.model.{name}": value for name, value in second.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def _renamed(name: str, names: dict[str, str]) -> str:
    for new, old in names.items():
        name = name.replace(new, old)
    return name


def _unet(unet: Any) -> Tensors:
    per_block = unet.config.layers_per_block + 1
    found: Tensors = {}
    for name, value in unet.state_dict().items():
        if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name):
            side, block, kind, layer, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
            place = f"input_blocks.{block * per_block + layer + 1}" if side == "down" else ""
            place = place or f"output_blocks.{block * per_block + layer}"
            if kind == "resnets":
                old = f"{place}.0.{_renamed(rest, _RESNET)}"
            elif kind == "attentions":
                old = f"{place}.1.{rest}"
            elif kind == "downsamplers":
                old = f"input_blocks.{(block + 1) * per_block}.0.op.{rest.removeprefix('conv.')}"
            else:
                behind = 2 if "CrossAttn" in unet.config.up_block_types[block] else 1
                old = f"output_blocks.{(block + 1) * per_block - 1}.{behind}.{rest}"
        elif match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", name):
            is_resnet = match[1] == "resnets"
            rest = _renamed(match[3], _RESNET) if is_resnet else match[3]
            old = f"middle_block.{2 * int(match[2]) + (not is_resnet)}.{rest}"
        else:
            old = _renamed(name, _UNET)
        found[old] = value
    return found


def _autoencoder(vae: Any) -> Tensors:
    last, found = len(vae.config.up_block_types) - 1, {}
    for name, value in vae.state_dict().items():
        old = name.replace("conv_norm_out.", "norm_out.").replace("conv_shortcut.", "nin_shortcut.")
        old = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", old)
        old = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample.", old)
        old = re.sub(r"up_blocks\.(\d+)\.resnets\.", lambda match: f"up.{last - int(match[1])}.block.", old)
        old = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0\.", lambda match: f"up.{last - int(match[1])}.upsample.", old)
        old = re.sub(r"mid_block\.resnets\.(\d+)\.", lambda match: f"mid.block_{int(match[1]) + 1}.", old)
        if "mid_block.attentions.0." in old:
            old = _renamed(old.replace("mid_block.attentions.0.", "mid.attn_1."), _ATTENTION)
            value = value[:, :, None, None] if value.ndim == 2 else value  # a 1x1 convolution in the original
        found[old] = value
    return found


def _open_clip(encoder: Tensors) -> Tensors:
    found: Tensors = {}
    for name, value in encoder.items():
        short = name.removeprefix("text_model.")
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", short):
            parts = [encoder[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif short.startswith("encoder.layers."):
            if ".k_proj." not in short and ".v_proj." not in short:
                old = _renamed(short.replace("encoder.layers.", "transformer.resblocks."), _OPEN_CLIP)
                found[old.replace("self_attn.", "attn.")] = value
        elif short.startswith("final_layer_norm."):
            found[short.replace("final_layer_norm.", "ln_final.")] = value
        elif short == "text_projection.weight":
            found["text_projection"] = value.T
        elif short == "embeddings.position_embedding.weight":
            found["positional_embedding"] = value
        elif short == "embeddings.token_embedding.weight":
            found["token_embedding.weight"] = value
    return found
