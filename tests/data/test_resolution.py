"""Resolutions in users' notation."""

import random

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse, parse_list


def test_forms() -> None:
    assert parse("192") == Resolution(192, 192)
    assert parse(" 128x192 ") == Resolution(width=128, height=192)
    assert parse("128X192").height == 192
    assert parse_list("256,128, 128x192") == (Resolution(256, 256), Resolution(128, 128), Resolution(128, 192))


def test_text_and_pixels_of_random_resolutions() -> None:
    rng = random.Random(0)
    for _ in range(200):
        resolution = Resolution(8 * rng.randint(1, 512), 8 * rng.randint(1, 512))
        assert parse(str(resolution)) == resolution
        assert resolution.pixels == resolution.width * resolution.height
        assert resolution.checked() is resolution


def test_square_is_written_with_both_sides() -> None:
    assert str(parse("128")) == f"{parse('128')}" == "128x128"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "128x",
        "x128",
        "-128",
        "128x-8",
        "1.5",
        "128x192x3",
        "0",
        "0x128",
        "130",
        "128x129",
        "\uff11\uff12\uff18",
        "9" * 20,
    ],
)
def test_bad_text_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"but (it )?must be") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_the_multiple_is_named() -> None:
    with pytest.raises(UsageError, match=r"height is 130 in resolution 128x130, but must be a positive multiple of 8"):
        parse("128x130")


@pytest.mark.parametrize("text", ["", "128,", "128,,192", "128,128", "128,192,128x128"])
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_list(text)


@pytest.mark.parametrize("sides", [(128.0, 128), (True, 8), ("128", 128), (None, 8)])
def test_sides_must_be_whole_numbers(sides: tuple) -> None:
    with pytest.raises(UsageError, match="whole number of pixels"):
        Resolution(*sides).checked()
