"""The denoising model of one rank: a diffusers model whose leaves compute a strip of rows, or whole images."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...data.adapters import Adapters
from ...data.resolution import RESOLUTION_MULTIPLE
from ..core.adapters import AdaptedLayers, RowAdapters
from ..core.captured import CapturedPasses, PassBatch, Pause, Recorder, constants_of
from ..core.denoiser import copy_modules, denoise
from ..families import transformer_of
from ..families.table import entry_of
from ..families.transformer import Transformer
from ..families.z_image import own_texts
from ..patched.attention import text_bias_of
from ..plain.formats import channels_last_copy
from .context import CallText, Pass, StripContext
from .cost import Call, Cost
from .exchange import RowName
from .model_levels import levels_of, unit_of
from .swap import StripSwap
from .whole import WholeModel

_MAX_JOINED = 8
"""Number of groups of rows whose joined conditions are kept, as each resolution of a step is a call of its own."""


@dataclass(slots=True, eq=False)
class _Joined:
    """Conditions of the rows of a call, which are the same in all of their calls.

    Attributes:
        conditions: keyword arguments of the forward of the model that runs.
        text: text of the rows for the leaves.
        adapters: adapters of the rows; None if no row has any.
        batch: the rows, for recorded passes.
    """

    conditions: dict[str, Any]
    text: CallText
    adapters: RowAdapters | None = None
    batch: PassBatch = field(default_factory=PassBatch)


class StripModel:
    """Predicts for a strip of some rows, together with the other ranks of a team.

    A team of one runs the unmodified model, so that its results are bit for bit the same.

    Args:
        model: unmodified model. It is not changed, and its weights are shared.
        like: another `StripModel` of the same model. Weights that strips need in another form are shared with it.
        recorder: records passes, each as a sequence of segments between the exchanges; None to run them eagerly.

    Attributes:
        unit: number of rows of latents that must stay together.
        latent_factor: pixels on a side of one latent.
        num_exchanges: number of times that ranks exchange tensors in a call.
        captured: recorded passes of strips; None without a recorder.

    Raises:
        UsageError: the model cannot run in strips, as in `StripSwap`.
    """

    def __init__(self, model: nn.Module, like: "StripModel | None" = None, *, recorder: Recorder | None = None) -> None:
        self._plain = model
        self._recorder = recorder
        self.captured = None if recorder is None else CapturedPasses(recorder)
        # Strips of a U-Net are channels-last, so that a row and a token are each contiguous in memory.
        self._is_unet = isinstance(model, UNet2DConditionModel)
        own = channels_last_copy if self._is_unet else copy_modules
        self._strip = own(model) if like is None else copy_modules(like._form)
        self._form = copy_modules(self._strip)
        # Ranks of one process take turns within a pass, each with rows of its own.
        self._plain_adapters, self._adapters = AdaptedLayers.of(model), AdaptedLayers.of_copy(self._strip)
        self._context = StripContext()
        swap = StripSwap(self._strip, self._context)
        self._readers, self.num_exchanges = swap.text_readers, swap.num_exchanges
        self._transformer = transformer_of(model)
        kinds = {} if self._transformer is None else {kind: name for name, kind in self._transformer.leaves.items()}
        self._caption = self._strip.get_submodule(kinds["caption"]) if "caption" in kinds else nn.Identity()
        self._conditions: dict[RowName, dict[str, Tensor]] = {}
        self._adapters_by_row: dict[RowName, Adapters] = {}
        self._joined: dict[Hashable, _Joined] = {}
        # Created on first use, as it keeps a copy of some weights.
        self._whole: WholeModel | None = None
        self.unit = unit_of(model)
        entry = entry_of(type(model).__name__)
        self.latent_factor = RESOLUTION_MULTIPLE * (1 if entry is None else entry.folds)

    @property
    def recording_failure(self) -> str | None:
        """Why a pass could not be recorded the last time this failed; None if it did not."""
        found = (self.captured, None if self._whole is None else self._whole.captured)
        return next((each.failure for each in found if each is not None and each.failure is not None), None)

    @property
    def reads_halo(self) -> bool:
        """Whether its first layer reads the rows around a strip."""
        return hasattr(self._plain, "conv_in")

    @property
    def text_length(self) -> int:
        """Number of tokens of the longest text of the known rows; 0 if the model has no text stream."""
        return self.text_length_of(list(self._conditions))

    def text_length_of(self, rows: Sequence[RowName]) -> int:
        """Return the number of tokens of the longest text of these rows; 0 if the model has no text stream."""
        if self._readers:
            return 0
        return max((self._conditions[row]["encoder_hidden_states"].shape[0] for row in rows), default=0)

    @property
    def splits_text(self) -> bool:
        """Whether the text stream has no tokens but those of the text, so that ranks may each compute a part of it."""
        transformer = self._transformer
        return transformer is not None and transformer.layout == "joint" and not hasattr(self._plain, "register_tokens")

    @property
    def has_masked_text(self) -> bool:
        """Whether the length of a row's text in a call depends on the other rows."""
        return self._transformer is not None and self._transformer.mask is not None

    def tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image with latents of this size, in a model with a text stream."""
        return -(-height // self.unit) * -(-width // self.unit)

    @cached_property
    def cost(self) -> Cost:
        """Cost of the model's calls."""
        return Cost(levels_of(self._plain))

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return next(self._plain.parameters()).element_size()

    def slot_bytes(self, height: int, width: int) -> int:
        """Return the bytes that a rank keeps from a displaced call for the next one, for a row with latents of this
        size.
        """
        return self.element_size * self.cost.slots(Call(height, width, self.text_length, rows=1))

    @torch.inference_mode()
    def learn(
        self, rows: Sequence[RowName], conditions: Mapping[str, Tensor], adapters: Sequence[Adapters] | None = None
    ) -> None:
        """Store what new rows keep.

        Args:
            rows: names of the rows.
            conditions: tensors (rows, ...) by `flat` names.
            adapters: adapters of each row; None if no row has any.
        """
        rows = tuple(rows)
        self._adapters_by_row |= dict(zip(rows, adapters or [()] * len(rows), strict=True))
        for index, row in enumerate(rows):
            # Copied, as the tensor may be a view of a larger one.
            self._conditions[row] = {name: tensor[index].clone() for name, tensor in conditions.items()}
        self._joined.clear()
        if self._readers:
            with self._adapters.on(self._adapters_of(rows)):
                text = self._caption(conditions["encoder_hidden_states"])
                for reader in self._readers:
                    reader.learn(rows, text)

    def retain(self, rows: Sequence[RowName]) -> None:
        """Discard everything kept for other rows."""
        kept = set(rows)
        self._conditions = {row: known for row, known in self._conditions.items() if row in kept}
        self._adapters_by_row = {row: known for row, known in self._adapters_by_row.items() if row in kept}
        self._joined.clear()
        if self._whole is not None:
            self._whole.clear()
        for reader in self._readers:
            reader.retain(kept)
        self._context.exchange.retain(kept)

    @torch.inference_mode()
    def predict(self, call: Pass, latents: Tensor, timesteps: Tensor) -> Tensor:
        """Predict for the strip of this rank.

        Args:
            call: the rows of the batch, and the strips of the team.
            latents: [rows, channels, height, width] of the strip; with the rows around it if `reads_halo`.
            timesteps: (rows,).
        """
        joined = self._conditions_of(call)
        if call.is_alone or call.strips.count == 1:
            with self._plain_adapters.on(joined.adapters):
                return denoise(self._plain, latents, timesteps, joined.conditions)
        if self._is_unet:
            latents = latents.contiguous(memory_format=torch.channels_last)
        context, captured = self._context, self.captured

        def forward(
            inputs: dict[str, Any], kept: tuple[dict[str, Any], CallText, RowAdapters | None], pause: Pause | None
        ) -> Tensor:
            conditions, text, adapters = kept
            collects = captured is not None and captured.is_due and pause is None
            context.begin_pass(inputs["latents"], text, pause, collects=collects)
            with self._adapters.on(adapters):
                return denoise(self._strip, inputs["latents"], inputs["timesteps"], conditions)

        context.begin(call)
        inputs = {"latents": latents, "timesteps": timesteps}
        kept = joined.conditions, joined.text, joined.adapters
        if captured is None:
            return forward(inputs, kept, None)
        names = () if joined.adapters is None else tuple(joined.adapters.scales)
        key = call.key, constants_of(joined.conditions), joined.text.length, names
        return captured.run(joined.batch, key, kept, forward, inputs)

    @torch.inference_mode()
    def draw(self, rows: Sequence[RowName], images: Sequence[Tensor], timesteps: Tensor) -> list[Tensor]:
        """Predict for rows that this rank computes alone.

        Args:
            rows: names of the rows, whose conditions are known.
            images: latents [channels, height, width] of each row, sorted by size.
            timesteps: (rows,).
        """
        if self._whole is None:
            self._whole = WholeModel(self._plain, self._recorder)
        adapters = [self._adapters_by_row[row] for row in rows]
        return self._whole.predict(tuple(rows), images, timesteps, lambda rows: nested(self._joined_of(rows)), adapters)

    def clear(self) -> None:
        """Discard everything, without waiting for other ranks."""
        self._context.exchange.clear()
        self.retain(())

    def _conditions_of(self, call: Pass) -> _Joined:
        """Return the conditions of all rows of a call."""
        part, is_whole = call.text_starts[call.team.place :][:2], call.is_alone or call.strips.count == 1
        key = call.rows, part, is_whole
        if key not in self._joined:
            joined, text = self._joined_of(call.rows), CallText()
            if self._transformer is not None and not is_whole:
                text = self._text_of(self._transformer, joined, slice(*part) if part else slice(None))
            if len(self._joined) == _MAX_JOINED:
                self._joined.clear()
            self._joined[key] = _Joined(nested(joined), text, self._adapters_of(call.rows))
        return self._joined[key]

    def _text_of(self, transformer: Transformer, conditions: dict[str, Any], part: slice) -> CallText:
        """Return the text of a call, and leave in the conditions what a strip's forward needs of it."""
        text, name = conditions["encoder_hidden_states"], transformer.mask
        mask = None if name is None else conditions[name]
        bias = text_bias_of(text, 1, mask, adds_mask=transformer.adds_mask)
        biased = mask[:, part].to(text.dtype) if mask is not None and transformer.adds_mask else None
        if name is not None and transformer.layout == "joint":
            del conditions[name]
        if transformer.layout == "padded":
            assert mask is not None, "pads are marked"
            # Once for all calls, because it waits for the device.
            conditions["encoder_hidden_states"] = own_texts(text, mask)
        else:
            # Keys and values of cross attention are known.
            conditions["encoder_hidden_states"] = text[:, :0] if self._readers else text[:, part]
        return CallText(text.shape[1], mask, bias, biased)

    def _adapters_of(self, rows: Sequence[RowName]) -> RowAdapters | None:
        """Return the adapters of rows, along the first dimension of all inputs of layers; None if no row has any."""
        given, device = [self._adapters_by_row[row] for row in rows], next(self._plain.parameters()).device
        return RowAdapters.of(given, device, for_all=self.captured is not None)

    def _joined_of(self, rows: Sequence[RowName]) -> dict[str, Any]:
        known = [self._conditions[row] for row in rows]
        return {name: _stacked([each[name] for each in known]) for name in known[0]}


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors, which are padded at the end of their first dimension to the longest."""
    return pad_sequence(list(tensors), batch_first=True) if tensors[0].dim() else torch.stack(list(tensors))


def flat(conditions: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten keyword arguments of a model's forward to tensors by dotted name; None values are left out."""
    found: dict[str, Tensor] = {}
    for name, value in conditions.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flat`."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found
