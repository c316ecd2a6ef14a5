"""Which record of a template suits an edit."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.templates import Keep

VERSION = 2
"""Of records; it changes with what is in them."""
_OWNER = "owner"


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """Which record suits an edit.

    Attributes:
        about: all that a record depends on: the model and its files, dtype, schedule, image, size, prompt, seed,
            rows, and what it keeps; and its owner, if it is not everybody's.
    """

    about: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Names the folder."""
        return hashlib.sha256(json.dumps([VERSION, self.about], sort_keys=True).encode()).hexdigest()[:24]

    @property
    def owner(self) -> str:
        """Whose the record is; "" for everybody's."""
        return self.about.get(_OWNER, "")

    @property
    def of_everybody(self) -> "TemplateKey":
        """The same record, if it is everybody's."""
        return TemplateKey({name: value for name, value in self.about.items() if name != _OWNER})


def facts_of(request: Request, keep: Keep) -> dict[str, Any]:
    """What an edit itself says of the record that it reads, whatever the model."""
    edit = request.edit
    assert edit is not None
    assert edit.template is not None
    template = edit.template
    # Any generation has a prompt and a seed of its own, and is of one guidance scale; a noised image knows of none.
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
    """To raise where there is no record of the generation of an edit's image."""
    return UsageError(
        f"there is no record of the image's generation with {request.num_inference_steps} steps, guidance scale "
        f"{request.guidance_scale:g} and --keep {keep}: psctl generate --save-template makes it"
    )
