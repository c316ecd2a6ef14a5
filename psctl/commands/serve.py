"""`psctl serve`: replay a trace of requests on the wall clock, or run the engine as a long-lived HTTP service."""

from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from ...data.errors import RunError, UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE
from ...serving.scheduling.systems import DEFAULT_SYSTEM
from ..flags import Flags, flag, given_flags
from ..options.cascade import CascadeOptions, ServedCascade
from ..options.common import MaxBatchSize, OutputFile, SloScale
from ..options.groups import EDITED_TRACE, ServedEngineFlags, TraceFlags
from ..options.http import HttpFlags
from ..options.replicas import REPLICAS, ROUTING, ReplicaFlags, RouterFlags
from ..options.system import PolicyName, SystemName, chosen_system, with_cache_of
from ..options.target import Target
from ..options.templates import TemplateFlags
from ..output import Output
from .http_server import serve_cascade_http, serve_http
from .serve_cascade import serve_cascade
from .simulate_cascade import check_cascade_flags

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
        int, flag("--workers", "Of a cascade: processes that serve, each on one processor or GPU.", min=1, max=256)
    ] = 2,
    http: Annotated[
        bool, flag("--http", "Serve whoever asks over HTTP, with OpenAI's images API, until a signal comes.")
    ] = False,
    trace: TraceFlags,
    slo_scale: SloScale = DEFAULT_SLO_SCALE,
    policy: PolicyName = None,
    system: SystemName = DEFAULT_SYSTEM,
    predictor: Annotated[
        Path | None, flag("--predictor", "Step latencies, for the policy slack.", metavar="FILE", dir_okay=False)
    ] = None,
    max_batch_size: MaxBatchSize = 16,
    output_file: OutputFile = None,
    save_dir: Annotated[
        Path | None, flag("--save-dir", "Save all images, and a copy of the report, in this folder.", file_okay=False)
    ] = None,
    remeasure: Annotated[
        bool, flag("--remeasure", "Measure standalone latencies again instead of using the workspace's.")
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
    """Serve a trace of requests and report latency, queueing and SLO attainment; or with --http serve clients.

    Requests arrive on the wall clock. The run's records, steps, summary and HTML report go to the workspace. Ctrl-C
    ends the run early and keeps what is finished.

    Examples:

        psctl serve --trace poisson --request-rate 2 --num-prompts 60
        psctl serve --trace gamma --cv 3 --duration 60 --resolutions 128,256 --mix 3,1 --system diffusers
        psctl serve --trace requests.jsonl --json --output-file summary.json
        psctl serve --edits 0.5 --mask-ratios public --templates 8 --request-rate 2
        psctl serve --cascade emoji-xl-turbo:1,emoji-xl:50 --workers 2 --request-rate 0.5 --slo-scale 4
        psctl serve --http --port 8000
        psctl serve --http --num-replicas 4 --device cuda
        psctl serve --http --num-replicas 4 --reuse-templates --router mask-aware
        psctl serve --http --reuse-templates
        psctl serve --http --cascade emoji-xl-turbo:1,emoji-xl:50 --workers 2 --slo-scale 4
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.measure.latency import measure_latencies
    from ...profiling.report.html import write_report
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables, slo_doubt
    from ...serving.models.loading import model_geometry
    from ...serving.runs.corrections import correction_of, keep_correction
    from ...serving.runs.outside_profile import warn_of_small_table
    from ...serving.runs.serve import run_serve
    from ...serving.runs.simulate import load_step_file
    from ...serving.runs.step_latencies import latencies_for_serving
    from ...serving.runs.trace_settings import check_slo_scale, draw_requests, parse_slo
    from ...serving.scheduling.policies import get_policy

    given = given_flags(context)
    if http:
        for option in given:
            if option in _OF_TRACES:
                raise UsageError(f"{option} belongs to traces, and --http serves whoever asks: give one or the other")
    else:
        for option in given:
            if option in _OF_SERVERS:
                raise UsageError(f"{option} is for servers: add --http, or leave it out")
    check_cascade_flags(context, cascade, system)
    if cascade is not None and http:
        check_slo_scale(slo_scale)
        serve_cascade_http(
            cascade,
            system,
            web,
            cascading,
            num_workers=workers,
            resolutions=trace.resolutions,
            slo_scale=slo_scale,
            fixed_s=parse_slo(trace.slo),
            seed=trace.seed,
            target=target,
            out=out,
        )
        return
    if cascade is not None:
        serve_cascade(
            cascade,
            system,
            trace,
            cascading,
            num_workers=workers,
            slo_scale=slo_scale,
            output_file=output_file,
            target=target,
            out=out,
        )
        return
    if "--workers" in given:
        raise UsageError("--workers belongs to --cascade LIGHT,HEAVY; without one it is --num-replicas with --http")
    chosen = chosen_system(system, policy, engine)
    if http:
        sizes = target.defaults().resolutions if trace.resolutions is None else tuple(parse_list(trace.resolutions))
        check_slo_scale(slo_scale)
        records = templates.chosen(engine, target.model, given)
        engine = with_cache_of([chosen], engine, given, target, out, reuses_templates=records is not None)
        for option in given:
            if option in ROUTING.names() and not replicas.is_any:
                raise UsageError(f"{option} is of replicas: add --num-replicas, or leave it out")
        serve_http(
            chosen,
            web,
            replicas,
            routing,
            sizes,
            slo_scale,
            parse_slo(trace.slo),
            max_batch_size,
            engine,
            records,
            target,
            out,
        )
        return
    step_latency = None
    if predictor is not None:
        step_latency = load_step_file(predictor, on_warning=out.warn).steady
        warn_of_small_table(step_latency, predictor, max_batch_size, out.warn)
    requests = draw_requests(trace, target.defaults(), geometry=lambda: model_geometry(target.model))
    check_slo_scale(slo_scale)
    require_places(save_dir, target.workspace, file=output_file)

    engine = with_cache_of([chosen], engine, given, target, out)
    served, place = target.load(out, engine)
    if step_latency is None and get_policy(chosen.policy).requires_predictor:
        sizes = [request.resolution for request in requests]
        step_latency = latencies_for_serving(
            served, place, sizes, max_batch_size, measure=measure_latencies, on_note=out.note, on_warning=out.warn
        )
    correction = None
    if step_latency is not None:
        first = [chosen.adapt(request) for request in requests[:max_batch_size]]
        correction = correction_of(served, place, step_latency, first=first, on_note=out.note)
    with out.phases() as start:
        arrivals = cache(lambda: start("requests", len(requests), expected_s=requests[-1].arrival_s))
        outcome = run_serve(
            served,
            requests,
            chosen,
            place,
            dataset=trace.trace if trace.prompts is None else f"{trace.trace}, {trace.prompts.name}",
            config={
                **trace.to_config(),
                "system": system,
                "policy": chosen.policy,
                "predictor": None if predictor is None else str(predictor),
                "engine": engine.engine,
                "cache": served.options.cache.in_words(),
                "slo_scale": slo_scale,
                "max_batch_size": max_batch_size,
                "device": str(served.device),
                "dtype": str(served.dtype).removeprefix("torch."),
            },
            write_report=write_report,
            predictor=correction,
            slo_scale=slo_scale,
            max_batch_size=max_batch_size,
            save_dir=save_dir,
            remeasure=remeasure,
            on_measure=lambda shape: out.note(f"Measuring {shape.resolution} alone on plain diffusers ..."),
            on_doubt=out.warn,
            on_start=lambda: arrivals().show("requests"),
            on_finish=lambda record: arrivals()(),
        )
    out.data(outcome.summary, table=lambda: to_rich(run_tables(outcome.summary)), file=output_file)
    if doubtful := outcome.summary.get("standalone_times_served"):
        out.warn(f"SLOs are far too long: {slo_doubt(doubtful)}")
    if uncached := outcome.summary.get("cache", {}).get("uncached_blocks"):
        out.warn(
            f"the cache's bound of {served.options.cache.memory_mb} MB was too small for {', '.join(uncached)}, which "
            "ran uncached at times; raise --cache-memory"
        )
    if failure := outcome.summary.get("recording_failure"):
        out.warn(f"--cuda-graphs: {failure}; what had not been recorded by then ran without")
    out.note(f"Report: {outcome.run_dir / 'report.html'}")
    served.close()
    if correction is not None:
        keep_correction(served, place, correction, on_note=out.note)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    if repeated := outcome.summary.get("batch_failures"):
        out.warn(f"{repeated['count']} steps of whole batches failed and were repeated in halves; {repeated['first']}")
    failed = [record for record in outcome.records if record.status == "failed"]
    if failed:
        first = f"request {failed[0].request_id}: {failed[0].reason}"
        if len(failed) == len(outcome.records):
            raise RunError(f"all {len(failed)} requests failed; {first}")
        out.warn(f"{len(failed)} of {len(outcome.records)} requests failed; {first}")
