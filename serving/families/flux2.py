"""FLUX.2: joint blocks, then single-stream blocks with parallel attention and feed-forward layers; modulation shared
by all blocks of a kind; text with positions of its own.

dev has distilled guidance with its scale as an input. Klein has another text encoder, and its guidance is either
distilled without a scale or not distilled. Latents are the autoencoder's, normalised and folded: 2 x 2 of them become
the channels of one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from PIL.Image import Image
from torch import Tensor

from ...data.requests import Request
from . import Decode, Family
from .encoder import ImageEncoder
from .geometry import Geometry
from .pipelines import even_sigmas_unless_own, text_length, transformer_family, with_references
from .transformer import Blocks, Transformer


def image_ids(height: int, width: int, like: Tensor) -> Tensor:
    """Return the position ids of an image's tokens, (height * width, 4): 0, row, column, 0."""
    rows, columns = (torch.arange(count, device=like.device) for count in (height, width))
    return torch.cartesian_prod(rows[:1], rows, columns, columns[:1])


def reference_ids(number: int, height: int, width: int, like: Tensor) -> Tensor:
    """Return the position ids of a reference's tokens: 10, 20 and so on, row, column, 0."""
    ids = image_ids(height, width, like)
    ids[:, 0] = 10 + 10 * number
    return ids


def text_ids(length: int, like: Tensor) -> Tensor:
    """Return the position ids of a text's tokens, (length, 4): 0, 0, 0, place."""
    places = torch.arange(length, device=like.device)[:, None]
    return torch.cat([places.new_zeros(length, 3), places], 1)


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model on latents as tokens, as a `transformer.Call`."""
    height, width = latents.shape[2:]
    tokens, ids, others = with_references(TRANSFORMER, _tokens_of, latents, conditions, side=1)
    predicted = model(
        tokens,
        timestep=timesteps.to(latents.dtype) / 1000,
        img_ids=ids,
        txt_ids=text_ids(conditions["encoder_hidden_states"].shape[1], latents),
        return_dict=False,
        **others,
    )[0]
    return predicted[:, : height * width].transpose(1, 2).unflatten(2, (height, width))


def _tokens_of(latents: Tensor) -> Tensor:
    """[rows, channels, height, width] -> [rows, tokens, channels]."""
    return latents.flatten(2).transpose(1, 2)


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="Flux2TransformerBlock", modulation=None),
    single=Blocks(name="single_transformer_blocks", kind="Flux2SingleTransformerBlock", modulation=None),
    embed=lambda model, latents: model.x_embedder(_tokens_of(latents)),
    image_ids=image_ids,
    reference_ids=reference_ids,
    text_ids=text_ids,
    leaves={
        "context_embedder": "text",
        "double_stream_modulation_img.linear": "rows",
        "single_stream_modulation.linear": "stream",
        "norm_out.linear": "rows",
    },
    attention={
        "Flux2Attention": "Flux2AttnProcessor",
        "Flux2ParallelSelfAttention": "Flux2ParallelSelfAttnProcessor",
    },
    known_classes=frozenset({
        *("Flux2Transformer2DModel", "Flux2TransformerBlock", "Flux2SingleTransformerBlock", "Flux2PosEmbed"),
        *("Flux2Modulation", "Flux2TimestepGuidanceEmbeddings", "Flux2FeedForward", "Flux2SwiGLU"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 512
"""The default of both pipelines' `__call__`."""


def family(pipe: Flux2Pipeline | Flux2KleinPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder."""
    is_klein = isinstance(pipe, Flux2KleinPipeline)
    config, is_distilled = pipe.transformer.config, pipe.config.get("is_distilled", False)  # type: ignore[union-attr]
    return replace(
        transformer_family(
            pipe,
            latent_channels=config.in_channels,
            is_distilled=is_distilled or not is_klein,
            schedule_kwargs=partial(_schedule_kwargs, pipe),
            condition=partial(
                _condition, pipe, text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH), not is_klein
            ),
            conditions=_conditions,
        ),
        decode=partial(_decode, pipe),
        encode=partial(_encode, pipe, ImageEncoder(pipe.vae, draws=False)),
    )


def _schedule_kwargs(pipe: Any, geometry: Geometry, request: Request) -> dict[str, Any]:
    height, width = geometry.latent_size(request.resolution)
    return {"mu": compute_empirical_mu(height * width, request.num_inference_steps)} | even_sigmas_unless_own(
        pipe, request
    )


def _condition(
    pipe: Any, max_sequence_length: int, takes_scale: bool, request: Request, is_guided: bool
) -> dict[str, Tensor]:
    prompts = [request.negative_prompt or "", request.prompt] if is_guided else [request.prompt]
    # Prompts are encoded separately, as in the pipeline.
    texts = [
        pipe.encode_prompt(prompt, device=pipe.transformer.device, max_sequence_length=max_sequence_length)[0]
        for prompt in prompts
    ]
    text = {"text": torch.cat(texts)}
    if not takes_scale or not pipe.transformer.config.guidance_embeds:
        return text
    return text | {"guidance": torch.full([1], request.guidance_scale, device=texts[0].device, dtype=torch.float32)}


def _conditions(conditioning: dict[str, Tensor]) -> dict[str, Any]:
    return {"encoder_hidden_states": conditioning["text"], "guidance": conditioning.get("guidance")}


def _decode(pipe: Any, latents: Tensor, decode: Decode) -> Sequence[Image]:
    mean, std = _statistics(pipe.vae, latents := latents.to(pipe.vae.dtype))
    image = decode(type(pipe)._unpatchify_latents(latents * std + mean))
    return pipe.image_processor.postprocess(image, output_type="pil")


def _encode(pipe: Any, encode: ImageEncoder, pixels: Tensor, generator: torch.Generator) -> Tensor:
    latents = type(pipe)._patchify_latents(encode(pixels, generator))
    mean, std = _statistics(pipe.vae, latents)
    return (latents - mean) / std


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of the folded latents, (1, channels, 1, 1)."""
    mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return mean.to(like), torch.sqrt(variance + vae.config.batch_norm_eps).to(like)
