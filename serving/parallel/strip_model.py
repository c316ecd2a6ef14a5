"""The denoising model of one rank: a diffusers model whose leaves work on a strip of rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.denoiser import copy_modules, denoise
from .context import Pass, StripContext
from .exchange import RowName
from .options import NormOptions
from .swap import StripSwap, unit_of


class StripModel:
    """Predicts for a strip of some rows, together with the other ranks of a team.

    A team of one runs the unmodified model, whose results it has bit by bit.

    Args:
        model: unmodified; it is not changed, and its weights are shared.
        norms: what GroupNorm of displaced rows goes by.

    Attributes:
        unit: rows of latents that must stay together.

    Raises:
        UsageError: see `StripSwap`.
    """

    def __init__(self, model: nn.Module, norms: NormOptions | None = None) -> None:
        self._plain, self._strip = model, copy_modules(model)
        self._context = StripContext(norms)
        self._readers = StripSwap(self._strip, self._context).text_readers
        self._conditions: dict[RowName, dict[str, Tensor]] = {}
        self._joined: tuple[tuple[RowName, ...], dict[str, Any]] | None = None
        self.unit = unit_of(model)

    @property
    def reads_halo(self) -> bool:
        """Whether its first layer reads the rows around a strip."""
        return hasattr(self._plain, "conv_in")

    @torch.inference_mode()
    def learn(self, rows: Sequence[RowName], conditions: Mapping[str, Tensor]) -> None:
        """Take the conditions of new rows: tensors (rows, ...) by `flat` names."""
        rows = tuple(rows)
        for index, row in enumerate(rows):
            # A copy: what is given may be a part of something larger.
            self._conditions[row] = {name: tensor[index].clone() for name, tensor in conditions.items()}
        for reader in self._readers:
            reader.learn(rows, conditions["encoder_hidden_states"])

    def keep(self, rows: Sequence[RowName]) -> None:
        """Forget all other rows."""
        kept = set(rows)
        self._conditions = {row: known for row, known in self._conditions.items() if row in kept}
        self._joined = None
        for reader in self._readers:
            reader.keep(kept)
        self._context.exchange.keep(kept)

    @torch.inference_mode()
    def predict(self, call: Pass, latents: Tensor, timesteps: Tensor) -> Tensor:
        """Predict for the strip of this rank.

        Args:
            call: says which rows, and whose strips.
            latents: [rows, channels, height, width] of the strip; with the rows around it if `reads_halo`.
            timesteps: (rows,).
        """
        if self._joined is None or self._joined[0] != call.rows:
            known = [self._conditions[row] for row in call.rows]
            self._joined = call.rows, nested({name: torch.stack([each[name] for each in known]) for name in known[0]})
        conditions = self._joined[1]
        if call.strips.count == 1:
            return denoise(self._plain, latents, timesteps, conditions)
        self._context.begin(call)
        return denoise(self._strip, latents, timesteps, conditions)


def flat(conditions: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Conditions as a model's forward names them -> tensors by name, levels between dots; None is left out."""
    found: dict[str, Tensor] = {}
    for name, value in conditions.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `flat`."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found
