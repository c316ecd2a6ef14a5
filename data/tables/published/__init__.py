"""Bundled figures: latency tables measured on stated machines, cascades, and figures that papers print.

A latency table is named after its model and was written by `psctl profile latency`, with the circumstances of the
measurement. Simulations use it before anything has been profiled. The same holds for the files of `psctl profile
cascade`, in a folder named after both models. A paper's figures are a JSON file.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PrintedFigure:
    """A figure that a paper prints.

    Attributes:
        quantity: name of the quantity, with its unit.
        resolution: resolution of the image.
        num_ranks: number of devices that draw the image.
        value: value as printed.
        where: place in the paper.
    """

    quantity: str
    resolution: str
    num_ranks: int
    value: float
    where: str


def published_table(model: str) -> Path | None:
    """Return the table of a bundled model, or None if there is none."""
    tables = {path.stem: path for path in Path(__file__).parent.glob("*.parquet")}
    return tables.get(model)


def published_cascade(cascade: str) -> Path | None:
    """Return the folder with profile and bank of `LIGHT:STEPS,HEAVY:STEPS`, or None if there is none."""
    folders = {path.parent.name: path.parent for path in Path(__file__).parent.glob("*/cascade.json")}
    return folders.get(published_cascade_name(cascade))


def published_cascade_name(cascade: str) -> str:
    """Return the name of the folder of `LIGHT:STEPS,HEAVY:STEPS`."""
    return cascade.replace(":", "-").replace(",", "-")


def printed_figures(paper: str) -> Iterator[PrintedFigure]:
    """Yield the figures that a paper prints, in its order."""
    content = json.loads((Path(__file__).parent / f"{paper}.json").read_text(encoding="utf-8"))
    for where, quantity, resolution, num_ranks, value in content["figures"]:
        yield PrintedFigure(quantity, resolution, num_ranks, value, where)
