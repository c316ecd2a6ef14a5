"""Decoding of latents to images: number format, several images at once, recorded passes, and a check of the images."""

import copy
from typing import Any

import torch
from torch import Tensor

from ...data.errors import RunError
from ...kernels.launch import power_of_two
from ..core.captured import CapturedPasses, PassBatch, Pause
from ..core.compiled import compile_decoder, running_blocks
from ..core.denoiser import copy_modules
from ..families import Decode
from ..plain.formats import channels_last_copy

_ENCODING = ("encoder", "quant_conv")
"""Parts of an autoencoder that only encode."""
_MOST_AT_ONCE = 8
_MEMORY_SHARE = 0.1
"""Share of a GPU's memory for the activations of images that are decoded together."""
_LARGEST_TENSORS, _USUAL_CHANNELS = 4, 256
"""Number of a decoder's largest tensors that are in memory at the same time, and the channels of published models."""


class ImageDecoder:
    """Decodes latents of one or several images of one size. Not thread-safe.

    An image that is not finite would come out black or grey, and so would one that overflows to a single colour. It is
    decoded again in float32.

    Args:
        vae: diffusers' autoencoder. It is not changed, and its weights are shared as far as possible.
        decode: decodes in place of the autoencoder, in the autoencoder's own format. None: the autoencoder, to which
            alone the following arguments apply.
        dtype: number format of the decoder; None for the autoencoder's own.
        is_channels_last: whether the weights of convolutions, and so their results, have channels last.
        is_compiled: whether the decoder's residual blocks run through torch.compile.
        captured: records passes, and replays them; None to run all of them eagerly.
        most_at_once: largest number of images in a pass; None for a bound by the memory of a GPU, and 1 on a CPU.
    """

    def __init__(
        self,
        vae: Any,
        decode: Decode | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_channels_last: bool = False,
        is_compiled: bool = False,
        captured: CapturedPasses | None = None,
        most_at_once: int | None = None,
    ) -> None:
        self.captured = captured
        self._vae, self._replacement = vae, decode
        self.dtype: torch.dtype = vae.dtype if dtype is None else dtype
        self._is_channels_last, self._is_compiled = is_channels_last, is_compiled
        self._most_at_once = most_at_once
        self._own: Any = None
        self._in_float32: Any = None

    def num_at_once(self, pixels: int) -> int:
        """Return the number of images of this many pixels that one pass decodes at most: 1, 2, 4 or 8."""
        most, device = self._most_at_once, self._vae.device
        if most is None:
            if device.type != "cuda" or self._replacement is not None:
                return 1
            # The last level begins with the channels of the level before it, at full size.
            channels = max(self._vae.config.get("block_out_channels", (_USUAL_CHANNELS,))[:2])
            num_bytes = _LARGEST_TENSORS * pixels * channels * self.dtype.itemsize
            most = int(_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory / num_bytes)
        return power_of_two(min(max(most, 1), _MOST_AT_ONCE) + 1) // 2

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents (n, channels, h, w), scaled for the autoencoder, to images (n, 3, height, width).

        Raises RunError: the latents are not finite; or an image is not finite, or of a single colour, also in float32.
        """
        image = self.run(latents)
        problem = _problem(image, latents)
        if problem is None:
            return image
        if not _is_finite(latents):
            given = str(latents.dtype).removeprefix("torch.")
            raise RunError(f"the latents are not finite: denoising has overflowed in {given}, or weights are damaged")
        if self.dtype != torch.float32:
            if self._in_float32 is None:
                # Kept: an autoencoder that overflows once does so again.
                self._in_float32 = _with_dtype(self._vae, torch.float32)
            image = _decode(self._in_float32, latents.float())
            if (problem := _problem(image, latents)) is None:
                return image
        dtype = str(self.dtype).removeprefix("torch.")
        tried = dtype if self.dtype == torch.float32 else f"{dtype}, nor in float32"
        raise RunError(f"the image is {problem} in {tried}: the autoencoder overflows, or its weights are damaged")

    def run(self, latents: Tensor) -> Tensor:
        """Decode latents as `__call__`, without a check."""
        if self._replacement is not None:
            return self._replacement(latents)
        if self._own is None:
            self._own = self._built()
        latents = latents.to(self.dtype)
        if self.captured is None:
            return self._pass(latents)
        # Passes have 1, 2, 4 or 8 rows.
        rows = len(latents)
        num_added = power_of_two(rows) - rows
        padded = torch.cat([latents, latents[-1:].expand(num_added, *latents.shape[1:])]) if num_added else latents

        def forward(inputs: dict[str, Any], _: Any, __: Pause | None) -> Tensor:
            return self._pass(inputs["latents"])

        return self.captured.run(PassBatch(is_complete=True), "decode", {}, forward, {"latents": padded})[:rows]

    def _pass(self, latents: Tensor) -> Tensor:
        with running_blocks(is_compiled=self._is_compiled, is_adapted=False):
            return _decode(self._own, latents)

    def _built(self) -> Any:
        """Return the autoencoder with its decoder in the form that was asked for."""
        is_other = self.dtype != self._vae.dtype
        if not (is_other or self._is_channels_last or self._is_compiled):
            return self._vae
        own: Any = _with_dtype(self._vae, self.dtype) if is_other else copy_modules(self._vae)
        if self._is_channels_last:
            for name, part in list(own.named_children()):
                if name not in _ENCODING:
                    setattr(own, name, channels_last_copy(part))
        if self._is_compiled:
            compile_decoder(own.decoder)
        return own


def _decode(vae: Any, latents: Tensor) -> Tensor:
    return vae.decode(latents, return_dict=False)[0]


def _with_dtype(vae: Any, dtype: torch.dtype) -> Any:
    """Return a copy of an autoencoder whose decoder has this dtype; the encoder is shared."""
    own = copy_modules(vae)
    for name, part in vae.named_children():
        if name not in _ENCODING:
            setattr(own, name, copy.deepcopy(part).to(dtype))
    return own


def _problem(image: Tensor, latents: Tensor) -> str | None:
    """Return what is wrong with images; None for nothing. Latents of one value may give an image of a single colour."""
    if not _is_finite(image):
        return "not finite"
    is_plain = (image.amax((-2, -1)) == image.amin((-2, -1))).flatten(1).all(1)
    given = latents.flatten(1)
    is_blank = is_plain & (given.amax(1) != given.amin(1))
    return "of a single colour, although its latents are not," if bool(is_blank.any()) else None


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
