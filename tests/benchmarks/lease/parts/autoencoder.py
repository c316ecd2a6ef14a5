"""SDXL's autoencoder at full size: number formats, memory formats, one image and four at once."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKL

from ..context import Context, Row, Task
from ..models import drawn_autoencoder
from .timing import mean_ms

_FORMS = (
    ("float32, default", torch.float32, torch.contiguous_format),
    ("bfloat16, default", torch.bfloat16, torch.contiguous_format),
    ("bfloat16, channels-last", torch.bfloat16, torch.channels_last),
)


def decoding(context: Context) -> Iterator[Row]:
    """Yield a row for each size, format and number of images, with the mean difference of an image from float32."""
    torch.manual_seed(0)
    device, first = context.device, drawn_autoencoder(context.scale, torch.float32)
    forms = {name: copy.deepcopy(first).to(dtype=dtype, memory_format=form) for name, dtype, form in _FORMS}  # type: ignore[call-overload]
    generator = torch.Generator().manual_seed(0)
    tasks = list[Task]()
    for side in context.scale.sides[: context.scale.num_decoded]:
        latents: Any = torch.randn(1, 4, side // 8, side // 8, generator=generator).to(device)
        with torch.inference_mode():
            expected = first.decode(latents, return_dict=False)[0].cpu()
        for name, vae in forms.items():
            for count in (1, 4):
                run = partial(_decoded, vae, latents, count, expected, name.endswith("last"))
                tasks.append((f"{count} of {side} px, {name}", run))
    with torch.inference_mode():
        yield from context.measured(tasks)


def _decoded(vae: AutoencoderKL, latents: Any, count: int, expected: torch.Tensor, is_channels_last: bool) -> Row:
    given = latents.to(vae.dtype).repeat(count, 1, 1, 1)
    if is_channels_last:
        given = given.contiguous(memory_format=torch.channels_last)
    image = vae.decode(given, return_dict=False)[0][:1].float().cpu()
    difference = ((image - expected).abs().mean() / expected.abs().mean()).item()
    ms = mean_ms(lambda: vae.decode(given, return_dict=False), latents.device)
    return {"ms": ms, "ms_an_image": ms / count, "difference": difference}
