"""`psctl serve`: replay a trace of requests on the wall clock, or run the engine as a long-lived HTTP service."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.errors import RunError, UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE
from ...serving.scheduling.systems import DEFAULT_SYSTEM
from ..flags import Flags, flag, given_flags
from ..options.cascade import CascadeOptions, CascadePlan, ServedCascade
from ..options.common import MaxBatchSize, OutputFile, SloScale
from ..options.groups import EDITED_TRACE, ServedEngineFlags, TraceFlags
from ..options.http import HttpFlags
from ..options.replicas import REPLICAS, ROUTING, ReplicaFlags, RouterFlags
from ..options.system import PolicyName, SystemName, chosen_system, with_cache_of
from ..options.target import Target
from ..options.templates import TemplateFlags
from ..output import Output
from .http_server import ServerPlan, serve_cascade_http, serve_http
from .serve_cascade import serve_cascade
from .simulate_cascade import check_cascade_flags

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel
    from ...serving.options import EngineOptions
    from ...serving.runs.serve import ServeOutcome, ServePlan

_OF_TRACES = (EDITED_TRACE.names() | {"--output-file", "--save-dir", "--predictor", "--remeasure"}) - {
    "--resolutions",
    "--slo",
}
_OF_SERVERS = Flags.of(HttpFlags).names() | REPLICAS.names() | ROUTING.names() | Flags.of(TemplateFlags).names()


def serve(
    *,
    context: typer.Context,
    cascade: ServedCascade = None,
    workers: Annotated[
        int,
        flag(
            "--workers",
            "Cascade: number of worker processes, each on one processor or GPU.",
            min=1,
            max=256,
            rich_help_panel=CascadeOptions.PANEL,
        ),
    ] = 2,
    http: Annotated[
        bool, flag("--http", "Serve clients over HTTP with OpenAI's images API, until a signal arrives.")
    ] = False,
    trace: TraceFlags,
    slo_scale: SloScale = DEFAULT_SLO_SCALE,
    policy: PolicyName = None,
    system: SystemName = DEFAULT_SYSTEM,
    predictor: Annotated[
        Path | None,
        flag(
            "--predictor", "Predictor of step latencies, for policies that use slack.", metavar="FILE", dir_okay=False
        ),
    ] = None,
    max_batch_size: MaxBatchSize = 16,
    output_file: OutputFile = None,
    save_dir: Annotated[
        Path | None, flag("--save-dir", "Save all images and a copy of the report in this folder.", file_okay=False)
    ] = None,
    remeasure: Annotated[
        bool, flag("--remeasure", "Measure standalone latencies again instead of reading them from the workspace.")
    ] = False,
    cascading: CascadeOptions,
    engine: ServedEngineFlags,
    web: HttpFlags,
    replicas: ReplicaFlags,
    routing: RouterFlags,
    templates: TemplateFlags,
    target: Target,
    out: Output,
) -> None:
    """Serve a trace and report latency, queueing and SLO attainment, or serve clients with --http.

    Requests arrive on the wall clock. Records, steps, a summary and an HTML report are written to the workspace. Ctrl-C
    ends the run early and keeps finished requests.

    Examples:

        psctl serve --http --port 8000
        psctl serve --http --num-replicas 4 --device cuda
        psctl serve --http --num-replicas 4 --reuse-templates --router mask-aware
        psctl serve --trace poisson --request-rate 2 --num-prompts 60
        psctl serve --trace requests.jsonl --json --output-file summary.json
        psctl serve --cascade emoji-xl-turbo:1,emoji-xl:50 --workers 2 --slo-scale 4
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...serving.runs.serve import ServePlan
    from ...serving.runs.trace_settings import check_slo_scale, parse_slo

    given = given_flags(context)
    _check_given(given, http=http)
    check_cascade_flags(context, cascade, system)
    if cascade is not None:
        plan = CascadePlan(cascade, system, trace, cascading, workers, slo_scale)
        if http:
            serve_cascade_http(plan, web, target, out)
        else:
            serve_cascade(plan, output_file, target, out)
        return
    if "--workers" in given:
        raise UsageError("--workers belongs to --cascade LIGHT,HEAVY; without one it is --num-replicas with --http")
    chosen = chosen_system(system, policy, engine)
    if not http:
        traced = ServePlan(trace, chosen, predictor, slo_scale, max_batch_size, save_dir, remeasure)
        _serve_trace(traced, engine, given, output_file, target, out)
        return
    sizes = target.defaults().resolutions if trace.resolutions is None else tuple(parse_list(trace.resolutions))
    check_slo_scale(slo_scale)
    records = templates.chosen(engine, target.model, given)
    engine = with_cache_of([chosen], engine, given, target, out, reuses_templates=records is not None)
    if not replicas.is_any and (routed := [option for option in given if option in ROUTING.names()]):
        raise UsageError(f"{routed[0]} is of replicas: add --num-replicas, or leave it out")
    slos = slo_scale, parse_slo(trace.slo)
    serve_http(ServerPlan(chosen, sizes, *slos, max_batch_size, engine, records, web, replicas, routing), target, out)


def _check_given(given: dict[str, object], *, http: bool) -> None:
    """Raise UsageError if an option is given that has no effect on what serves, a trace or clients."""
    for option in given:
        if http and option in _OF_TRACES:
            raise UsageError(f"{option} belongs to traces, and --http serves whoever asks: give one or the other")
        if not http and option in _OF_SERVERS:
            raise UsageError(f"{option} is for servers: add --http, or leave it out")


def _serve_trace(
    plan: "ServePlan",
    engine: "EngineOptions",
    given: dict[str, object],
    output_file: Path | None,
    target: Target,
    out: Output,
) -> None:
    """Serve a trace, print its figures, and keep what was learnt. Raises as `ReadyTrace.serve`."""
    trace = plan.ready(target.model, on_warning=out.warn)
    require_places(plan.save_dir, target.workspace, file=output_file)
    # Imported here, because it takes longer than what is checked above.
    from ...profiling.measure.for_serving import measure_latencies
    from ...profiling.report.html import write_report
    from ...serving.runs.corrections import keep_correction

    model, place = target.load(out, with_cache_of([plan.system], engine, given, target, out))
    out.note(f"{model.about}.")
    with out.phases() as start:
        requests = trace.requests
        arrivals = cache(lambda: start("requests", len(requests), expected_s=requests[-1].arrival_s))
        outcome = trace.serve(
            model,
            place,
            measure=measure_latencies,
            write_report=write_report,
            on_note=out.note,
            on_warning=out.warn,
            on_start=lambda: arrivals().show("requests"),
            on_finish=lambda record: arrivals()(),
        )
    _print(outcome, model, output_file, out)
    model.close()
    if outcome.correction is not None:
        keep_correction(model, place, outcome.correction, on_note=out.note)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    _check_served(outcome, out)


def _print(outcome: "ServeOutcome", model: "ServedModel", output_file: Path | None, out: Output) -> None:
    """Print the figures of a run, and warn of what its reader should know."""
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables, slo_doubt

    summary = outcome.summary
    out.data(summary, table=lambda: to_rich(run_tables(summary)), file=output_file)
    if doubtful := summary.get("standalone_times_served"):
        out.warn(f"SLOs are far too long: {slo_doubt(doubtful)}")
    if uncached := summary.get("cache", {}).get("uncached_blocks"):
        out.warn(
            f"the cache's bound of {model.options.cache.memory_mb} MB was too small for {', '.join(uncached)}, which "
            "ran uncached at times; raise --cache-memory"
        )
    if failure := summary.get("recording_failure"):
        out.warn(f"--cuda-graphs: {failure}; what had not been recorded by then ran without")
    out.note(f"Report: {outcome.run_dir / 'report.html'}")


def _check_served(outcome: "ServeOutcome", out: Output) -> None:
    """Warn of requests and batches that failed. Raises RunError if all requests failed."""
    if repeated := outcome.summary.get("batch_failures"):
        out.warn(f"{repeated['count']} steps of whole batches failed and were repeated in halves; {repeated['first']}")
    failed = [record for record in outcome.records if record.status == "failed"]
    if failed:
        first = f"request {failed[0].request_id}: {failed[0].reason}"
        if len(failed) == len(outcome.records):
            raise RunError(f"all {len(failed)} requests failed; {first}")
        out.warn(f"{len(failed)} of {len(outcome.records)} requests failed; {first}")
