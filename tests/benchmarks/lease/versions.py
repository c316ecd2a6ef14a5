"""Versions of a lease's packages, compared with those that `constraints.txt` pins. Imports no torch."""

import re
from importlib import metadata
from pathlib import Path

_NAMES = ("torch", "triton", "diffusers", "transformers", "tokenizers", "safetensors", "huggingface_hub")
_NAMES += ("numpy", "pandas", "pillow", "pydantic", "scikit-learn", "scipy")
REPOSITORY = Path(__file__).resolve().parents[3]


def pins() -> dict[str, str]:
    """Return the pinned version of each package, by its normalized name."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {_normalized(name): version for name, version in pairs}


def versions() -> list[dict[str, str | bool | None]]:
    """Return each package's versions `here` and `pinned` (None: not installed, not pinned) and whether they differ."""
    pinned, found = pins(), []
    for name in _NAMES:
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = None
        wanted = pinned.get(_normalized(name))
        # A build tag, as in 2.11.0+cu130, does not make a different version.
        differs = (here or "").partition("+")[0] != (wanted or "")
        found.append({"name": name, "here": here, "pinned": wanted, "differs": differs})
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
