"""Cache options and their description in words."""

from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.cache.options import CacheOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (CacheOptions(), "off"),
        (CacheOptions("patch", 0.1), "patch, threshold 0.1"),
        (CacheOptions("image", predictor=Path("a/cache.safetensors")), "image, predictor a/cache.safetensors"),
        (CacheOptions("interval", interval=5), "interval, every 5 steps"),
        (CacheOptions("accumulated", 0.25), "accumulated, threshold 0.25"),
    ],
)
def test_options_are_described_in_words(options: CacheOptions, words: str) -> None:
    assert options.in_words() == words


@pytest.mark.parametrize(
    ("grain", "of_step", "of_block"), [("auto", None, 0.5), ("request", None, 0.0), ("patch", 0.5, 0.5)]
)
def test_grain_sets_the_unit_of_reuse(grain: Any, of_step: float | None, of_block: float) -> None:
    asked, limited = CacheOptions("patch", grain=grain), CacheOptions("patch", 0.1, grain=grain)
    assert asked.resolve_full_above(reuses_whole_steps=True) == of_step
    assert limited.resolve_full_above(reuses_whole_steps=False) == of_block
    # Image sets are identified by the effective setting, whatever option it came from.
    assert asked.identity() == CacheOptions("patch", full_above=of_step).identity()
    assert limited.identity() == CacheOptions("patch", 0.1, full_above=of_block).identity()
    assert CacheOptions(grain=grain).identity() == CacheOptions().identity()


def test_grain_is_validated_and_excludes_full_above() -> None:
    wrong: Any = "block"
    with pytest.raises(UsageError, match="cache grain is 'block', but it must be one of auto, request, patch"):
        CacheOptions("patch", grain=wrong)
    with pytest.raises(UsageError, match="not both"):
        CacheOptions("patch", grain="patch", full_above=0.2)
