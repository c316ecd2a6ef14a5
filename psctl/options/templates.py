"""Records of images that edits read."""

from typing import Annotated

from ...data.errors import UsageError
from ...serving.options import EngineOptions
from ..flags import flag

TemplatePrompt = Annotated[
    str, flag("--template-prompt", "Of the record: what the whole image shows. Edits of one record share it.")
]
TemplateSeed = Annotated[int, flag("--template-seed", "Of the record: seed of the noise outside masks.", min=0)]


def require_masked(options: EngineOptions) -> None:
    """Raise UsageError unless an engine can compute a part of an image and read the rest."""
    given = {
        f"--engine {options.engine}": options.engine != "patched",
        "--cache": options.cache.is_on,
        "--compile": options.compile,
        "--cuda-graphs": options.cuda_graphs,
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise UsageError(f"--reuse computes parts of an image, which does not go with {' and '.join(refused)}")
