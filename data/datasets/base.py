"""Interface of sets of captioned images, and the count of their bad entries."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from PIL import Image

from ..checks import is_text
from ..errors import UsageError

T = TypeVar("T")
ImageKind = Literal["stored", "drawn", "none"]
"""Whether images are stored in files (which may be missing or damaged), drawn by our own code, or do not exist."""


class BadImageError(UsageError):
    """An image is missing or cannot be decoded; the message names it in one line."""


@dataclass(frozen=True, slots=True)
class CaptionEntry:
    """One image of a data set with its annotations; the image itself is not read.

    Attributes:
        id: name of the image within its data set, the same on every machine.
        captions: cleaned captions (`clean_caption`), none of them empty.
        location: location of the image for the data set's own `open_image`. Reading images is fastest in the order of
            their locations. None without an image.
        width, height: size in pixels if the data set provides it without opening the image, otherwise None.
        seed: seed that the data set gives for generating this image, or None.
        problem: reason why the entry cannot be used, or None.
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
    """A text-image pair of a sample: the fields of its `CaptionEntry`, with the chosen caption. `width` and `height`
    are in pixels, and None only for captions without images.
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
        name: kind and location of the data set for messages, including an active filter.
        image_kind: whether images are stored, drawn or absent.
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
        """Return the image at a location, decoded, upright, in mode RGB. Safe for several threads.

        Raises:
            BadImageError: the image is missing or cannot be decoded.
            UsageError: the data set has no images.
        """
        ...

    def content(self, location: str) -> bytes:
        """Return the bytes of the image: the unchanged file, or the pixels of a drawn image. Raises as `open_image`."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the entries, as JSON: digests of annotation files, filters, folders."""
        ...


class BadEntries:
    """Names and counts unusable entries of `source` (a name for messages); more than `limit` are an error."""

    def __init__(self, source: str, limit: int = 0) -> None:
        if limit < 0:
            raise UsageError(f"the number of bad entries allowed is {limit}, but it must be 0 or more")
        self.source = source
        self.limit = limit
        self._problems: dict[str, str] = {}

    def add(self, name: str, problem: object) -> None:
        """Count a bad entry; several problems of one entry count once.

        Raises UsageError if there are more than `limit`. The message holds the first bad entry and their number.
        """
        self._problems.setdefault(name, f"{name}: {problem}")
        count = len(self._problems)
        if count > self.limit:
            many = "1 bad entry" if count == 1 else f"{count} bad entries"
            raise UsageError(
                f"{self.source}: {many} so far, but at most {self.limit} allowed (--max-bad); the first: "
                f"{self.problems[0]}"
            )

    @property
    def problems(self) -> tuple[str, ...]:
        """Bad entries with their problems, in the order in which they were added."""
        return tuple(self._problems.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the bad entries."""
        return tuple(self._problems)

    def __len__(self) -> int:
        return len(self._problems)


def clean_caption(text: str) -> str:
    """Return a caption on one line: every run of white space (line breaks, tabs, no-break spaces) becomes one space;
    white space at both ends is removed. Other characters and case are kept, without Unicode normalization.
    """
    return " ".join(text.split())


def clean_captions(texts: Iterable[object]) -> tuple[tuple[str, ...], str | None]:
    """Clean the captions of one image.

    Empty captions are skipped if another one is left, and equal captions count once.

    Returns:
        The captions, and their problem or None.
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
    """Return the whole number that a file holds as a number or as text ("512", 512.0, "512.0"); None for an empty cell.

    Raises ValueError if the value is not a whole number.
    """
    if isinstance(value, str):
        value = value.strip()
        try:
            # Not by way of a float, which would change a seed of 63 bits.
            value = int(value) if value else None
        except ValueError:
            value = float(value)  # pyright: ignore[reportArgumentType]
    if isinstance(value, float) and value.is_integer():  # infinity and NaN are not
        return int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not a whole number")


def shortened(text: str, length: int = 60) -> str:
    """Return the text for a message, truncated if it is long."""
    return text if len(text) <= length else text[: length - 3] + "..."


def require_existing(path: str | Path, what: str) -> Path:
    """Return the path with ~ expanded. Raises UsageError if it does not exist."""
    found = Path(path).expanduser()
    if not found.exists():
        raise UsageError(f"{path}: no such file or folder, but {what} is needed")
    return found


def choose_split(where: Path, found: Mapping[str, T], split: str | None) -> T:
    """Return the value of the split that the user chose, or the only value.

    Raises UsageError if no split was chosen and there are several, or the chosen one does not exist.
    """
    names = ", ".join(sorted(filter(None, found))) or "none"
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None:
        raise UsageError(f"{where}: holds the splits {names}; choose one: ?split=NAME after the path")
    if split not in found:
        raise UsageError(f"{where}: has no split {split!r}; it holds {names}")
    return found[split]
