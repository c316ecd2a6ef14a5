"""SDXL's autoencoder at full size: number formats, compiled, recorded, one image and four at once, by turns."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.core.timing import medians_us
from patchedserve.serving.models.decoder import ImageDecoder
from patchedserve.tests.support.traced_only import traced_only

from ..context import Context, Row, Task
from ..models import drawn_autoencoder

_FORMS: dict[str, dict[str, Any]] = {
    "float32, default": {},
    "float32, channels-last": {"is_channels_last": True},
    "bfloat16, default": {"dtype": torch.bfloat16},
    "bfloat16, channels-last": {"dtype": torch.bfloat16, "is_channels_last": True},
    "bfloat16, channels-last, compiled": {"dtype": torch.bfloat16, "is_channels_last": True, "is_compiled": True},
}


def decoding(context: Context) -> Iterator[Row]:
    """Yield a row for each size and number of images, with all forms, and the mean difference of theirs from float32.

    Compiled forms come last, with the largest size: compiling takes most of the part's time.
    """
    torch.manual_seed(0)
    device, vae = context.device, drawn_autoencoder(context.scale, torch.float32)
    eager = {name: form for name, form in _FORMS.items() if "is_compiled" not in form}
    decoders = dict[str, ImageDecoder]()

    def decoder_of(name: str, *, is_recorded: bool) -> ImageDecoder:
        label = f"{name}, recorded" if is_recorded else name
        if label not in decoders:
            captured = CapturedPasses(context.make_recorder(device), patience=0) if is_recorded else None
            decoders[label] = ImageDecoder(vae, captured=captured, **_FORMS[name])
        return decoders[label]

    def decoded(side: int, count: int, names: list[str]) -> Row:
        sides = {
            f"{name}, recorded" if is_recorded else name: decoder_of(name, is_recorded=is_recorded)
            for name in names
            for is_recorded in (False, True)
        }
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(count, 4, side // 8, side // 8, generator=generator).to(device)
        with torch.inference_mode(), traced_only() if context.scale.is_rehearsal else nullcontext():
            expected = vae.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]  any tensor of numbers
            times = medians_us({name: partial(each.run, latents) for name, each in sides.items()}, device)
            forms = [
                {
                    "form": name,
                    "ms_an_image": times[name] / 1e3 / count,
                    "difference": float((each.run(latents).float() - expected).abs().mean() / expected.abs().mean()),
                }
                for name, each in sides.items()
            ]
        return {"forms": forms}

    sides = context.scale.sides[: context.scale.num_decoded]
    tasks = list[Task]()
    for side in reversed(sides):
        for count in (1, 4):
            tasks.append((f"{count} of {side} px", partial(decoded, side, count, list(eager))))
    tasks.append((f"1 of {sides[-1]} px, with compiled", partial(decoded, sides[-1], 1, list(_FORMS)[-2:])))
    yield from context.measured(tasks)
    failures = {name: each.captured.failure for name, each in decoders.items() if each.captured is not None}
    context.notes["recording_failures"] = failures
