"""Configurations of published denoising models, as diffusers has them: facts to count with. No weights."""

import json
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parent / "configs"
PUBLISHED: tuple[str, ...] = ("sdxl", "sd3-medium")


def published_config(name: str) -> dict[str, Any]:
    """The configuration of one of `PUBLISHED`."""
    return json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
