"""Tables of one run, sorted once for all plots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow


@dataclass(frozen=True, slots=True)
class RunData:
    """Records and steps of one run, with the data that plots derive from them. All times are in seconds.

    Attributes:
        records: one per request, by arrival.
        resolutions: names of the resolutions from the smallest to the largest.
        duration_s: end of the time axis of all plots over time, at least a little above 0.
        step_start_s, step_duration_s, step_active: one value per denoising iteration, (n,).
        step_counts: requests in the batch by resolution, one mapping per iteration.
    """

    records: tuple[RequestRecord, ...]
    resolutions: tuple[str, ...]
    duration_s: float
    step_start_s: np.ndarray
    step_duration_s: np.ndarray
    step_active: np.ndarray
    step_counts: tuple[dict[str, int], ...]

    @classmethod
    def of(cls, duration_s: float | None, records: Iterable[RequestRecord], steps: Sequence[StepRow]) -> "RunData":
        """Sort the records and steps of a run; `duration_s` is as in its summary."""
        each = sorted(records, key=lambda record: (record.arrival_s, record.request_id))
        sizes = sorted({record.resolution for record in each}, key=lambda size: (size.pixels, size))
        start, duration = (np.array([getattr(row, name) for row in steps], float) for name in ("start_s", "duration_s"))
        ends = [*(start + duration), *(record.finish_s or record.arrival_s for record in each), duration_s or 0.0]
        return cls(
            records=tuple(each),
            resolutions=tuple(str(size) for size in sizes),
            duration_s=max(float(max(ends)), 1e-3),
            step_start_s=start,
            step_duration_s=duration,
            step_active=np.array([row.active for row in steps], int),
            step_counts=tuple(row.resolutions for row in steps),
        )

    @property
    def completed(self) -> list[RequestRecord]:
        """Records of the requests that have an image."""
        return [record for record in self.records if record.status == "completed"]

    @property
    def judged(self) -> list[RequestRecord]:
        """Records of the requests that had an SLO."""
        return [record for record in self.records if record.slo_met is not None]

    def slo_of(self, resolution: str) -> float | None:
        """Return the SLO in seconds that all requests of a resolution share; None if they have none or several."""
        values = {record.slo_s for record in of_resolution(self.records, resolution)}
        return values.pop() if len(values) == 1 else None

    def composition(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the requests in the batch by resolution over time, as curves that keep each value until the next time.

        Returns:
            Times (n,) in seconds, and per resolution the counts (n,). In a pause between steps of more than 50 ms,
            and of more than two steps, the batch was empty; shorter gaps are the engine's own work.
        """
        start, end = self.step_start_s, self.step_start_s + self.step_duration_s
        if not len(start):
            return start, {}
        pause_s = max(0.05, 2 * float(np.median(self.step_duration_s)))
        is_pause = np.append(start[1:] - end[:-1] > pause_s, True)
        places = np.flatnonzero(is_pause) + 1
        curves = {}
        for name in self.resolutions:
            counts = np.array([counts.get(name, 0) for counts in self.step_counts])
            curves[name] = np.insert(counts, places, 0)
        return np.insert(start, places, end[is_pause]), curves


def of_resolution(records: Iterable[RequestRecord], resolution: str) -> list[RequestRecord]:
    """Return the records with one resolution."""
    return [record for record in records if str(record.resolution) == resolution]


def latencies_of(records: Iterable[RequestRecord]) -> np.ndarray:
    """Return the latencies in seconds of the completed requests among the records, in ascending order."""
    return np.sort(np.array([record.latency_s for record in records if record.latency_s is not None], dtype=float))


def count_open(spans_s: Iterable[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of open spans [begin, end) over time.

    Returns:
        Times (n,) in seconds in order, from 0, and the count (n,) from each time on.
    """
    spans = np.array(list(spans_s), dtype=float).reshape(-1, 2)
    times = np.concatenate([[0.0], spans[:, 0], spans[:, 1]])
    change = np.concatenate([[0], np.ones(len(spans)), -np.ones(len(spans))])
    unique, place = np.unique(times, return_inverse=True)
    return unique, np.cumsum(np.bincount(place, weights=change, minlength=len(unique))).round().astype(int)


def phases_s(record: RequestRecord) -> tuple[float, float, float, float]:
    """Return when a request arrived, joined the batch, left it and ended; a phase that it did not reach is empty."""
    finish = record.arrival_s if record.finish_s is None else max(record.finish_s, record.arrival_s)
    admitted = finish if record.admitted_s is None else record.admitted_s
    denoised = finish if record.denoise_end_s is None else record.denoise_end_s
    return record.arrival_s, admitted, denoised, finish
