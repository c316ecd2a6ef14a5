"""What a model makes of sizes in pixels, and which edits that allows. No torch."""

import math
from dataclasses import dataclass

from ...data.edits import EditSpec, active_share, latent_mask
from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in a model.

    Attributes:
        latent_factor: pixels on a side for each position of the latents.
        size_multiple: width and height in pixels must be multiples of this.
        cell: latents on a side of the smallest square that keeps its shape on all levels of the model: what is computed
            or left out as a whole where only a part of the image is drawn.
        rounds_steps_up: of an edit's share of the steps; down otherwise.
    """

    latent_factor: int
    size_multiple: int
    cell: int
    rounds_steps_up: bool

    @classmethod
    def of_unet(cls, latent_factor: int, num_levels: int) -> "Geometry":
        """Of the pipelines with a U-Net, which require multiples of 8, even if the autoencoder reduces by less."""
        return cls(latent_factor, math.lcm(8, latent_factor), 1 << (num_levels - 1), rounds_steps_up=False)

    @classmethod
    def of_transformer(cls, latent_factor: int, token_side: int) -> "Geometry":
        """Of a transformer each of whose tokens stands for a square of latents."""
        return cls(latent_factor, latent_factor * token_side, token_side, rounds_steps_up=True)

    def latent_size(self, resolution: Resolution) -> tuple[int, int]:
        """Height and width of the latents of an image."""
        return resolution.height // self.latent_factor, resolution.width // self.latent_factor

    def first_step(self, request: Request) -> int:
        """How many of its steps a request leaves out, as it starts from an image; all of them if its share is less than
        one.
        """
        edit = request.edit or request.traced
        if edit is None:
            return 0
        steps, wanted = request.num_inference_steps, request.num_inference_steps * edit.strength
        return int(steps - (wanted if self.rounds_steps_up else int(wanted)))

    def check_size(self, resolution: Resolution, name: str) -> None:
        """Raise UsageError if the model of this name cannot draw the resolution; the message says what is allowed."""
        multiple = self.size_multiple
        if resolution.width % multiple or resolution.height % multiple:
            raise UsageError(
                f"resolution {resolution.width}x{resolution.height}: "
                f"width and height must be multiples of {multiple} pixels for {name}"
            )

    def check_cells(self, resolution: Resolution, name: str, *, several: bool = False) -> None:
        """Raise UsageError if an image of this size has parts of cells, or but one where it must have `several`; the
        message says what is allowed.
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
        """Raise UsageError if nothing of an edit would be left to do: its mask holds no latent, or it takes no step, or
        fewer than are to compute all; or if a trace's edit has no pixels yet.
        """
        if request.edit is None:
            if request.traced is not None:
                raise UsageError(f"request {request.request_id} is an edit whose image was not read (with_pixels)")
            return
        latent_mask(request.edit.mask, self.latent_factor)
        self.check_strength(request)
        if request.edit.full_steps > (most := request.num_inference_steps - self.first_step(request)):
            raise UsageError(f"full_steps is {request.edit.full_steps}, but the edit takes {most} steps")

    def check_strength(self, request: Request) -> None:
        """Raise UsageError if a request starts from its image so late that it takes no step."""
        steps, edit = request.num_inference_steps, request.edit or request.traced
        if edit is not None and self.first_step(request) >= steps:
            least = math.ceil(1000 / steps) / 1000
            raise UsageError(f"strength is {edit.strength:g}, but with {steps} steps it must be at least {least}")

    def active_share(self, edit: EditSpec) -> float:
        """Share of the cells that an edit computes where it reads a record."""
        return active_share(latent_mask(edit.mask, self.latent_factor), self.cell, edit.dilate)
