"""Step latencies for a run that names none: the workspace's, a coarse table measured now, or a published table.

The caller provides the function that measures the coarse table. This module imports torch only to serve; simulations do
not need it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ...data.files import quarantine
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts, describe
from ...data.tables.latency import TABLE_PATTERN, LatencyTable, read_latencies
from ...data.tables.published import published_table
from ...data.workspace import ModelWorkspace, Workspace
from ...training.latency.predictor import PREDICTOR_FILE, LatencyPredictor
from ..editing.profile import PATTERN
from ..options import Calibrate
from ..scheduling.policies import StepLatencyPredictor
from ..scheduling.step_latency import TableLatency
from ..scheduling.systems import System
from .notes import Notify
from .step_file import step_sources

if TYPE_CHECKING:
    from ..models.served import ServedModel

COARSE_COMBINATIONS = 16
"""Maximum number of combinations of requests in a coarse table."""
COARSE_BUDGET_S = 20.0
"""Seconds after which no further combination of a coarse table is measured."""


MeasureLatencies = Callable[..., LatencyTable]
"""Function that measures the coarse table of a model without a cache, given the resolutions and the largest batch, and
keeps it in the workspace: `profiling.measure.for_serving.measure_latencies`, with its arguments. Raises RunError,
OSError, and KeyboardInterrupt on Ctrl-C.
"""


def latencies_for_serving(
    model: "ServedModel",
    workspace: ModelWorkspace,
    resolutions: Sequence[Resolution],
    max_batch_size: int,
    *,
    measure: MeasureLatencies,
    calibrate: Calibrate = "auto",
    on_note: Notify,
    on_warning: Notify,
) -> StepLatencyPredictor:
    """Return step latencies of this model, machine and engine from the workspace, or else from a coarse table measured
    now.

    A fitted predictor takes precedence over a table, and a newer table over an older one. A measured table is kept in
    the workspace for the next run; `psctl profile` and `psctl train-predictor` produce better latencies.

    Args:
        model: the loaded model.
        workspace: workspace of the model.
        resolutions: resolutions of the requests that will be served.
        max_batch_size: maximum size of a batch that will be served.
        measure: measures the coarse table.
        calibrate: whether it is measured only if the workspace has no latencies, or never, or always.
        on_note: called with a line about the latencies in use.
        on_warning: called with a line about possible inaccuracies.

    Raises:
        UsageError: nothing may be measured, and the workspace has no latencies.
        RunError, KeyboardInterrupt, OSError: as `MeasureLatencies`.
    """
    from ..models.build import without_cache
    from .contention import MAX_WAITED, Contention
    from .machine import run_facts

    about, wanted = run_facts(model), tuple(sorted(set(resolutions)))
    fitted = None if calibrate == "force" else workspace.find_predictor(PREDICTOR_FILE)
    if fitted is not None:
        try:
            predictor = LatencyPredictor.load(fitted, expect=about, on_warning=on_warning)
            for resolution in wanted:
                predictor.step_latency_s((resolution,))
        except UsageError as error:
            on_note(f"The workspace's latency predictor is not used: {error}")
        else:
            return predictor
    tables = [] if calibrate == "force" else tables_measured_under(about, workspace.root / "tables")
    for path, table in tables:
        if set(wanted) <= measured_alone(table):
            on_note(f"Step latencies: {path}")
            return step_sources(table)[0]
    if calibrate == "off":
        raise UsageError(
            f"--calibrate off measures nothing, and no step latencies of this model, machine and engine are in "
            f"{workspace.root}: psctl profile latency measures them, and --system patched-fcfs needs none"
        )
    missing = f"No step latencies of this model, machine and engine are in {workspace.root}"
    on_note(
        f"{'--calibrate force' if calibrate == 'force' else missing}: measuring a coarse table, at most "
        f"{COARSE_BUDGET_S:.0f} s (psctl profile && psctl train-predictor make a better one) ..."
    )
    # The savings of the cache depend on the requests; a correction learns them while serving.
    with Contention() as contention:
        table = measure(without_cache(model), workspace, wanted, max_batch_size)
    if (waited := contention.share or 0.0) > MAX_WAITED:
        on_warning(
            f"other work had the processor for {waited:.0%} of the time while the table was measured; it is corrected "
            "while serving (psctl profile on a quiet machine makes a better one)"
        )
    return step_sources(table)[0]


def coarseness_notes(latency: StepLatencyPredictor) -> list[str]:
    """Return a note for readers of the results that step latencies come from a coarse table; empty if they do not."""
    if not isinstance(latency, TableLatency) or latency.num_measured > COARSE_COMBINATIONS:
        return []
    return [f"step latencies from a coarse table of {latency.num_measured} batches (psctl profile makes a better one)"]


def table_for_simulation(
    workspace: Workspace, model: str, resolutions: Sequence[Resolution], *, on_note: Notify
) -> Path:
    """Return the latency table for a simulation that names none: the workspace's newest of the model, or else a
    published one.

    Args:
        workspace: the whole workspace; tables of any device of the model count.
        model: name, path or hub id.
        resolutions: resolutions of the requests.
        on_note: called with a line that names the table and the circumstances of its measurement.

    Raises:
        UsageError: neither has a table of the model with all resolutions.
    """
    wanted = set(resolutions)
    folder = workspace.for_model(model, "any").root.parent
    tables = [path for device in sorted(folder.glob("*/tables")) for path in _newest_first(device)]
    published = published_table(model)
    for path in (*tables, *([] if published is None else [published])):
        table = read_latencies(path)
        if wanted <= measured_alone(table):
            origin = "the table in the box" if path == published else str(path)
            measured = "" if table.circumstances is None else f" ({describe(table.circumstances.to_json())})"
            on_note(f"Step latencies: {origin}{measured}")
            return path
    sizes = ", ".join(map(str, sorted(wanted)))
    raise UsageError(
        f"no table of step latencies has {sizes} for {model}, neither in {folder} nor in the box: measure one (psctl "
        "profile latency) or name one (--latency)"
    )


def edit_profile_for_simulation(
    requests: Sequence[Request],
    system: System,
    given: Path | None,
    workspace: Workspace,
    model: str,
    *,
    on_note: Notify,
) -> Path | None:
    """Return the profile for a simulation of edits: the given one, or else the workspace's newest of the model on any
    device, which `on_note` names. None for a trace without edits that can read records.

    Raises:
        UsageError: there is no profile, a profile is given for a trace without such edits, or the system's engine reads
            no records.
    """
    if all(request.edited is None or request.references for request in requests):
        if given is not None:
            raise UsageError(
                "--edit-profile is of edits, and the trace has none that read records: add --edits, or leave it out"
            )
        return None
    if system.engine != "patched":
        raise UsageError(f"edits read records on the patched engine only, and {system.name} runs on {system.engine}")
    if given is not None:
        return given
    folder = workspace.for_model(model, "any").root.parent
    found = [path for device in folder.glob("*/tables") for path in device.glob(PATTERN)]
    if not found:
        raise UsageError(f"there is no profile of edits of {model} in {folder}: psctl profile edits makes one")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    on_note(f"Edits: {newest}")
    return newest


def tables_measured_under(about: RunFacts, *folders: Path) -> Iterator[tuple[Path, LatencyTable]]:
    """Yield the latency tables of the folders that were measured under these circumstances, each folder's newest first.

    Unreadable tables are put aside with a warning.
    """
    for path in itertools.chain.from_iterable(map(_newest_first, folders)):
        try:
            table = read_latencies(path)
        except UsageError as error:
            quarantine(path, str(path), error)
            continue
        if table.circumstances is not None and table.circumstances.difference(about) is None:
            yield path, table


def _newest_first(folder: Path) -> list[Path]:
    """Return the latency tables of a folder, newest first."""
    return sorted(folder.glob(TABLE_PATTERN), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def measured_alone(table: LatencyTable) -> set[Resolution]:
    """Return the resolutions with a batch of one request in a table, the corner that interpolation starts from."""
    return {next(iter(row.counts)) for row in table.rows if row.num_requests == 1}
