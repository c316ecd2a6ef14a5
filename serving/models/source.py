"""Location of a model's files: a bundled name, a local diffusers directory, a hub id or a single file.

No torch, except to identify a single file without a configuration.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from ...data.models.bundled import GENERATORS, bundled_model_path
from .checkpoint import INDEX_FILE, refuse_file
from .hub import fetch_configuration, fetch_weights
from .single_file import configuration_of

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""org/name, or org/name@revision."""
_CONFIGURED = re.compile(r"(.+?)@(.+)")
"""A single-file checkpoint and the location of its configuration, from `--config`."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of a model's files.

    Attributes:
        folder: diffusers directory on this machine. For a hub id it holds weights once they have been fetched; for a
            single file it may hold none.
        hub: id and revision, if the weights come from the hub.
        file: single-file checkpoint.
    """

    folder: Path
    hub: tuple[str, str | None] | None = None
    file: Path | None = None

    def with_weights(self, index: dict[str, Any], variants: Sequence[str | None]) -> Path:
        """Return the folder with its weights; those of a hub id are downloaded unless they are cached.

        Args:
            index: content of `model_index.json`.
            variants: variants in order of preference, as in `variants_for`.

        Raises what `fetch_weights` raises.
        """
        return self.folder if self.hub is None else fetch_weights(*self.hub, self.folder, index, variants)


def locate_model(spec: str) -> ModelSource:
    """Locate the model that `spec` names; the configuration of a hub id is downloaded unless it is cached.

    Raises:
        UsageError: if there is no such model, or a file is not a supported checkpoint.
        RunError: if a hub id, or the configuration of a file, cannot be downloaded.
    """
    if spec in GENERATORS:
        path = bundled_model_path(spec)
        if not (path / INDEX_FILE).is_file():
            raise RunError(f"bundled model {spec} is incomplete: missing file {path / INDEX_FILE}")
        return ModelSource(path)
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / INDEX_FILE).is_file():
            raise UsageError(f"{path} is not a diffusers directory: it has no {INDEX_FILE}")
        return ModelSource(path)
    if path.is_file():
        return ModelSource(configuration_of(_checkpoint(path)), file=path)
    if (found := _CONFIGURED.fullmatch(spec)) and (path := Path(found[1]).expanduser()).is_file():
        _checkpoint(path)
        config = locate_model(found[2])
        if config.file is not None:
            raise UsageError(f"--model-config {found[2]} is a file; a diffusers directory or a hub id is expected")
        return ModelSource(config.folder, file=path)
    if found := _HUB_ID.fullmatch(spec):
        return ModelSource(fetch_configuration(*found.groups()), (found[1], found[2]))
    raise UsageError(
        f"unknown model {spec!r}: not a bundled model ({', '.join(GENERATORS)}), not a directory and not a hub id "
        "(org/name)"
    )


def _checkpoint(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise refuse_file(path)
    return path
