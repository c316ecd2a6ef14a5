"""The tables of one run, put in order once for all plots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...data.resolution import Resolution


@dataclass(frozen=True, slots=True)
class RunData:
    """Records and steps of one run, with what the plots derive from them.

    Attributes:
        records: the records table with a `resolution` column ("128x128") added; times in seconds.
        steps: the steps table.
        resolutions: names of the resolutions from the smallest to the largest.
        duration_s: end of the time axis of all plots over time, at least a little above 0.
    """

    records: pd.DataFrame
    steps: pd.DataFrame
    resolutions: tuple[str, ...]
    duration_s: float

    @classmethod
    def of(cls, summary: Mapping[str, Any], records: pd.DataFrame, steps: pd.DataFrame) -> "RunData":
        """Tables as `data.tables.read_frame` or `serving.metrics.records_frame` give them; they are not changed."""
        records = records.copy()
        sizes = [Resolution(int(w), int(h)) for w, h in zip(records["width"], records["height"], strict=True)]
        records["resolution"] = [str(size) for size in sizes]
        ordered = sorted(set(sizes), key=lambda size: (size.pixels, size))
        last = [float(records[name].max()) for name in ("arrival_s", "finish_s") if records[name].notna().any()]
        if len(steps):
            last.append(float((steps["start_s"] + steps["duration_s"]).max()))
        last.append(float(summary.get("duration") or 0.0))
        return cls(records, steps, tuple(str(size) for size in ordered), max(*last, 1e-3))

    @property
    def completed(self) -> pd.DataFrame:
        """The records of the requests that have an image."""
        return self.records[self.records["status"] == "completed"]

    def of_resolution(self, frame: pd.DataFrame, resolution: str) -> pd.DataFrame:
        """The rows of `records`, or of a part of it, with one resolution."""
        return frame[frame["resolution"] == resolution]

    def slo_of(self, resolution: str) -> float | None:
        """The SLO in seconds that all requests of a resolution share; None if they have none or several."""
        values = self.of_resolution(self.records, resolution)["slo_s"].dropna().unique()
        return float(values[0]) if len(values) == 1 else None

    def composition(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Requests in the batch by resolution over time, as curves that keep each value until the next time.

        Returns:
            Times (n,) in seconds, and per resolution the counts (n,). In a pause between steps of more than 50 ms,
            and of more than two steps, the batch was empty; shorter gaps are the engine's own work.
        """
        start = self.steps["start_s"].to_numpy(dtype=float)
        end = start + self.steps["duration_s"].to_numpy(dtype=float)
        composition = [dict(value) for value in self.steps["resolutions"]]
        if not len(start):
            return np.zeros(0), {}
        pause_s = max(0.05, 2 * float(np.median(end - start)))
        is_pause = np.append(start[1:] - end[:-1] > pause_s, True)
        pauses = np.flatnonzero(is_pause) + 1
        times = np.insert(start, pauses, end[is_pause])
        names = [name for name in self.resolutions if any(name in counts for counts in composition)]
        curves = {
            name: np.insert(np.array([counts.get(name, 0) for counts in composition]), pauses, 0) for name in names
        }
        return times, curves


def count_between(begin_s: pd.Series, end_s: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """How many intervals [begin, end) are open over time.

    Returns:
        Times (n,) in seconds in order, from 0, and the count (n,) from each time on.
    """
    begin, end = begin_s.to_numpy(dtype=float), end_s.to_numpy(dtype=float)
    times = np.concatenate([[0.0], begin, end])
    change = np.concatenate([[0], np.ones(len(begin)), -np.ones(len(end))])
    unique, place = np.unique(times, return_inverse=True)
    return unique, np.cumsum(np.bincount(place, weights=change, minlength=len(unique))).round().astype(int)
