"""Leaves of Lumina 2, whose own forward joins image and text row by row.

The model is called with all tokens of a batch as one row, [1, tokens, channels], with the text tokens of all rows
first. Its blocks run on a row for each token, [tokens, 1, channels], so that inputs with one entry per row of the batch
are mapped to the tokens of the row (see `RowsToStream`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import Rotary
from ..core.swap import Swap
from ..families.transformer import Transformer
from .attention import PatchedStreamAttention
from .context import BatchLeaf, PatchContext
from .streams import BlocksWithBoundaries, CachedText, rows_to_stream
from .tokens import repeated


class RefinedText(CachedText):
    """The timestep embedding of each row, and its text, which is refined once for a batch."""

    def __init__(self, embedder: Any, refiner: nn.ModuleList, rotary: Any, context: PatchContext) -> None:
        super().__init__(embedder, context)
        self.refiner, self.rotary = refiner, rotary

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Timesteps (rows,) -> embeddings [rows, width], and the refined text, [1, rows * length, width]."""
        embedder = self.embedder
        embedded = embedder.timestep_embedder(embedder.time_proj(timestep).type_as(hidden_states))
        return embedded, self.context.text.flatten(0, 1)[None]

    def embed(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Embed and refine text, as `CachedText.embed`."""
        text = self.embedder.caption_embedder(text)
        turns = self.rotary._get_freqs_cis(text_ids_of(text.shape[1], text.device)[None])
        for block in self.refiner:
            text = block(text, mask, turns)
        return text


class SingleStreamTokens(BatchLeaf):
    """Cuts the input of the model into tokens, and computes the rotary angles of each token.

    The position of a text token is its number; that of an image token is the length of its text, row and column.
    """

    def __init__(self, rotary: Any, context: PatchContext) -> None:
        super().__init__()
        self.rotary, self.context = rotary, context

    def forward(self, hidden_states: Tensor, attention_mask: None) -> tuple[Any, ...]:
        """Cut an image that is one token wide.

        Returns:
            Its tokens [1, tokens, channels]; None for the angles of text; cosines and sines of image tokens, and of all
            tokens; the number of text tokens, and of all tokens.
        """
        context, (_, channels, _, side) = self.context, hidden_states.shape
        tokens = hidden_states.view(1, channels, -1, side, side).permute(0, 2, 3, 4, 1).flatten(2)
        both = self.fill()
        context.stream_rows = context.row_of_token
        num_text = len(both[0]) - tokens.shape[1]
        image = tuple(part[num_text:] for part in both)
        return tokens, None, image, both, [num_text], [num_text + tokens.shape[1]]

    def fill(self, text: Tensor | None = None) -> Rotary:
        """Return the angles of all tokens that are computed, which depend on the mask of the text alone."""
        return self.context.turns(self.context.text_mask.shape[1], self._angles)

    def _angles(self) -> Rotary:
        """Return cosines and sines [tokens, width] of the text of all rows, then of image tokens in packed order."""
        context = self.context
        mask, level = context.text_mask, context.batch.levels[0]
        text = text_ids_of(mask.shape[1], mask.device).repeat(len(mask), 1)
        places = repeated(level, lambda *size: places_of(size, mask.device), context.kernels)
        lengths = mask.sum(1).index_select(0, level.row_index.repeat_interleave(level.grain**2))
        image = torch.cat([lengths[:, None].to(places.dtype), places], 1)
        turns = self.rotary._get_freqs_cis(torch.cat([text.to(image.dtype), image])[None])[0]
        return turns.real.float().repeat_interleave(2, 1), turns.imag.float().repeat_interleave(2, 1)


def text_ids_of(length: int, device: torch.device) -> Tensor:
    numbers = torch.arange(length, device=device)[:, None]
    return torch.cat([numbers, numbers.new_zeros(length, 2)], 1)


def places_of(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Return row and column of each token of an image of (height, width) tokens, (height * width, 2)."""
    rows, columns = (torch.arange(count, dtype=torch.float32, device=device) for count in size)
    return torch.cartesian_prod(rows, columns)


class StreamStart(nn.Module):
    """First entry of the list of single-stream blocks: [1, tokens, channels] -> [tokens, 1, channels]."""

    def __init__(self, context: PatchContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, hidden_states: Tensor, *unused: object) -> Tensor:
        self.context.begin_stream(self.context.text_mask.shape[1])
        return hidden_states.transpose(0, 1)


class SwappedAxes(nn.Module):
    """A module on tokens, with the first two dimensions of its output swapped; it is also called as a final block."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        """[1, tokens, channels] -> [tokens, 1, channels], or back."""
        return self.module(x).transpose(0, 1)


def insert_one_row(swap: Swap, model: Any, transformer: Transformer, context: PatchContext) -> None:
    """Insert the leaves into a model."""
    image, both, rotary = transformer.joint, transformer.single, model.rope_embedder
    assert both is not None, "text that is refined joins a stream"
    for block in (*getattr(model, image.name), *getattr(model, both.name)):
        swap.wrap(block, image.modulation, rows_to_stream, context)
        swap.wrap(block, "attn", PatchedStreamAttention, context)
    swap.wrap(model, "norm_out.linear_1", rows_to_stream, context)
    swap.wrap(model, "norm_out.linear_2", SwappedAxes)
    swap.wrap(model, "time_caption_embed", RefinedText, model.context_refiner, rotary, context)
    swap.put(model, "context_refiner", nn.ModuleList())
    swap.wrap(model, "rope_embedder", SingleStreamTokens, context)
    swap.wrap(model, "x_embedder", SwappedAxes)
    swap.put(model, image.name, BlocksWithBoundaries(getattr(model, image.name), behind=[SwappedAxes(nn.Identity())]))
    swap.put(model, both.name, BlocksWithBoundaries(getattr(model, both.name), before=[StreamStart(context)]))
