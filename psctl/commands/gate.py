"""`psctl gate`: checks results against the bounds in a file, for CI."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_text
from ..flags import flag
from ..output import Output

EXIT_FAIL, EXIT_NOT_ENOUGH = 1, 3


def gate(
    *,
    gates: Annotated[Path, typer.Argument(metavar="GATES.toml", help="File of gates.", show_default=False)],
    results: Annotated[
        list[Path] | None,
        flag("--results -r", "Result file or run folder, instead of those in GATES.toml; may be repeated."),
    ] = None,
    baseline: Annotated[
        Path | None, flag("--baseline", "Baseline for relative bounds, instead of the one in GATES.toml.")
    ] = None,
    update_baseline: Annotated[
        bool, flag("--update-baseline", "First store the figures of all gates as the new baseline.")
    ] = False,
    junit: Annotated[Path | None, flag("--junit", "Write the verdicts as JUnit XML.", dir_okay=False)] = None,
    markdown: Annotated[
        Path | None, flag("--markdown", "Write the verdicts as a Markdown table.", dir_okay=False)
    ] = None,
    out: Output,
) -> None:
    """Check results of eval, serve and bench against bounds, absolute or relative to a stored baseline.

    A gate fails only if the whole 95 % interval of its figure is beyond the bound, and passes only if all of it is
    within. Exit codes: 0 all pass, 1 one fails, 3 not enough evidence. In GitHub Actions the table is also added to the
    job's summary.

    A metric is the name of a figure: fid, clip of eval; throughput, slo_attainment, latency_p95 of serve and simulate;
    patchedserve@2.slo_attainment, patchedserve.rate_at_95, patchedserve.ratio_at_95 of bench slo;
    SML.ratio of bench steps; SML.interval 3.speedup of bench cache. If the file lacks a name, the error
    lists those that it has. For example, a gate with file = "slo-run", metric = "patchedserve@2.slo_attainment" and
    min = 0.9.

    An interval needs repetitions: three seeds of a sweep, some hundred requests of one served run (more under high
    load), or several runs with repeats = true. With statistic = "min", "max" or "p05" a gate checks the worst images
    instead of the mean. This value is exact for the images drawn, so such a gate always passes or fails.

    Examples:

        psctl gate gates.toml
        psctl gate gates.toml --results run/results.json --junit gates.xml --markdown gates.md
        psctl gate gates.toml --update-baseline
    """
    from ...eval.gates.file import read_gates
    from ...eval.gates.judging import judge, write_baseline
    from ...eval.gates.report import table_of, to_junit, to_markdown

    read = read_gates(gates)
    chosen = tuple(results) if results else read.results
    stored = baseline or read.baseline
    for file in (junit, markdown):
        require_places(file=file)
    if update_baseline:
        if stored is None:
            raise UsageError("--update-baseline needs a file: name it as baseline in the gate file, or with --baseline")
        names = write_baseline(stored, read.gates, chosen)
        out.note(f"Baseline {stored}: stored {', '.join(names)}")
    verdicts = judge(read.gates, chosen, stored, is_new_baseline=update_baseline)
    if junit is not None:
        write_text(junit, to_junit(verdicts))
    if markdown is not None:
        write_text(markdown, to_markdown(verdicts))
    if job_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        # Steps of one job share the file, so it is added to.
        with Path(job_summary).open("a", encoding="utf-8") as file:
            file.write(to_markdown(verdicts))
    found = {each.verdict for each in verdicts}
    code = EXIT_FAIL if "fail" in found else EXIT_NOT_ENOUGH if "not enough evidence" in found else 0
    whole = {0: "pass", EXIT_FAIL: "fail", EXIT_NOT_ENOUGH: "not enough evidence"}[code]
    out.data({"verdict": whole, "gates": verdicts}, table=lambda: table_of(verdicts).to_rich())
    if code:
        raise typer.Exit(code)
