"""What every set of captioned images offers, and how its bad entries are counted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from PIL import Image

from ..checks import is_text
from ..errors import UsageError

T = TypeVar("T")
ImageKind = Literal["stored", "drawn", "none"]
"""Whether images lie in files (which may be missing or damaged), are drawn by our own code, or do not exist."""


class BadImageError(UsageError):
    """An image is missing or cannot be decoded; the message names it in one line."""


@dataclass(frozen=True, slots=True)
class CaptionEntry:
    """One image of a data set with all that is said of it; the image itself is not read.

    Attributes:
        id: name of the image within its data set, the same on every machine.
        captions: cleaned captions (`clean_caption`), none of them empty.
        location: where the image lies, for the data set's own `open_image`; sorting by it gives the order in which
            images are read fastest. None without an image.
        width, height: size in pixels where the data set says it without opening the image, otherwise None.
        seed: seed that the data set gives for generating this image, or None.
        problem: why the entry cannot be used, or None.
    """

    id: str
    captions: tuple[str, ...]
    location: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """A text-image pair of a sample: what its `CaptionEntry` says, with the one caption that was chosen. `width` and
    `height` are in pixels, and None only for captions without images.
    """

    id: str
    caption: str
    location: str | None
    width: int | None
    height: int | None
    seed: int | None = None


class CaptionDataset(Protocol):
    """A set of captioned images. Implementations keep neither images nor the list of entries in memory.

    Attributes:
        name: what it is and where it lies, for messages; names a filter that is in force.
        image_kind: see `ImageKind`.
    """

    @property
    def name(self) -> str: ...

    @property
    def image_kind(self) -> ImageKind: ...

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield every entry in the order of the files, usable or not; each call reads the files again.

        Raises UsageError if a file as a whole cannot be read.
        """
        ...

    def open_image(self, location: str) -> Image.Image:
        """The image at a location, decoded, upright, in mode RGB. May be called from several threads.

        Raises:
            BadImageError: it is missing or cannot be decoded.
            UsageError: the data set has no images.
        """
        ...

    def content(self, location: str) -> bytes:
        """The bytes that make up the image: its file as it is, or the pixels of a drawn one. Raises as `open_image`."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What decides which entries there are, as JSON: digests of annotation files, filters, folders."""
        ...


class BadEntries:
    """Names and counts what could not be used in `source` (a name for messages); more than `limit` are an error."""

    def __init__(self, source: str, limit: int = 0) -> None:
        if limit < 0:
            raise UsageError(f"the number of bad entries allowed is {limit}, but it must be 0 or more")
        self.source = source
        self.limit = limit
        self._found: dict[str, str] = {}

    def add(self, name: str, problem: object) -> None:
        """Count a bad entry; several problems of one entry count once.

        Raises UsageError: it is one too many. The message holds the first bad entry and their number.
        """
        self._found.setdefault(name, f"{name}: {problem}")
        count = len(self._found)
        if count > self.limit:
            many = "1 bad entry" if count == 1 else f"{count} bad entries"
            raise UsageError(
                f"{self.source}: {many} so far, but at most {self.limit} allowed (--max-bad); the first: "
                f"{self.found[0]}"
            )

    @property
    def found(self) -> tuple[str, ...]:
        """The bad entries and what is wrong with each, in the order in which they were met."""
        return tuple(self._found.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Their names alone."""
        return tuple(self._found)

    def __len__(self) -> int:
        return len(self._found)


def clean_caption(text: str) -> str:
    """A caption on one line: every run of white space (line breaks, tabs, no-break spaces) becomes one blank, and those
    at both ends go. Letters, signs and case stay as they are, as do the sequences of Unicode (no normal form).
    """
    return " ".join(text.split())


def clean_captions(texts: Iterable[object]) -> tuple[tuple[str, ...], str | None]:
    """Clean the captions of one image.

    Empty ones are passed over as long as another one is left, and equal ones count once.

    Returns:
        The captions, and what is wrong with them or None.
    """
    captions: dict[str, None] = {}
    problem = "has no caption"
    for text in texts:
        if text is None:
            continue
        if not isinstance(text, str):
            return (), f"has {shortened(repr(text))} where a caption should be"
        problem = "has an empty caption"
        if not is_text(text):
            return (), f"has a caption that is not text: {shortened(ascii(text))}"
        if cleaned := clean_caption(text):
            captions[cleaned] = None
    return tuple(captions), None if captions else problem


def whole_number(value: object) -> int | None:
    """A number that a file gives as a number or as text ("512", 512.0, "512.0"); None for an empty cell.

    Raises ValueError: it is not a whole number.
    """
    if isinstance(value, str):
        value = value.strip()
        try:
            # By way of a float, a seed of 63 bits would change.
            value = int(value) if value else None
        except ValueError:
            value = float(value)  # pyright: ignore[reportArgumentType]
    if isinstance(value, float) and value.is_integer():  # infinity and NaN are not
        return int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not a whole number")


def shortened(text: str, length: int = 60) -> str:
    """The text for a message, cut where it is long."""
    return text if len(text) <= length else text[: length - 3] + "..."


def existing(path: str | Path, what: str) -> Path:
    """The path with ~ expanded. Raises UsageError: nothing is there."""
    found = Path(path).expanduser()
    if not found.exists():
        raise UsageError(f"{path}: no such file or folder, but {what} is needed")
    return found


def choose_split(where: Path, found: Mapping[str, T], split: str | None) -> T:
    """What is found under the split that the user chose, or the only thing that is found.

    Raises UsageError: none was chosen and there are several, or the one chosen is not there.
    """
    names = ", ".join(sorted(filter(None, found))) or "none"
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None:
        raise UsageError(f"{where}: holds the splits {names}; choose one: ?split=NAME after the path")
    if split not in found:
        raise UsageError(f"{where}: has no split {split!r}; it holds {names}")
    return found[split]
