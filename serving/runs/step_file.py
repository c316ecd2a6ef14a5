"""Files of step latencies that a user names: fitted predictors and tables. This module imports no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...data.tables.latency import LatencyTable, read_latencies
from ...training.latency.predictor import LatencyPredictor
from ..editing.profile import EditProfile
from ..options import EngineName
from ..scheduling.policies import StepLatencyPredictor
from ..scheduling.step_latency import TableLatency
from ..simulator.step_durations import ProfiledSteps
from .outside_profile import warn_of_small_table


class StepFile(NamedTuple):
    """Step latencies of a file: steady steps, first steps if they were measured, and the circumstances of the
    measurement if they are known.
    """

    steady: StepLatencyPredictor
    first: StepLatencyPredictor | None
    facts: RunFacts | None

    def of(self, engine: EngineName) -> ProfiledSteps:
        """Return the profiled steps of an engine; the plain engine takes a pass for each resolution."""
        return ProfiledSteps(self.steady, self.first, by_resolution=engine == "plain")

    def with_edits(self, profile: EditProfile) -> Self:
        """Return the step latencies combined with those of edits that read records.

        Raises UsageError if the file is known to be of another model, machine or engine than the profile.
        """
        difference = None if self.facts is None else profile.facts.difference(self.facts)
        if difference is not None:
            raise UsageError(
                f"the profile of edits does not go with the step latencies: it {difference}; measure both alike (psctl "
                "profile latency, psctl profile edits)"
            )
        first = None if self.first is None else profile.first_latency(self.first)
        return self._replace(steady=profile.steady_latency(self.steady), first=first)


def load_step_file(path: Path, *, on_warning: Callable[[str], None] | None = None) -> StepFile:
    """Load a fitted predictor (safetensors of `psctl train-predictor latency`) or a table (parquet of `psctl profile
    latency`, CSV or parquet of another program). `on_warning` is as in `LatencyPredictor`.

    Raises:
        UsageError: the file is neither; the message states the reason.
    """
    if path.suffix.lower() == ".safetensors":
        predictor = LatencyPredictor.load(path, on_warning=on_warning)
        return StepFile(predictor, None, predictor.about.circumstances)
    table = read_latencies(path)
    return StepFile(*step_sources(table), table.circumstances)


def latencies_of_file(path: Path, max_batch_size: int, *, on_warning: Callable[[str], None]) -> StepLatencyPredictor:
    """Return the steady step latencies of a fitted predictor or a table. Raises UsageError: it is neither.

    `on_warning` is called with a line about latencies that are extrapolated, as those of batches larger than any in the
    file.
    """
    latency = load_step_file(path, on_warning=on_warning).steady
    warn_of_small_table(latency, path, max_batch_size, on_warning)
    return latency


def step_sources(table: LatencyTable) -> tuple[TableLatency, TableLatency | None]:
    """Return steady and first steps of a measured table; first steps are None if a row has none (a table of another
    program).
    """

    def source(times: Mapping[tuple[Resolution, ...], float | None]) -> TableLatency:
        return TableLatency({batch: ms / 1e3 for batch, ms in times.items() if ms is not None})

    batches = {tuple(size for size, count in row.counts.items() for _ in range(count)): row for row in table.rows}
    firsts = {batch: row.first_step_median_ms for batch, row in batches.items()}
    steady = source({batch: row.median_ms for batch, row in batches.items()})
    return steady, source(firsts) if all(ms is not None for ms in firsts.values()) else None
