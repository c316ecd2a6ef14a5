"""An autoencoder's decoder on strips of rows: every rank decodes the latents of its strip, exactly.

Decoding has no steps, so ranks always wait for each other. They use a separate group for it, since it runs concurrently
with the denoise loop. The memory that a rank needs decreases with the number of ranks.
"""

import sys
import threading
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from ...data.errors import UsageError
from ..core.attention import FusedLinear, attend, heads_of
from ..core.denoiser import copy_modules
from ..core.swap import parent_of
from .attention import keys_values_of_all
from .context import CallText, Pass, StripContext, Team
from .group import Communicator, GroupError, Message, VirtualEnd
from .leaves import StripConv, StripGroupNorm, feed_convolutions
from .processes import ProcessEnd
from .strips import Strips

_KNOWN = {
    *("Decoder", "UNetMidBlock2D", "UpDecoderBlock2D", "ResnetBlock2D", "Upsample2D", "Attention", "ModuleList"),
    *("Conv2d", "GroupNorm", "Linear", "SiLU", "Dropout", "Identity"),
}


class StripImageAttention(nn.Module):
    """Self attention of pixels in the middle block of a decoder, with the norm before it and the sum after it."""

    def __init__(self, attention: nn.Module, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor
        self.norm = StripGroupNorm(attention.group_norm, context, factor)  # type: ignore[arg-type]
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)  # type: ignore[arg-type]

    def forward(self, hidden_states: Tensor, **unused: object) -> Tensor:
        """[rows, channels, height, width] -> the same."""
        attention = self.attention
        tokens = self.norm(hidden_states).flatten(2).transpose(1, 2)
        qkv = heads_of(self.qkv(tokens), 3, attention.heads)  # type: ignore[arg-type]
        key, value = keys_values_of_all(self.context, self, qkv[:, :, 1:], self._factor).unbind(2)
        out = attention.to_out[0](attend(qkv[:, :, 0], key, value, attention.scale).flatten(2))  # type: ignore[index,arg-type,operator]
        return out.transpose(1, 2).reshape(hidden_states.shape) + hidden_states


class StripDecoder:
    """Decodes a strip of latents, together with the other ranks of a team. A team of one runs the unmodified model.

    Args:
        autoencoder: unmodified autoencoder. It is not changed, and its weights are shared.

    Attributes:
        factor: factor by which images are larger than latents.

    Raises:
        UsageError: if the autoencoder has a module that might read beyond a strip.
    """

    def __init__(self, autoencoder: nn.Module) -> None:
        if not isinstance(autoencoder, AutoencoderKL):
            raise UsageError(f"{type(autoencoder).__name__} cannot be decoded in strips; try --parallel-decode whole")
        self._plain, self._context = autoencoder, StripContext()
        self._strip = copy_modules(autoencoder)
        assert isinstance(self._strip, AutoencoderKL)
        # Both would cut the strips again.
        self._strip.disable_tiling()
        self._strip.disable_slicing()
        self.factor = 2 ** (len(autoencoder.config["block_out_channels"]) - 1)
        modules: dict[str, nn.Module] = dict(self._strip.decoder.named_modules())
        for name, module in modules.items():
            kind = type(module).__name__
            if kind not in _KNOWN or (kind == "Attention" and not name.startswith("mid_block")):
                raise UsageError(
                    f"this autoencoder cannot be decoded in strips: module {name} ({kind}) is not known to work on "
                    "parts of images; try --parallel-decode whole"
                )
        for name, module in modules.items():
            if (leaf := self._leaf_of(name, module)) is not None:
                parent, attribute = parent_of(modules, name)
                setattr(parent, attribute, leaf)
        feed_convolutions(self._strip.decoder)

    def _leaf_of(self, name: str, module: nn.Module) -> nn.Module | None:
        """Return the replacement of a module; None if it stays."""
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
            return StripConv(module, self._context)
        if isinstance(module, nn.GroupNorm) and not name.endswith(".group_norm"):
            # Strips have the same share of an image at every level.
            return StripGroupNorm(module, self._context, self.factor)
        if type(module).__name__ == "Attention":
            return StripImageAttention(module, self._context, self.factor)
        return None

    def strips(self, height: int, shares: Sequence[float]) -> Strips:
        """Return the strips of the image for latents of this height. Raises UsageError if it is too low."""
        rows = Strips.of(height, 1, shares)
        return Strips(tuple(self.factor * start for start in rows.starts), self.factor)

    @torch.inference_mode()
    def decode_whole(self, latents: Tensor) -> Tensor:
        """Decode latents [rows, channels, height, width], scaled for the autoencoder, to images."""
        return self._plain.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]  any tensor of numbers

    @torch.inference_mode()
    def decode(self, call: Pass, latents: Tensor) -> Tensor:
        """Decode the strip of this rank to its part of the image: [rows, 3, factor x its height, factor x width]."""
        if call.strips.count == 1:
            return self.decode_whole(latents)
        self._context.begin(call)
        self._context.begin_pass(latents, CallText())
        return self._strip.decode(latents, return_dict=False)[0]  # type: ignore[operator]


class SharedDecoder:
    """Rank 0's side of decoding: on all ranks while their group lasts, otherwise alone. Thread-safe.

    Args:
        decoder: decoder of this rank.
        shares: share of every rank in an image.
    """

    def __init__(self, decoder: StripDecoder, shares: Sequence[float]) -> None:
        self._decoder, self._shares = decoder, shares
        self._lock = threading.Lock()
        self._end: ProcessEnd | VirtualEnd | None = None

    def use(self, end: ProcessEnd | VirtualEnd | None) -> None:
        """Decode with the ranks of this group from now on, or alone."""
        with self._lock:
            self._end = end

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents [rows, channels, height, width] to images, like `StripDecoder.decode_whole`."""
        with self._lock:
            if self._end is not None:
                try:
                    with self._end:
                        return self._in_strips(self._end, latents)
                except GroupError as error:
                    # The denoise loop notices as well, forms a group of the remaining ranks, and passes its end here.
                    self._end = None
                    sys.stderr.write(f"Warning: images are decoded by rank 0 until the ranks meet again: {error}\n")
        return self._decoder.decode_whole(latents)

    def _in_strips(self, end: Communicator, latents: Tensor) -> Tensor:
        height = latents.shape[2]
        members = tuple(range(min(end.size, height)))
        strips = self._decoder.strips(height, [self._shares[rank] for rank in members])
        call = Pass(Team(end, members), strips, tuple((0, row) for row in range(len(latents))))
        parts = latents.split([rows // self._decoder.factor for rows in strips.heights(1)], 2)
        for rank in members[1:]:
            end.send(rank, Message("decode", call.to_facts(), {"latents": parts[rank].contiguous()}))
        own = self._decoder.decode(call, parts[0])
        return torch.cat([own, *(end.receive(rank).tensors["image"] for rank in members[1:])], 2)


def follow_decoding(end: Communicator, decoder: StripDecoder) -> None:
    """Decode strips for rank 0 until the group ends, on a rank other than 0. Raises GroupError."""
    while True:
        message = end.receive(0, is_idle=True)
        if message.kind == "stop":
            return
        call = Pass.from_facts(message.facts, end, decoder.factor)
        image = decoder.decode(call, message.tensors["latents"])
        end.send(0, Message("decoded", {}, {"image": image}))
