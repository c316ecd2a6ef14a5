"""Requests: a request is one image to generate or to edit. Traces hold requests, and the engine serves them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from .adapters import Adapters, check_adapters
from .checks import require_text
from .errors import UsageError
from .resolution import Resolution

if TYPE_CHECKING:
    from .controls import Control
    from .edits import EditSpec, Reference

Fallback = Literal["light", "never"]
"""Whether a cascade may answer with its light model's image, or only with the heavy one's."""
MAX_SEED = 2**63 - 1
"""Largest seed that both a table's signed 64-bit column and torch's generator can hold."""


MAX_PRIORITY = 2**31 - 1
"""Largest priority; the smallest is its negative."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Range of weights of owners."""


def steps_taken(num_inference_steps: int, strength: float) -> int:
    """Return the number of steps that an edit of this strength takes. With some models it is one more, which is known
    once the request is prepared.
    """
    return max(1, int(num_inference_steps * strength))


def pixels_seen(resolution: Resolution, references: "Sequence[Reference]", num_controls: int = 0) -> int:
    """Return the number of pixels that a step computes: those of the image and of its references, and for each control
    half of the image's, as a ControlNet is the first half of a model.
    """
    own = resolution.pixels + resolution.pixels * num_controls // 2
    return own + sum(reference.resolution.pixels for reference in references)


def sizes_in_words(sizes: Iterable[Resolution]) -> str:
    """Return the size of an image and those of its references, as `64x64 beside 96x64`."""
    return " beside ".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class TracedEdit:
    """An edit as a trace names it: image and mask, without their pixels (`data.traces.edits`).

    Attributes:
        image: `emoji:NUMBER`, a picture of the emoji data set, or the path of a file.
        mask: `box:SEED`, `ellipse:SEED` or `blob:SEED`, or the path of a file; "" for a new image of which this image
            is a reference.
        mask_ratio: share of the pixels in the mask, above 0 and up to 1; 1 without a mask.
        strength: as in `data.edits.EditSpec`; 1 without a mask.
        references: further images that the model sees, named as `image` is.

    Raises:
        UsageError: a number is out of its range.
    """

    image: str
    mask: str = ""
    mask_ratio: float = 1.0
    strength: float = 1.0
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("mask_ratio", "strength"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
                raise UsageError(f"{name} is {value!r}, but it must be a number above 0 and up to 1")
            if value < 1 and not self.mask:
                raise UsageError(f"{name} is {value!r}, but it is of an edit by a mask, and there is none")


@dataclass(frozen=True, slots=True)
class Request:
    """One image to generate or to edit. The constructor validates it, so every `Request` is valid.

    Attributes:
        request_id: number of the request, unique within a run, from 0.
        prompt: description of the image; may be empty (an unconditional image).
        resolution: size of the image in pixels.
        num_inference_steps: number of denoising steps, at least 1.
        guidance_scale: weight of classifier-free guidance, 0 or more.
        seed: seed of the request's own noise generator, 0 to `MAX_SEED`.
        negative_prompt: what the image should not show, or None.
        arrival_s: arrival time, in seconds from the start of the trace.
        slo_s: maximum time from arrival to image, in seconds; None without an SLO.
        edit: the image to start from, and the mask of what may change; None for a new image.
        references: images that the model sees beside the prompt, in their order; of a new image, or of an edit by a
            mask, which may have its own image among them.
        controls: images that guide where things are drawn, each for another ControlNet.
        fallback: whether a cascade may answer with its light model's image, or never.
        traced: the edit as a trace names it; `edit` and `references` hold its pixels once they are read.
        adapters: adapters that change the model for this image (`data.adapters`); empty for the unchanged model.
        cache: whether steps may reuse the results of earlier ones if the engine has a cache; otherwise the image is
            that of plain diffusers.
        yields: whether the request takes no steps while others wait, as for a line of a batch file.
        owner: name of the client that sent it.
        priority: rank among the waiting requests of its owner, from `-MAX_PRIORITY` to `MAX_PRIORITY`; lower ones are
            admitted earlier.
        weight: part of its owner in the batch while several owners have requests waiting, relative to the others; from
            `MIN_WEIGHT` to `MAX_WEIGHT`.

    Raises:
        UsageError: a field is out of its range.
    """

    request_id: int
    prompt: str
    resolution: Resolution
    num_inference_steps: int = 30
    guidance_scale: float = 4.0
    seed: int = 0
    negative_prompt: str | None = None
    arrival_s: float = 0.0
    slo_s: float | None = None
    edit: "EditSpec | None" = None
    fallback: Fallback = "light"
    traced: TracedEdit | None = None
    adapters: Adapters = ()
    cache: bool = True
    yields: bool = False
    owner: str = ""
    priority: int = 0
    weight: float = 1.0
    references: "tuple[Reference, ...]" = ()
    controls: "tuple[Control, ...]" = ()

    def __post_init__(self) -> None:
        _require_int("request_id", self.request_id, 0)
        if not isinstance(self.prompt, str):
            raise UsageError(f"prompt is {self.prompt!r}, but it must be text")
        require_text("prompt", self.prompt)
        if not isinstance(self.resolution, Resolution):
            raise UsageError(f"resolution is {self.resolution!r}, but it must be a Resolution(width, height)")
        self.resolution.checked()
        _require_int("num_inference_steps", self.num_inference_steps, 1)
        _require_number("guidance_scale", self.guidance_scale)
        _require_int("seed", self.seed, 0, MAX_SEED)
        if self.negative_prompt is not None:
            if not isinstance(self.negative_prompt, str):
                raise UsageError(f"negative_prompt is {self.negative_prompt!r}, but it must be text or nothing")
            require_text("negative_prompt", self.negative_prompt)
        _require_number("arrival_s", self.arrival_s)
        if self.slo_s is not None:
            _require_number("slo_s", self.slo_s)
            if self.slo_s == 0:
                raise UsageError("slo_s is 0, but it must be more than 0 seconds")
        if self.fallback not in get_args(Fallback):
            raise UsageError(f"fallback is {self.fallback!r}, but it must be {' or '.join(get_args(Fallback))}")
        check_adapters(self.adapters)
        if not isinstance(self.cache, bool):
            raise UsageError(f"cache is {self.cache!r}, but it must be true or false")
        require_text("owner", self.owner)
        _require_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _require_number("weight", self.weight)
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise UsageError(f"weight is {self.weight:g}, but it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        if self.references and self.edit is not None and (self.edit.is_whole or self.edit.template is not None):
            raise UsageError("references are of new images and of exact edits by a mask, but this edit is another")
        if self.edit is not None and self.edit.resolution != self.resolution:
            raise UsageError(
                f"resolution is {self.resolution}, but the image to edit has {self.edit.resolution} pixels"
            )
        if self.controls:
            from .controls import check_controls

            check_controls(self.controls, self.resolution)

    @property
    def num_steps(self) -> int:
        """Number of denoising steps that are taken; fewer than requested if the request starts from a partly noised
        image (`steps_taken`).
        """
        steps, edit = self.num_inference_steps, self.edited
        return steps if edit is None else steps_taken(steps, edit.strength)

    @property
    def edited(self) -> "EditSpec | TracedEdit | None":
        """The edit that starts from an image, with its pixels if they are read; None for a new image."""
        traced = self.traced
        return self.edit or (None if traced is None or not traced.mask else traced)

    @property
    def pixels_seen(self) -> int:
        """Number of pixels that a step computes (`pixels_seen`)."""
        return pixels_seen(self.resolution, self.references, len(self.controls))

    @property
    def sizes_in_words(self) -> str:
        """Its resolution and those of its references (`sizes_in_words`)."""
        return sizes_in_words((self.resolution, *(reference.resolution for reference in self.references)))

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the image, in seconds from the start of the trace; None without an SLO."""
        return None if self.slo_s is None else self.arrival_s + self.slo_s


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"a whole number from {low}" + ("" if high is None else f" to {high}")
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise UsageError(f"{name} is {value!r}, but it must be {allowed}")


def _require_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{name} is {value!r}, but it must be a finite number that is not negative")
