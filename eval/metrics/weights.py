"""Search for the weights of judges: a given path, an environment variable, or candidate paths."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from ...data.errors import RunError, UsageError


def find_weights(
    judge: str, what: str, path: str | Path | None, variable: str, candidates: Sequence[Path], install: str
) -> Path:
    """Find a weights file: the given path, else the one that the variable names, else the first candidate that exists.

    Args:
        judge: metric that needs the file, such as `FID`.
        what: name of the weights in messages.
        path: path given by the user, or None.
        variable: environment variable that may name the file.
        candidates: candidate paths, the best first.
        install: command that installs the weights.

    Raises:
        UsageError: the given file does not exist.
        RunError: no file is found; the message states how to get one.
    """
    given = path or os.environ.get(variable)
    if given:
        file = Path(given).expanduser()
        if not file.is_file():
            raise UsageError(f"{judge} weights {file}: there is no such file")
        return file
    for file in candidates:
        if file.is_file():
            return file
    looked = f" ({', '.join(str(file) for file in candidates)})" if candidates else ""
    raise RunError(
        f"{judge} needs {what}, and none were found{looked}; install them with: {install}, or name the file in "
        f"{variable}"
    )


def in_package(package: str, *parts: str) -> list[Path]:
    """Return the file of an installed package; empty if the package is missing.

    The package is not imported: its code may need packages that are not installed, but its weights do not.
    """
    spec = importlib.util.find_spec(package)
    return [] if spec is None or spec.origin is None else [Path(spec.origin).parent.joinpath(*parts)]
