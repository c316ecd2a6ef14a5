"""Where a model's files are: a bundled name, a local diffusers directory or a hub id. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from ...data.models.bundled import GENERATORS, bundled_model_path
from .checkpoint import INDEX_FILE, refuse_file
from .hub import fetch_configuration, fetch_weights

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""org/name, or org/name@revision."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        folder: a diffusers directory on this machine. That of a hub id has weights once they have been fetched.
        hub: id and revision, if the weights come from the hub.
    """

    folder: Path
    hub: tuple[str, str | None] | None = None

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
        UsageError: if nothing has that name.
        RunError: if a hub id cannot be downloaded.
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
        raise refuse_file(path)
    if found := _HUB_ID.fullmatch(spec):
        return ModelSource(fetch_configuration(*found.groups()), (found[1], found[2]))
    raise UsageError(
        f"unknown model {spec!r}: not a bundled model ({', '.join(GENERATORS)}), not a directory and not a hub id "
        "(org/name)"
    )
