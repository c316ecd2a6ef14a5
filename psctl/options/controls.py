"""Options of ControlNets, and the images that they see."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...data.errors import UsageError
from ..flags import flag

if TYPE_CHECKING:
    from ...data.controls import Control
    from ...serving.options import EngineOptions

_FORM = "NAME[:SCALE[:START:END]]=IMAGE"
ControlNets = Annotated[
    list[str] | None,
    flag("--controlnet", "ControlNet (a folder of diffusers) for --control; may be repeated.", metavar="NAME=PATH"),
]
Controls = Annotated[
    list[str] | None,
    flag("--control", "Image that a ControlNet sees, for all images; may be repeated.", metavar=_FORM),
]


def read_controls(
    engine: "EngineOptions", nets: list[str] | None, texts: list[str] | None
) -> "tuple[EngineOptions, list[Control]]":
    """Return the engine with these ControlNets, and the images that they see.

    Raises UsageError: an option is not valid or does not work with others, or an image names no net, or none a net.
    """
    if not nets and not texts:
        return engine, []
    from ...data.controls import Control, require_controls
    from ...data.datasets.decode import read_content
    from ...data.edits import read_image

    engine = replace(engine, model=replace(engine.model, controlnet=nets))
    known, given = [each.name for each in engine.model.controlnets], [_parsed(text) for text in texts or ()]
    require_controls([name for name, _, _ in given], known)
    if unused := set(known) - {name for name, _, _ in given}:
        name = min(unused)
        raise UsageError(f"--controlnet {name} is used by no image: add --control {name}=IMAGE")
    return engine, [Control(name, read_image(read_content(path), str(path)), *numbers) for name, path, numbers in given]


def _parsed(text: str) -> tuple[str, Path, list[float]]:
    """Return the name, the path and the numbers of a control. Raises UsageError: the text has another form."""
    head, equals, path = text.partition("=")
    name, *numbers = head.split(":")
    if not equals or not path or len(numbers) not in (0, 1, 3):
        raise UsageError(f"--control {text}: give {_FORM}")
    try:
        return name, Path(path).expanduser(), list(map(float, numbers))
    except ValueError:
        raise UsageError(f"--control {text}: SCALE, START and END are numbers; give {_FORM}") from None
