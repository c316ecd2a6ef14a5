"""DiffusionDB's metadata tables: sizes and NSFW scores of images, stored compactly."""

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UsageError
from ..tables.schemas import parquet_file
from .record_entries import NSFW_COLUMNS

_NAME, _PART = "image_name", "part_id"
_FACTS = np.dtype([("key", "u8"), ("width", "u2"), ("height", "u2"), *((score, "f4") for score in NSFW_COLUMNS)])


class ImageFact(NamedTuple):
    """Facts of one image in the table: size in pixels (None if missing) and scores (NaN if missing)."""

    width: int | None
    height: int | None
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts of many images, 20 bytes each, sorted by key.

    Names are stored as the first 64 bits of their BLAKE2 hash. The probability that two of the 14 million names of
    Large share a hash is 5e-6.
    """

    facts: np.ndarray

    def __len__(self) -> int:
        return len(self.facts)

    def of(self, names: list[str]) -> dict[str, ImageFact]:
        """Return the facts of those names that the table lists."""
        if not len(self):
            return {}
        keys = np.array([_key(name) for name in names], dtype=np.uint64)
        facts = self.facts[np.minimum(np.searchsorted(self.facts["key"], keys), len(self) - 1)]
        return {
            name: ImageFact(width or None, height or None, tuple(scores))
            for name, key, (found, width, height, *scores) in zip(names, keys, facts.tolist(), strict=True)
            if found == key
        }


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata table, `metadata.parquet` or `metadata-large.parquet`."""

    path: Path

    def facts(self, parts: Set[int]) -> ImageFacts:
        """Read the facts of the images of some parts, in one pass over six columns.

        Raises UsageError if the file is damaged, or lacks a column.
        """
        pieces = [np.empty(0, _FACTS)]
        columns = [_NAME, _PART, *(_FACTS.names or ())[1:]]
        with parquet_file(self.path, "the metadata") as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise UsageError(f"{self.path}: has no column {', '.join(missing)}, so it is not a DiffusionDB table")
            wanted = pa.array(sorted(parts))
            for batch in file.iter_batches(65536, columns=columns, use_threads=False):
                table = pa.table(batch)
                here = table.filter(pc.is_in(table[_PART].cast(wanted.type), wanted))  # type: ignore[attr-defined]
                piece = np.empty(here.num_rows, _FACTS)
                piece["key"] = [_key(name or "") for name in here[_NAME].to_pylist()]
                for name in columns[2:]:
                    piece[name] = here[name].fill_null(float("nan") if name in NSFW_COLUMNS else 0).to_numpy()
                pieces.append(piece)
        facts = np.concatenate(pieces)
        return ImageFacts(facts[np.argsort(facts["key"], kind="stable")])

    def fingerprint(self) -> list[Any]:
        """Return path, size and time of the file; a digest would read hundreds of MB."""
        state = self.path.stat()
        return [str(self.path.resolve()), state.st_size, state.st_mtime_ns]


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())
