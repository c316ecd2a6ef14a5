"""Latency tables in the box: measured on stated machines, for simulations before anything was profiled.

Each is named after its model and written by `psctl profile latency`, which also wrote down what it was measured on.
"""

from pathlib import Path


def published_table(model: str) -> Path | None:
    """The table of a bundled model, or None where there is none."""
    tables = {path.stem: path for path in Path(__file__).parent.glob("*.parquet")}
    return tables.get(model)
