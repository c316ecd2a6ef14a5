"""Where a model's files are: a bundled name, a local diffusers directory, a hub id or a single file. No torch, but
where a file must tell by itself what it is.
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
"""A checkpoint of a single file, and where its configuration is, as `--config` gives it."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        folder: a diffusers directory on this machine. That of a hub id has weights once they have been fetched, and
            that of a file may have none.
        hub: id and revision, if the weights come from the hub.
        file: a checkpoint of a single file.
    """

    folder: Path
    hub: tuple[str, str | None] | None = None
    file: Path | None = None

    def with_weights(self, index: dict[str, Any], variants: Sequence[str | None]) -> Path:
        """The folder with its weights: those of a hub id are downloaded unless they are cached.

        Args:
            index: of `model_index.json`.
            variants: as `variants_for` has them.

        Raises as `fetch_weights`.
        """
        return self.folder if self.hub is None else fetch_weights(*self.hub, self.folder, index, variants)


def locate_model(spec: str) -> ModelSource:
    """Where the model that `spec` names is; the configuration of a hub id is downloaded unless it is cached.

    Raises:
        UsageError: if nothing has that name, or a file is not a checkpoint that is loaded.
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
            raise UsageError(f"--config {found[2]} is a file; a diffusers directory or a hub id is expected")
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
