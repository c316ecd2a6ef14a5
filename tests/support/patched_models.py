"""Small random diffusers models of every shape that the patch engine runs, and batches of rows for them.

Every weight is drawn anew, also those that diffusers sets to zero or one (norms, biases), so that a term that is left
out changes the result. Run as a script it is the worker of the test of Triton kernels, see `main`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn
from torch.nn import functional as F

from patchedserve.serving.families import transformer_of
from patchedserve.serving.families.table import entry_of, token_side
from patchedserve.serving.layout.packing import Level, Order
from patchedserve.serving.patched.context import Strategy
from patchedserve.serving.patched.leaves import PatchedConv
from patchedserve.serving.patched.patched_model import PatchedModel

Size = tuple[int, int]

_TEXT_LENGTH = 7
_UNET: dict[str, Any] = {
    "sample_size": 16,
    "cross_attention_dim": 24,
    "norm_num_groups": 4,
    "norm_eps": 0.01,  # so large that it matters
    "layers_per_block": 1,
}
_FOUR_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (16, 16, 24, 32),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}
_THREE_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (16, 24, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
}
_TWO_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (1, 2),
}
_SD3: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 20,
}

_FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 12,
}

_FLUX2: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (8, 8, 8, 8),
}

_AURA: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 40,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "caption_projection_dim": 80,
    "pos_embed_max_size": 20**2,
}

_PIXART: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 36,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 72,
    "sample_size": 32,
    "caption_channels": 20,
    "use_additional_conditions": False,
}


_LUMINA2: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (8, 8, 8),
    "cap_feat_dim": 20,
}


_QWEN: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "axes_dims_rope": (8, 12, 12),
}


_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 20,
    "axes_dims": [8, 8, 8],
    "axes_lens": [256, 64, 64],
}


def sd15_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SD 1.5: 4 levels, projections of the transformers are convolutions, 8 heads everywhere."""
    return _random(UNet2DConditionModel, _FOUR_LEVELS | {"attention_head_dim": 8} | changes, seed)


def sd2_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SD 2: as 1.5, with linear projections and more heads at deeper levels."""
    heads: dict[str, Any] = {
        "attention_head_dim": (1, 2, 3, 4),
        "use_linear_projection": True,
        "upcast_attention": True,
    }
    return _random(UNet2DConditionModel, _FOUR_LEVELS | heads | changes, seed)


def sdxl_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SDXL: 3 levels, several transformer blocks at the deeper ones, pooled text and time ids."""
    config: dict[str, Any] = {
        **_THREE_LEVELS,
        "attention_head_dim": (1, 2, 4),
        "transformer_layers_per_block": (1, 2, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 10,
    }
    return _random(UNet2DConditionModel, config | changes, seed)


def scale_shift_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """A U-Net whose timestep scales and shifts between norm and activation, which must not be fused then."""
    config = _THREE_LEVELS | {"attention_head_dim": 2, "resnet_time_scale_shift": "scale_shift"}
    return _random(UNet2DConditionModel, config | changes, seed)


def gelu_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """A U-Net of 2 levels with another activation than SiLU, which is not fused either."""
    return _random(
        UNet2DConditionModel, _TWO_LEVELS | {"act_fn": "gelu", "resnet_out_scale_factor": 1.4} | changes, seed
    )


def small_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """The smallest U-Net with all leaves, for Triton's interpreter and for refusals."""
    return _random(UNet2DConditionModel, _TWO_LEVELS | {"norm_num_groups": 2} | changes, seed)


def sd3_transformer(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    """SD3: joint attention without norms of queries and keys."""
    return _random(SD3Transformer2DModel, _SD3 | changes, seed)


def sd35_transformer(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    """SD3.5: norms of queries and keys, and a second attention in the first blocks."""
    return _random(
        SD3Transformer2DModel, _SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)} | changes, seed
    )


def flux_transformer(seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    """FLUX.1 dev: joint blocks, blocks of one stream, rotary positions, the guidance scale as an input."""
    return _random(FluxTransformer2DModel, _FLUX | {"guidance_embeds": True} | changes, seed)


def schnell_transformer(seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    """FLUX.1 schnell: without guidance."""
    return flux_transformer(seed, **{"guidance_embeds": False} | changes)


def flux2_transformer(seed: int = 0, **changes: Any) -> Flux2Transformer2DModel:
    """FLUX.2 dev: joint blocks, blocks of one stream with feed-forward layers beside attention, modulation that blocks
    share, positions of text, the guidance scale as an input.
    """
    return _random(Flux2Transformer2DModel, _FLUX2 | {"guidance_embeds": True} | changes, seed)


def klein_transformer(seed: int = 0, **changes: Any) -> Flux2Transformer2DModel:
    """FLUX.2 Klein: without a scale."""
    return flux2_transformer(seed, **{"guidance_embeds": False} | changes)


def aura_transformer(seed: int = 0, **changes: Any) -> AuraFlowTransformer2DModel:
    """AuraFlow: joint blocks, blocks of one stream, learnt positions; text that shows in the image in spite of its
    register tokens.
    """
    model = _random(AuraFlowTransformer2DModel, _AURA | changes, seed)
    for block in model.joint_transformer_blocks:
        block.attn.add_v_proj.weight *= 4
    return model


def chroma_transformer(seed: int = 0, **changes: Any) -> ChromaTransformer2DModel:
    """Chroma: as FLUX, with masked text, and modulation that all blocks take from one network."""
    config = {name: value for name, value in _FLUX.items() if name != "pooled_projection_dim"}
    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2}
    heads = {"attention_head_dim": 40, "axes_dims_rope": (8, 16, 16)}
    return _random(ChromaTransformer2DModel, config | approximator | heads | changes, seed)


def pixart_transformer(seed: int = 0, **changes: Any) -> PixArtTransformer2DModel:
    """PixArt-Sigma: cross attention to masked text, one modulation for all blocks, also predicts the variance."""
    return _random(PixArtTransformer2DModel, _PIXART | changes, seed)


def lumina2_transformer(seed: int = 0, **changes: Any) -> Lumina2Transformer2DModel:
    """Lumina 2: text refined by itself, then one stream; heads that share keys and values; rotary positions of the
    image that depend on the length of the text; timesteps, of which it sees the thousandth, that show in the image.
    """
    model = _random(Lumina2Transformer2DModel, _LUMINA2 | changes, seed)
    embedder = model.time_caption_embed.timestep_embedder
    embedder.linear_1.weight *= 4
    embedder.linear_2.weight *= 2
    return model


def qwen_transformer(seed: int = 0, **changes: Any) -> QwenImageTransformer2DModel:
    """Qwen-Image: joint blocks with masked text, whose rotary positions begin behind those of its image."""
    return _random(QwenImageTransformer2DModel, _QWEN | changes, seed)


def z_image_transformer(seed: int = 0, **changes: Any) -> ZImageTransformer2DModel:
    """Z-Image: image and text refined by themselves, then one stream; both padded with tokens that count."""
    return _random(ZImageTransformer2DModel, _Z_IMAGE | changes, seed)


MODELS: dict[str, Callable[..., Any]] = {
    "sd15": sd15_unet,
    "sd2": sd2_unet,
    "sdxl": sdxl_unet,
    "scale-shift": scale_shift_unet,
    "gelu": gelu_unet,
    "sd3": sd3_transformer,
    "sd35": sd35_transformer,
    "flux": flux_transformer,
    "schnell": schnell_transformer,
    "flux2": flux2_transformer,
    "klein": klein_transformer,
    "aura": aura_transformer,
    "chroma": chroma_transformer,
    "pixart": pixart_transformer,
    "lumina2": lumina2_transformer,
    "qwen": qwen_transformer,
    "z-image": z_image_transformer,
}
TRANSFORMERS = ["sd35", "flux", "aura", "chroma", "pixart", "lumina2", "qwen"]
"""One of each kind."""
WITH_ALL_OPTIONS = [
    name
    for name in MODELS
    if name not in ("flux", "schnell", "flux2", "klein", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")
]
"""Those that ranks serve, and records of less than all, too."""


def _random(build: Callable[..., Any], config: dict[str, Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what follows draws every parameter again; this is for buffers, if any are random
        model = build(**config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    is_norm = {id(module.weight) for module in model.modules() if _is_norm(module)}
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in is_norm:
            drawn = 1 + 0.3 * drawn
        elif parameter.dim() < 2:
            drawn = 0.3 * drawn
        else:
            drawn = drawn / parameter[0].numel() ** 0.5
        parameter.copy_(drawn)
    return model


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)


@dataclass(frozen=True)
class Row:
    """One row of a batch: latents [4, height, width], its timestep, and conditions without a batch dimension."""

    latents: Tensor
    timestep: float
    conditions: dict[str, Any]

    @property
    def size(self) -> Size:
        height, width = self.latents.shape[1:]
        return height, width


def draw_rows(model: Any, sizes: Sequence[Size], *, num_each: int = 1, seed: int = 0) -> list[Row]:
    """Rows sorted by resolution as `PatchLayout` sorts. All differ in latents, timestep and conditions.

    With `num_each` 2 every size is a guided request: two rows with the same latents and timestep and different texts.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, size in enumerate(sorted(sizes, key=lambda size: (size[0] * size[1], *size))):
        latents = torch.randn(4, *size, generator=generator)
        timestep = float(981 - 37 * number % 950)
        rows += [Row(latents, timestep, _draw_conditions(model, size, generator)) for _ in range(num_each)]
    return rows


def _draw_conditions(model: Any, size: Size, generator: torch.Generator) -> dict[str, Any]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    config = model.config
    if not isinstance(model, UNet2DConditionModel):
        given = {"encoder_hidden_states": draw(_TEXT_LENGTH, config.get("joint_attention_dim", 20))}
        if "pooled_projection_dim" in config:
            given["pooled_projections"] = draw(config["pooled_projection_dim"])
        if config.get("guidance_embeds"):
            given["guidance"] = 2 + draw(1)[0].abs()
        transformer = transformer_of(model)
        assert transformer is not None
        mask = transformer.mask
        if transformer.pads_to is not None:
            # As long as with its pads, `PAD`.
            own, text = int(2 + 4 * draw(1).abs()), given["encoder_hidden_states"]
            given["encoder_hidden_states"] = F.pad(text, (0, 0, 0, 2 * transformer.pads_to - len(text)))
            number = torch.arange(2 * transformer.pads_to)
            given["text_mask"] = torch.where(number < own, 1, torch.where(number < transformer.pads_to, 2, 0))
        elif mask is not None:
            given[mask] = (torch.arange(_TEXT_LENGTH) < 2 + 4 * draw(1).abs()).float()
        return given
    conditions: dict[str, Any] = {"encoder_hidden_states": draw(_TEXT_LENGTH, config["cross_attention_dim"])}
    if config["addition_embed_type"] == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        height, width = (8.0 * side for side in size)
        ids = torch.tensor([height, width, 0.0, 16.0, height, width])
        conditions["added_cond_kwargs"] = {"text_embeds": draw(pooled), "time_ids": ids}
    return conditions


def stack_conditions(rows: Sequence[Row]) -> dict[str, Any]:
    """The conditions of all rows, with one entry per row."""
    return _stack([row.conditions for row in rows])


def _stack(conditions: list[dict[str, Any]]) -> dict[str, Any]:
    first = conditions[0]
    return {
        name: _stack([one[name] for one in conditions])
        if isinstance(value, dict)
        else torch.stack([one[name] for one in conditions])
        for name, value in first.items()
    }


def to_dtype(row: Row, dtype: torch.dtype) -> Row:
    """The row with latents and conditions in another dtype."""

    def cast(value: Any) -> Any:
        return {name: cast(item) for name, item in value.items()} if isinstance(value, dict) else value.to(dtype)

    return replace(row, latents=row.latents.to(dtype), conditions=cast(row.conditions))


@torch.no_grad()
def run_plain(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """What unmodified diffusers gives, one row at a time."""
    name = "sample" if isinstance(model, UNet2DConditionModel) else "hidden_states"
    results = []
    for row in rows:
        given = {name: row.latents[None], "timestep": torch.tensor([row.timestep]), **stack_conditions([row])}
        if isinstance(model, AuraFlowTransformer2DModel):
            given["timestep"] = given["timestep"].to(row.latents.dtype) / 1000
        if isinstance(model, ChromaTransformer2DModel):
            ones = torch.ones(1, row.latents.shape[1] * row.latents.shape[2] // 4)
            given["attention_mask"] = torch.cat([given["attention_mask"], ones.to(row.latents.dtype)], 1)
        if isinstance(model, QwenImageTransformer2DModel):
            results.append(_run_qwen(model, given, row.size))
        elif isinstance(model, FluxTransformer2DModel | ChromaTransformer2DModel):
            results.append(_run_flux(model, given, row.size))
        elif isinstance(model, ZImageTransformer2DModel):
            text = row.conditions["encoder_hidden_states"][row.conditions["text_mask"] == 1]
            timestep = torch.tensor([(1000 - row.timestep) / 1000])
            results.append(-model([row.latents[:, None]], timestep, [text], return_dict=False)[0][0][:, 0])
        elif isinstance(model, Flux2Transformer2DModel):
            results.append(_run_flux2(model, given, row.latents))
        elif isinstance(model, Lumina2Transformer2DModel):
            given["timestep"] = 1 - given["timestep"] / 1000
            given["encoder_attention_mask"] = given["encoder_attention_mask"].long()
            results.append(-model(**given, return_dict=False)[0][0])
        else:
            predicted = model(**given, return_dict=False)[0][0]
            results.append(predicted[: len(row.latents)])  # the rest is a variance
    return results


def _run_flux(model: Any, given: dict[str, Any], size: Size) -> Tensor:
    """As `FluxPipeline` calls its model."""
    (height, width), latents, text = size, given["hidden_states"], given["encoder_hidden_states"]
    given["hidden_states"] = FluxPipeline._pack_latents(latents, 1, latents.shape[1], height, width)
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    ids: Any = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, latents.device, latents.dtype)
    out = model(**given, img_ids=ids, txt_ids=torch.zeros(text.shape[1], 3), return_dict=False)[0]
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)[0]


def _run_flux2(model: Any, given: dict[str, Any], latents: Tensor) -> Tensor:
    """As `Flux2Pipeline` calls its model."""
    text, ids = given["encoder_hidden_states"], Flux2Pipeline._prepare_latent_ids(latents[None])
    given["hidden_states"] = Flux2Pipeline._pack_latents(latents[None])
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    out = model(**given, img_ids=ids, txt_ids=Flux2Pipeline._prepare_text_ids(text), return_dict=False)[0]
    unpacked: Any = Flux2Pipeline._unpack_latents_with_ids(out, ids)
    return unpacked[0]


def _run_qwen(model: Any, given: dict[str, Any], size: Size) -> Tensor:
    """As `QwenImagePipeline` calls its model."""
    (height, width), latents = size, given["hidden_states"]
    given["hidden_states"] = QwenImagePipeline._pack_latents(latents, 1, latents.shape[1], height, width)
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    out = model(**given, img_shapes=[[(1, height // 2, width // 2)]], return_dict=False)[0]
    return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8)[0, :, 0]


@torch.no_grad()
def run_patched(patched: PatchedModel, rows: Sequence[Row], *, repeats: int = 1) -> list[Tensor]:
    """What the patch engine gives for all rows as one batch."""
    packing = patched.pack([row.size for row in rows])
    patched.begin(packing, repeats=repeats)
    return call_patched(patched, rows)


@torch.no_grad()
def call_patched(patched: PatchedModel, rows: Sequence[Row]) -> list[Tensor]:
    """One more call for a batch that has begun."""
    packing = patched.context.packing
    assert packing is not None
    timesteps = torch.tensor([row.timestep for row in rows])
    out = patched(packing.pack([row.latents for row in rows]), timesteps, **stack_conditions(rows))
    return [packing.unpack(out, number) for number in range(len(rows))]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of any row, each relative to the largest value of its own row."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{tuple(one.shape)} against {tuple(other.shape)}"
        assert other.isfinite().all()
        errors.append(float((one.float() - other.float()).abs().max() / other.float().abs().max()))
    return max(errors)


@dataclass(frozen=True)
class Way:
    """One way to run the patch engine. The strategy `mixed` alternates from one convolution to the next."""

    order: Order
    patch_size: int | None
    strategy: str

    def __str__(self) -> str:
        return f"{self.order}{self.patch_size or ''}-{self.strategy}"

    def build(self, model: nn.Module, *, kernels: str = "auto") -> PatchedModel:
        strategy: Any = "auto" if self.strategy == "mixed" else self.strategy
        patched = PatchedModel(model, order=self.order, patch_size=self.patch_size, strategy=strategy, kernels=kernels)
        if self.strategy == "mixed":
            patched.context.choose = Alternation()
        return patched

    def fits(self, model: Any, sizes: Sequence[Size]) -> bool:
        """Whether the model and all sizes allow the patch size."""
        is_unet = isinstance(model, UNet2DConditionModel)
        if is_unet:
            multiple = 2 ** (len(model.config["block_out_channels"]) - 1)
        else:
            multiple = token_side(entry_of(type(model).__name__), model.config)
        if self.order == "image":
            return is_unet or not any(side % multiple for size in sizes for side in size)
        common = math.gcd(*(side for size in sizes for side in size))
        patch_size = self.patch_size or common
        return common % patch_size == 0 and patch_size % multiple == 0


class Alternation:
    """A `choose` that alternates between the strategies, and remembers where it chose which."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[PatchedConv, int], Strategy] = {}

    def __call__(self, conv: PatchedConv, level: Level, out_level: Level) -> Strategy:
        return self.chosen.setdefault((conv, level.index), "regroup" if len(self.chosen) % 2 else "stitch")


def triton_case() -> tuple[UNet2DConditionModel, list[Row]]:
    """A model and a batch of two resolutions, small enough for Triton's interpreter."""
    model = small_unet(seed=5)
    return model, draw_rows(model, [(8, 4), (8, 8), (4, 8)], seed=5)


def run_triton_case() -> list[Tensor]:
    """`triton_case` through the Triton kernels, which must run in the interpreter."""
    model, rows = triton_case()
    return run_patched(Way("patch", None, "stitch").build(model, kernels="triton"), rows)


def main() -> None:
    """Write the results of `triton_case` to a file. TRITON_INTERPRET=1 must be set before diffusers imports triton."""
    torch.save(run_triton_case(), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
