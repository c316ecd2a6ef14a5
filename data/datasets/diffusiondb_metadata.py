"""DiffusionDB's metadata tables: sizes and NSFW scores of images, kept small."""

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UsageError
from .record_entries import NSFW_COLUMNS

_NAME, _PART, _SIZE = "image_name", "part_id", ("width", "height")


class ImageFact(NamedTuple):
    """What the table says of one image: size in pixels (None: not said) and scores (NaN: not said)."""

    width: int | None
    height: int | None
    image_nsfw: float
    prompt_nsfw: float

    @property
    def has_scores(self) -> bool:
        return not (np.isnan(self.image_nsfw) or np.isnan(self.prompt_nsfw))


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts of many images, 20 bytes each.

    Names are kept as the first 64 bits of their BLAKE2 hash: among the 14 million of Large two names share one with a
    probability of 5e-6.
    """

    keys: np.ndarray  # (n,) uint64, sorted
    scores: np.ndarray  # (n, 2) float32
    sizes: np.ndarray  # (n, 2) uint16

    def of(self, names: list[str]) -> dict[str, ImageFact]:
        """The facts of those among the names that the table lists."""
        if not len(self.keys):
            return {}
        keys = np.array([_key(name) for name in names], dtype=np.uint64)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found = {}
        for name, place, is_there in zip(names, places, self.keys[places] == keys, strict=True):
            if is_there:
                width, height = (int(side) or None for side in self.sizes[place])
                found[name] = ImageFact(width, height, *(float(score) for score in self.scores[place]))
        return found


@dataclass(frozen=True, slots=True)
class Metadata:
    """`metadata.parquet` or `metadata-large.parquet`."""

    path: Path

    def facts(self, parts: Set[int]) -> ImageFacts:
        """Read the facts of the images of some parts, in one pass over four or six columns.

        Raises:
            UsageError: the file is damaged, or has other columns.
        """
        keys: list[np.ndarray] = [np.empty(0, np.uint64)]
        scores: list[np.ndarray] = [np.empty((0, 2), np.float32)]
        sizes: list[np.ndarray] = [np.empty((0, 2), np.uint16)]
        columns = (_NAME, _PART, *_SIZE, *NSFW_COLUMNS)
        try:
            # Opened here, not by Arrow, whose messages repeat the path.
            with self.path.open("rb") as raw, pq.ParquetFile(raw, pre_buffer=False) as file:
                missing = [name for name in columns if name not in file.schema_arrow.names]
                if missing:
                    raise UsageError(f"{self.path}: has no column {', '.join(missing)}, so it is no DiffusionDB table")
                wanted = sorted(parts)
                for batch in file.iter_batches(65536, columns=list(columns), use_threads=False):
                    table = pa.table(batch)
                    here = table.filter(pa.array(np.isin(table[_PART].to_numpy(), wanted)))
                    names = here[_NAME].to_pylist()
                    keys.append(np.fromiter((_key(name or "") for name in names), np.uint64, len(names)))
                    scores.append(_side_by_side(here, NSFW_COLUMNS, pa.float32(), float("nan")))
                    sizes.append(_side_by_side(here, _SIZE, pa.uint16(), 0))
        except (pa.ArrowException, OSError) as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or not parquet"
            raise UsageError(f"{self.path}: cannot read the metadata: {what}") from error
        all_keys = np.concatenate(keys)
        order = np.argsort(all_keys, kind="stable")
        return ImageFacts(all_keys[order], np.concatenate(scores)[order], np.concatenate(sizes)[order])

    def fingerprint(self) -> list[Any]:
        """Path, size and time of the file, which is hundreds of MB."""
        state = self.path.stat()
        return [str(self.path.resolve()), state.st_size, state.st_mtime_ns]


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


def _side_by_side(table: pa.Table, names: tuple[str, ...], kind: pa.DataType, empty: float) -> np.ndarray:
    columns = [table[name].cast(kind).fill_null(empty).to_numpy() for name in names]
    return np.stack(columns, axis=1)
