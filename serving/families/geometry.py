"""Sizes of latents and tokens of a model, and the resolutions and edits that they allow. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...data.edits import EditSpec, active_share, latent_mask, soft_latent_mask
from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from .references import ReferenceRule
from .table import Entry, token_side

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of latents and tokens of a model.

    Attributes:
        latent_factor: pixels on a side of one latent.
        size_multiple: number of which width and height in pixels must be multiples.
        cell: latents on a side of the smallest square that keeps its shape on all levels of the model. A cell is
            computed or left out as a whole when only a part of an image is computed.
        rounds_steps_up: whether the number of steps of an edit is rounded up; down otherwise.
        references: which references the model takes; None if it takes none.
        has_soft_masks: whether latents at the edge of a mask change in part (`soft_latent_mask`), or as a whole.
    """

    latent_factor: int
    size_multiple: int
    cell: int
    rounds_steps_up: bool
    references: ReferenceRule | None = None
    has_soft_masks: bool = False

    @classmethod
    def of_unet(cls, latent_factor: int, num_levels: int) -> "Geometry":
        """Geometry of a pipeline with a U-Net; it requires multiples of 8 even if the autoencoder reduces by less."""
        return cls(latent_factor, math.lcm(8, latent_factor), 1 << (num_levels - 1), rounds_steps_up=False)

    @classmethod
    def of_transformer(cls, latent_factor: int, token_side: int, references: ReferenceRule | None = None) -> "Geometry":
        """Geometry of a transformer in which each token represents a square of latents."""
        multiple = latent_factor * token_side
        return cls(latent_factor, multiple, token_side, rounds_steps_up=True, references=references)

    @classmethod
    def of_entry(cls, entry: Entry | None, latent_factor: int, config: Mapping[str, Any]) -> "Geometry":
        """Geometry of a family's transformer; of any transformer for None.

        Args:
            entry: description of the family.
            latent_factor: pixels on a side of one latent of the autoencoder.
            config: configuration of the transformer.
        """
        side = token_side(entry, config)
        if entry is None:
            return cls.of_transformer(latent_factor, side)
        found = cls.of_transformer(latent_factor * entry.folds, side, entry.references)
        return replace(found, has_soft_masks=entry.has_soft_masks)

    def with_references(self, size: Literal["own", "trained"], usual: Sequence[Resolution]) -> "Geometry":
        """Return this geometry for a model with these usual resolutions that sees references at this size
        (`ModelDefaults.reference_size`).
        """
        if self.references is None or size == "trained":
            return self
        return replace(self, references=self.references.at_own_size(max(each.pixels for each in usual)))

    def latent_size(self, resolution: Resolution) -> tuple[int, int]:
        """Return height and width of the latents of an image."""
        return resolution.height // self.latent_factor, resolution.width // self.latent_factor

    def first_step(self, request: Request) -> int:
        """Return the number of steps that a request skips because it starts from an image.

        A request whose share of the steps is less than one step skips all of them.
        """
        edit = request.edited
        if edit is None:
            return 0
        steps, wanted = request.num_inference_steps, request.num_inference_steps * edit.strength
        return int(steps - (wanted if self.rounds_steps_up else int(wanted)))

    def check_size(self, resolution: Resolution, name: str) -> None:
        """Raise UsageError if the model of this name cannot draw the resolution; the error names what is allowed."""
        multiple = self.size_multiple
        if resolution.width % multiple or resolution.height % multiple:
            raise UsageError(
                f"resolution {resolution.width}x{resolution.height}: "
                f"width and height must be multiples of {multiple} pixels for {name}"
            )

    def check_references(self, request: Request, name: str) -> None:
        """Raise UsageError if the model of this name does not take the references of a request."""
        if self.references is not None and request.edited is not None and not self.references.takes_edits:
            raise UsageError(f"{name} edits by references alone, not by a mask or a strength")
        if not request.references:
            return
        if self.references is None:
            raise UsageError(f"{name} takes no references: it draws from text, or edits the image that it is given")
        self.references.check_number(len(request.references), name)
        for reference in request.references:
            self.check_size(reference.resolution, name)

    def check_cells(self, resolution: Resolution, name: str, *, several: bool = False) -> None:
        """Raise UsageError if an image of this size does not consist of whole cells, or of several if `several` is set.

        The error names what is allowed.
        """
        multiple = self.cell * self.latent_factor
        if resolution.width % multiple or resolution.height % multiple:
            raise UsageError(
                f"resolution {resolution}: for a record of the image, width and height must be multiples of {multiple} "
                f"pixels for {name}"
            )
        if several and resolution.pixels == multiple**2:
            raise UsageError(
                f"resolution {resolution} is a single cell of {name}, so that no part of it is computed alone"
            )

    def check_edit(self, request: Request) -> None:
        """Raise UsageError if an edit cannot be served.

        Its mask holds no latent, it takes no step or fewer than its `full_steps`, or it comes from a trace without
        pixels.
        """
        if request.edit is None:
            if request.traced is not None and request.traced.mask:
                raise UsageError(f"request {request.request_id} is an edit whose image was not read (with_pixels)")
            return
        self.mask_weights(request.edit.mask)
        self.check_strength(request)
        if request.edit.full_steps > (most := request.num_inference_steps - self.first_step(request)):
            raise UsageError(f"full_steps is {request.edit.full_steps}, but the edit takes {most} steps")

    def check_strength(self, request: Request) -> None:
        """Raise UsageError if the strength of a request is too small for even one step."""
        steps, edit = request.num_inference_steps, request.edited
        if edit is not None and self.first_step(request) >= steps:
            least = math.ceil(1000 / steps) / 1000
            raise UsageError(f"strength is {edit.strength:g}, but with {steps} steps it must be at least {least}")

    def has_record(self, request: Request) -> bool:
        """Return whether there can be a record for a request.

        There is none for an edit without a template; with adapters or references, because records are of passes without
        them; of a size that is not a multiple of cells; or that takes all steps from a partly noised image.
        """
        edit = request.edited
        if (
            edit is None
            or request.adapters
            or request.references
            or (isinstance(edit, EditSpec) and edit.template is None)
        ):
            return False
        if any(side % self.cell for side in self.latent_size(request.resolution)):
            return False
        return edit.strength == 1 or self.first_step(request) > 0

    def active_share(self, edit: EditSpec) -> float:
        """Return the share of the cells that an edit computes if it reads a record."""
        return active_share(self.mask_weights(edit.mask), self.cell, edit.dilate)

    def mask_weights(self, mask: "NDArray[np.bool_]") -> "NDArray[np.float32]":
        """Return how much of each latent of an image may change, (height, width), from 0 to 1, given its mask.

        Raises UsageError if no latent may change.
        """
        if self.has_soft_masks:
            return soft_latent_mask(mask, self.latent_factor)
        return latent_mask(mask, self.latent_factor).astype("float32")
