"""Options of the cache, as they are told."""

from pathlib import Path

import pytest

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
def test_what_decides_is_said(options: CacheOptions, words: str) -> None:
    assert options.in_words() == words
