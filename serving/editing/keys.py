"""Keys that match edits with the records of templates."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.templates import Keep

VERSION = 2
"""Version of the format of records."""
_OWNER = "owner"


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """Key of a record.

    Attributes:
        about: everything that a record depends on: the model and its files, dtype, schedule, image, size, prompt,
            seed, rows, and which tensors it keeps; and its owner, if it has one.
    """

    about: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Hash of the key, which is the name of the record's folder."""
        return hashlib.sha256(json.dumps([VERSION, self.about], sort_keys=True).encode()).hexdigest()[:24]

    @property
    def owner(self) -> str:
        """Owner of the record; "" if all keys may read it."""
        return self.about.get(_OWNER, "")

    @property
    def without_owner(self) -> "TemplateKey":
        """Key of the same record without an owner."""
        return TemplateKey({name: value for name, value in self.about.items() if name != _OWNER})


def facts_of(request: Request, keep: Keep) -> dict[str, Any]:
    """Return the part of a record's key that depends on the edit alone and not on the model."""
    edit = request.edit
    assert edit is not None
    assert edit.template is not None
    template = edit.template
    # A generation has its own prompt and seed, which the edit need not repeat, and one guidance scale. A noised image
    # has no guidance scale.
    is_noised = template.kind == "noised"
    return {
        "num_inference_steps": request.num_inference_steps,
        "size": str(request.resolution),
        "image": hashlib.sha256(edit.image.tobytes()).hexdigest(),
        "kind": template.kind,
        "prompt": template.prompt if is_noised else None,
        "seed": template.seed if is_noised else None,
        "guidance": None if is_noised else request.guidance_scale,
        "keep": keep,
        **({_OWNER: template.owner} if template.owner else {}),
    }


def no_generation(request: Request, keep: Keep) -> UsageError:
    """Return the error for an edit whose image has no record of its generation."""
    return UsageError(
        f"there is no record of the image's generation with {request.num_inference_steps} steps, guidance scale "
        f"{request.guidance_scale:g} and --keep {keep}: psctl generate --save-template makes it"
    )
