"""Batches of rows for the models of `random_models`, and their results with plain diffusers and the patch engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    OvisImageTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
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
    """Draw rows, sorted by resolution as in `PatchLayout`. All differ in latents, timestep and conditions.

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
        if transformer.layout == "padded":
            # The length includes the padding, `PAD`.
            own, text = int(2 + 4 * draw(1).abs()), given["encoder_hidden_states"]
            given["encoder_hidden_states"] = F.pad(text, (0, 0, 0, 2 * SEQ_MULTI_OF - len(text)))
            number = torch.arange(2 * SEQ_MULTI_OF)
            given["text_mask"] = torch.where(number < own, 1, torch.where(number < SEQ_MULTI_OF, 2, 0))
        elif mask is not None:
            valid = torch.arange(_TEXT_LENGTH) < 2 + 4 * draw(1).abs()
            # Lumina 2's own forward counts tokens with its mask.
            given[mask] = valid.long() if transformer.layout == "one row" else valid.float()
        return given
    conditions: dict[str, Any] = {"encoder_hidden_states": draw(_TEXT_LENGTH, config["cross_attention_dim"])}
    if config["addition_embed_type"] == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        height, width = (8.0 * side for side in size)
        ids = torch.tensor([height, width, 0.0, 16.0, height, width])
        conditions["added_cond_kwargs"] = {"text_embeds": draw(pooled), "time_ids": ids}
    return conditions


def stack_conditions(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the conditions of all rows, with one entry per row."""
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
    """Return the row with latents and conditions in another dtype."""

    def cast(value: Any) -> Any:
        return {name: cast(item) for name, item in value.items()} if isinstance(value, dict) else value.to(dtype)

    return replace(row, latents=row.latents.to(dtype), conditions=cast(row.conditions))


@torch.inference_mode()
def run_plain(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Return the results of unmodified diffusers, one row at a time."""
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
        elif isinstance(model, FluxTransformer2DModel | ChromaTransformer2DModel | OvisImageTransformer2DModel):
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
    """Call the model as `FluxPipeline` does, or `OvisImagePipeline`, whose text has places."""
    (height, width), latents, text = size, given["hidden_states"], given["encoder_hidden_states"]
    given["hidden_states"] = FluxPipeline._pack_latents(latents, 1, latents.shape[1], height, width)
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    ids: Any = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, latents.device, latents.dtype)
    text_ids = torch.zeros(text.shape[1], 3)
    if isinstance(model, OvisImageTransformer2DModel):
        text_ids[:, 1:] = torch.arange(text.shape[1])[:, None]
    out = model(**given, img_ids=ids, txt_ids=text_ids, return_dict=False)[0]
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)[0]


def _run_flux2(model: Any, given: dict[str, Any], latents: Tensor) -> Tensor:
    """Call the model as `Flux2Pipeline` does."""
    text, ids = given["encoder_hidden_states"], Flux2Pipeline._prepare_latent_ids(latents[None])
    given["hidden_states"] = Flux2Pipeline._pack_latents(latents[None])
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    out = model(**given, img_ids=ids, txt_ids=Flux2Pipeline._prepare_text_ids(text), return_dict=False)[0]
    unpacked: Any = Flux2Pipeline._unpack_latents_with_ids(out, ids)
    return unpacked[0]


def _run_qwen(model: Any, given: dict[str, Any], size: Size) -> Tensor:
    """Call the model as `QwenImagePipeline` does."""
    (height, width), latents = size, given["hidden_states"]
    given["hidden_states"] = QwenImagePipeline._pack_latents(latents, 1, latents.shape[1], height, width)
    given["timestep"] = given["timestep"].to(latents.dtype) / 1000
    out = model(**given, img_shapes=[[(1, height // 2, width // 2)]], return_dict=False)[0]
    return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8)[0, :, 0]


@torch.inference_mode()
def run_patched(patched: PatchedModel, rows: Sequence[Row], *, repeats: int = 1) -> list[Tensor]:
    """Return the results of the patch engine for all rows as one batch."""
    packing = patched.pack([row.size for row in rows])
    patched.begin(packing, repeats=repeats)
    return call_patched(patched, rows)


@torch.inference_mode()
def call_patched(patched: PatchedModel, rows: Sequence[Row]) -> list[Tensor]:
    """Call the model once more for a batch that has begun."""
    packing = patched.context.packing
    assert packing is not None
    timesteps = torch.tensor([row.timestep for row in rows])
    out = patched(packing.pack([row.latents for row in rows]), timesteps, **stack_conditions(rows))
    return [packing.unpack(out, number) for number in range(len(rows))]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of any row, relative to the largest value of that row."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{tuple(one.shape)} against {tuple(other.shape)}"
        assert other.isfinite().all()
        errors.append(float((one.float() - other.float()).abs().max() / other.float().abs().max()))
    return max(errors)


@dataclass(frozen=True)
class Way:
    """A way to run the patch engine. The strategy `mixed` alternates from one convolution to the next."""

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
    """A `choose` function that alternates between the strategies, and records its choices."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[PatchedConv, int], Strategy] = {}

    def __call__(self, conv: PatchedConv, level: Level, out_level: Level) -> Strategy:
        return self.chosen.setdefault((conv, level.index), "regroup" if len(self.chosen) % 2 else "stitch")
