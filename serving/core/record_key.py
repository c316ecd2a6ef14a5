"""Keys that match edits with the records of templates. No torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.templates import TemplateKind

VERSION = 2
"""Version of the format of records."""


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Key of a template's record. Routers and the simulator, which have no model, use keys without `of_model`.

    Attributes:
        image: checksum of the image's pixels; for an edit of a trace, the name of the image.
        resolution, num_inference_steps: resolution and number of steps of the edits that read the record.
        is_guided: whether its passes have the two rows of classifier-free guidance.
        kind, owner: see `TemplateSpec`.
        prompt, seed: prompt and seed of the template; None for a generation, which has its own.
        guidance_scale: guidance scale that its passes depend on, as those of a generation; None if there is none.
        of_model: name and value of what else it depends on: the model and its files, dtype, schedule, and which tensors
            it keeps.
    """

    image: str
    resolution: Resolution
    num_inference_steps: int
    is_guided: bool = True
    kind: TemplateKind = "noised"
    prompt: str | None = ""
    seed: int | None = 0
    guidance_scale: float | None = None
    owner: str = ""
    of_model: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """Return the key of an edit without its model's part; None for a request that is no edit of a template.

        Hashes the pixels of an image that has them.
        """
        edit, scale = request.edit, request.guidance_scale
        shared = request.resolution, request.num_inference_steps, scale > 1
        if edit is None:
            traced = request.traced
            return None if traced is None or not traced.mask else cls(traced.image, *shared)
        if (template := edit.template) is None:
            return None
        image = hashlib.sha256(edit.image.tobytes()).hexdigest()
        if template.kind == "noised":
            return cls(image, *shared, "noised", template.prompt, template.seed, None, template.owner)
        return cls(image, *shared, template.kind, None, None, scale, template.owner)

    @property
    def about(self) -> dict[str, Any]:
        """What the record depends on, as its manifest holds it."""
        return {
            **dict(self.of_model),
            "num_inference_steps": self.num_inference_steps,
            "size": str(self.resolution),
            "image": self.image,
            "rows": 2 if self.is_guided else 1,
            "kind": self.kind,
            "prompt": self.prompt,
            "seed": self.seed,
            "guidance": self.guidance_scale,
            **({"owner": self.owner} if self.owner else {}),
        }

    @property
    def digest(self) -> str:
        """Name of the record's folder."""
        return digest_of(self.about)


def digest_of(about: Mapping[str, Any]) -> str:
    """Return the name of the folder of the record that a manifest describes."""
    return hashlib.sha256(json.dumps([VERSION, about], sort_keys=True).encode()).hexdigest()[:24]
