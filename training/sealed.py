"""Arrays and a JSON description in one safetensors file, whose checksum reveals edits.

A truncated file is detected by the header of safetensors itself.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..data.errors import UsageError
from ..data.files import write_bytes

_CHECKSUM_KEY = "psctl.sha256"


class Sealed(NamedTuple):
    """A kind of file.

    Attributes:
        key: name of its metadata entry.
        what: what it contains, for messages: "a latency predictor".
        again: the command that makes such a file.
    """

    key: str
    what: str
    again: str

    def write(self, path: str | Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
        """Write a file, atomically. Raises OSError."""
        own = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        text = json.dumps(about, allow_nan=False)
        write_bytes(path, save(own, {self.key: text, _CHECKSUM_KEY: _checksum(text, own)}))

    def read(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Read a file that `write` has written.

        Raises UsageError: the file cannot be read, is damaged, was edited, or is of another kind.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise UsageError(f"{path}: there is no such file") from error
            raise UsageError(f"{path}: cannot be read as {self.what} ({first_line(error)})") from error
        text = metadata.get(self.key)
        if text is None:
            raise UsageError(f"{path}: is not {self.what}")
        if metadata.get(_CHECKSUM_KEY) != _checksum(text, arrays):
            raise UsageError(f"{path}: is damaged or was edited; fit it again: {self.again}")
        return arrays, json.loads(text)

    def require_version(self, about: Mapping[str, Any], version: int) -> None:
        """Raise UsageError, for `version_error`, if the description of a file is of another version."""
        if about.get("version") != version:
            raise UsageError(f"version {about.get('version')}")

    def version_error(self, path: Path, error: Exception) -> UsageError:
        """Return the error for a file with a valid checksum whose content this version does not understand."""
        return UsageError(f"{path}: is of another version of psctl ({first_line(error)}); fit it again: {self.again}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; the name of its class if the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _checksum(about: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
