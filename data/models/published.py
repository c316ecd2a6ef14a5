"""Configurations of published denoising models in diffusers' format, for counting operations. No weights."""

import json
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parent / "configs"
PUBLISHED: tuple[str, ...] = ("sdxl", "sd3-medium")


def published_config(name: str) -> dict[str, Any]:
    """Return the configuration of one of `PUBLISHED`."""
    return json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
