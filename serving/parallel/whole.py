"""Whole images on one rank: images of any sizes, in one batch of the patch engine."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...data.adapters import Adapters
from ..core.adapters import RowAdapters
from ..core.captured import CapturedPasses, Recorder
from ..patched.patched_model import PatchedModel
from ..patched.text import without_repeats
from .exchange import RowName


class WholeModel:
    """A rank's denoising model for whole images.

    Args:
        model: unmodified model. It is not changed, and its weights are shared.
        recorder: records passes, of each composition of sizes; None to run them eagerly.
    """

    def __init__(self, model: nn.Module, recorder: Recorder | None = None) -> None:
        # Patches of this order need not divide the images, whose sizes are arbitrary here.
        self._model = PatchedModel(model, order="image")
        if recorder is not None:
            self._model.use_graphs(recorder)
        self._now: tuple[tuple[RowName, ...], dict[str, Any]] | None = None

    @property
    def captured(self) -> CapturedPasses | None:
        """Recorded passes; None without a recorder."""
        return self._model.captured

    def predict(
        self,
        rows: tuple[RowName, ...],
        images: Sequence[Tensor],
        timesteps: Tensor,
        conditions_of: Callable[[tuple[RowName, ...]], dict[str, Any]],
        adapters: Sequence[Adapters],
    ) -> list[Tensor]:
        """Predict for latents [channels, height, width] of each row, sorted by size, each at its own timestep.

        Args:
            rows, images, timesteps: names, latents and timesteps of the batch.
            conditions_of: returns the conditions of rows as keyword arguments of the model's forward; called when rows
                change.
            adapters: adapters of each row.
        """
        packing = self._model.pack([(image.shape[1], image.shape[2]) for image in images])
        if self._now is None or self._now[0] != rows:
            conditions, repeats = conditions_of(rows), 1
            if self._model.shorten == "repeats":
                text, repeats = without_repeats(conditions["encoder_hidden_states"])
                conditions = conditions | {"encoder_hidden_states": text}
            self._model.begin(packing, repeats=repeats)
            context, for_all = self._model.context, self.captured is not None
            context.batch_values.adapters = RowAdapters.of(
                adapters, self._model.device, context.entries_of, for_all=for_all
            )
            self._now = rows, conditions
        predicted = self._model(packing.pack(images), timesteps, **self._now[1])
        return [packing.unpack(predicted, row) for row in range(len(rows))]

    def clear(self) -> None:
        """Discard everything kept from the last batch."""
        self._now = None


def stacked(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Stack images [channels, height, width], sorted by size, into one tensor per size, keyed "0", "1", ...."""
    groups = [list(group) for _, group in groupby(images, key=lambda image: image.shape)]
    return {str(number): torch.stack(group) for number, group in enumerate(groups)}


def unstacked(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Invert `stacked`."""
    return [image for number in range(len(tensors)) for image in tensors[str(number)]]
