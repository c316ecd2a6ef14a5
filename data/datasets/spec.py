"""Specs, which name data sets on the command line, in Python and in stored results. Imports nothing heavy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from ..errors import UsageError

SPEC_FORMS = "coco:PATH, diffusiondb:PATH or diffusiondb:hub, imagefolder:PATH, parquet:PATH, captions:FILE, emoji"
"""Forms of a spec without its options, for messages and help texts."""

SPEC_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "coco": ("split", "image_dir"),
    "diffusiondb": ("max_nsfw", "split", "config", "revision"),
    "imagefolder": ("split", "caption_column"),
    "parquet": ("split", "caption_column", "image_column", "id_column"),
    "captions": ("caption_column", "id_column"),
    "emoji": ("split", "resolution", "num_images", "data_seed"),
}
"""Names of the options of each kind, which `parse_spec` describes."""

_NUMBERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "max_nsfw": (float, "a number from 0 to 2"),
    "num_images": (int, "a whole number from 1"),
    "data_seed": (int, "a whole number from 0"),
}


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """A spec in its parts.

    Attributes:
        kind: a key of `SPEC_OPTIONS`.
        path: path as given; empty for emoji.
        options: values by name, numbers as numbers.
    """

    kind: str
    path: str
    options: Mapping[str, Any]


def parse_spec(spec: str, more: Mapping[str, Any] = MappingProxyType({})) -> DatasetSpec:
    """Parse KIND:PATH or KIND:PATH?NAME=VALUE&NAME=VALUE; `more` holds further options, as values.

    A path that exists is used as a whole, whatever characters it contains; otherwise options follow its last `?`. In a
    value, `%26` stands for `&`, `%3F` for `?` and `%25` for `%`. In a shell, put a spec with options in quotes.

        coco:PATH           split=val2017          selects captions_*.json; needed if a folder has several
                            image_dir=DIR          folder of the images; default: SPLIT or images/SPLIT beside them
        diffusiondb:PATH    max_nsfw=0.3           leave out images with a higher image or prompt score; 0 to 2
        diffusiondb:hub     split=train            for a saved or parquet data set that has several
                            config=2m_first_5k     hub only: the subset; default 2m_random_1k, a thousand images
                            revision=NAME          hub only: refs/convert/parquet has the larger subsets
        imagefolder:PATH    split=train            the folder of this name below PATH
                            caption_column=NAME    default: caption, prompt, text and others
        parquet:PATH        split=train            files whose path contains it; needed if a folder has several
                            caption_column=NAME, image_column=NAME, id_column=NAME
        captions:FILE       caption_column=NAME, id_column=NAME
        emoji               split=heldout          or train, of which the bundled models have seen some
                            resolution=192         resolution of the pictures; default 256
                            num_images=10000       number of scenes to draw from
                            data_seed=0            seed of the scenes

    Raises:
        UsageError: the kind is unknown, the path is missing, or an option is malformed, belongs to another kind, is
            given twice, or is not a number although it must be one.
    """
    is_plain = ":" not in spec.partition("?")[0]
    kind, mark, rest = spec.partition("?" if is_plain else ":")
    path, text = ("", mark + rest) if is_plain else _split_path(rest)
    if kind not in SPEC_OPTIONS:
        raise UsageError(f"data set is {spec!r}, but it must be one of: {SPEC_FORMS}")
    if not path and kind != "emoji":
        raise UsageError(f"data set is {spec!r}, but it needs a path: {kind}:PATH")
    options: dict[str, Any] = {}
    given = list(more.items())
    for part in text[1:].split("&") if text else ():
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise UsageError(f"data set is {spec!r}: {part!r} is not an option NAME=VALUE, and no such path exists")
        given.append((name, _value_of(name, unquote(value))))
    for name, value in given:
        if name not in SPEC_OPTIONS[kind]:
            allowed = ", ".join(SPEC_OPTIONS[kind])
            raise UsageError(f"{name} is not an option of the data set {kind}, whose options are: {allowed}")
        if name in options:
            raise UsageError(f"data set is {spec!r}: {name} is given twice")
        options[name] = value
    return DatasetSpec(kind, path, options)


def spec_options_help() -> str:
    """Return the options of every kind in one line for help texts."""
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in SPEC_OPTIONS.items())


def _split_path(rest: str) -> tuple[str, str]:
    if "?" not in rest or Path(rest).expanduser().exists():
        return rest, ""
    path, mark, text = rest.rpartition("?")
    return path, mark + text


def _value_of(name: str, text: str) -> str | float:
    if name not in _NUMBERS:
        return text
    read, allowed = _NUMBERS[name]
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"the data set's option {name} is {text!r}, but it must be {allowed}") from error
