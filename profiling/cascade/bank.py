"""Bank of prompts that both models of a cascade have drawn, with the confidence of each light image. No torch.

Because the engine is exact, the image in the bank is the image that a server would have drawn. A simulated trace over
the bank's prompts is therefore judged by real images (DiffServe section 4.1 draws 5,000 prompts).
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.cascade import DEFERRAL
from ...data.tables.schemas import about_of, read_table, write_table

BANK_FILE, FEATURES_FILE = "bank.parquet", "features.safetensors"


def bank_name(key: str, reuse: float | None) -> str:
    """Return the name of a bank's folder. It includes `reuse` for a bank whose heavy images start from light ones with
    this strength.
    """
    return f"bank-{key}" if reuse is None else f"bank-{key}-reuse-{reuse:g}"


@dataclass(frozen=True, slots=True)
class BankEntry:
    """One prompt of a bank.

    Attributes:
        prompt, resolution, seed: parameters of the request.
        confidence: confidence of the light image; NaN if it is not a number.
    """

    prompt: str
    resolution: Resolution
    seed: int
    confidence: float


@dataclass(frozen=True, slots=True)
class Bank:
    """Entries of a bank; the index of an entry is its row in the features.

    Attributes:
        entries: the entries.
        about: origin of the images: models, discriminator, data set and folders, as JSON.
    """

    entries: tuple[BankEntry, ...]
    about: Mapping[str, Any]

    @property
    def confidences(self) -> list[float]:
        """Confidences of all entries."""
        return [entry.confidence for entry in self.entries]

    def save(self, folder: Path) -> None:
        """Write the table into a folder, atomically. Raises OSError."""
        rows = [
            {
                "place": place,
                "prompt": entry.prompt,
                "width": entry.resolution.width,
                "height": entry.resolution.height,
                "seed": entry.seed,
                "confidence": None if entry.confidence != entry.confidence else entry.confidence,
            }
            for place, entry in enumerate(self.entries)
        ]
        write_table(folder / BANK_FILE, DEFERRAL, rows, about=self.about)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the bank of a folder. Raises UsageError if the folder has no bank, or a damaged or empty one."""
        path = folder / BANK_FILE
        if not path.is_file():
            raise UsageError(f"{folder}: holds no {BANK_FILE}; psctl profile cascade makes a bank")
        table = read_table(path, DEFERRAL)
        entries = tuple(
            BankEntry(
                row["prompt"],
                Resolution(row["width"], row["height"]).checked(),
                row["seed"],
                float("nan") if row["confidence"] is None else row["confidence"],
            )
            for row in table.to_pylist()
        )
        if not entries:
            raise UsageError(f"{path}: the bank is empty")
        return cls(entries, about_of(table.schema, path))

    def dealt(self, requests: Sequence[Request], seed: int) -> tuple[list[Request], list[int]]:
        """Return the requests with prompts and seeds of entries of their resolutions, and the index of each entry.

        All entries of a resolution are assigned in random order before any is assigned again.

        Raises UsageError if no entry has a request's resolution.
        """
        places: dict[Resolution, list[int]] = defaultdict(list)
        for place, entry in enumerate(self.entries):
            places[entry.resolution].append(place)
        chance = random.Random(seed)
        for each in places.values():
            chance.shuffle(each)
        used: dict[Resolution, int] = defaultdict(int)
        found, dealt = [], []
        for request in requests:
            own = places.get(request.resolution)
            if own is None:
                raise UsageError(
                    f"the bank has no image of {request.resolution}, only of {', '.join(sorted(map(str, places)))}"
                )
            place = own[used[request.resolution] % len(own)]
            used[request.resolution] += 1
            entry = self.entries[place]
            found.append(replace(request, prompt=entry.prompt, seed=entry.seed))
            dealt.append(place)
        return found, dealt
