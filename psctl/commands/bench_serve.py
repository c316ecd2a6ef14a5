"""`psctl bench serve`: sends load to a server of OpenAI's images API, ours or another."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

from ...data.errors import MissingExtraError, RunError, UsageError
from ...data.files import require_places
from ...serving.runs.trace_settings import TraceSettings, check_slo_scale
from ..flags import flag
from ..options.common import OutputFile
from ..options.groups import TRACE
from ..options.http import KEY_VARIABLE
from ..output import Output

_DEFAULT_NUM_PROMPTS = 32


def bench_serve(
    *,
    base_url: Annotated[str, flag("--base-url", "Base URL of the API.", metavar="URL")] = "http://127.0.0.1:8000/v1",
    endpoint: Annotated[str, flag("--endpoint", "Path below the base URL.")] = "/images/generations",
    served_model: Annotated[
        str | None, flag("--served-model", "Model name in the requests. Default: the one that the server reports.")
    ] = None,
    server_profile: Annotated[
        Path | None,
        flag(
            "--server-profile",
            "Names of the parameters on the server (TOML), for those that it does not describe itself.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    trace: Annotated[TraceSettings, TRACE.without("slo")],
    random_request_config: Annotated[
        str | None,
        flag(
            "--random-request-config",
            'JSON list of {"width", "height", "num_inference_steps", "weight"}, instead of --resolutions and --mix.',
            metavar="JSON",
        ),
    ] = None,
    max_concurrency: Annotated[int | None, flag("--max-concurrency", "Maximum number of open requests.", min=1)] = None,
    warmup_requests: Annotated[
        int, flag("--warmup-requests", "Number of warm-up requests of each size, sent one after the other.", min=0)
    ] = 2,
    warmup_num_inference_steps: Annotated[
        int | None,
        flag("--warmup-num-inference-steps", "Number of steps of warm-up requests. Default: as in the load.", min=1),
    ] = None,
    slo: Annotated[
        bool,
        flag(
            "--slo",
            "Send an SLO with each request: --slo-scale times its standalone latency, which the warm-up measures.",
        ),
    ] = False,
    slo_scale: Annotated[float, flag("--slo-scale", "SLO as a multiple of the standalone latency, with --slo.")] = 3.0,
    stream: Annotated[bool, flag("--stream", "Stream three partial images of each request.")] = False,
    disconnect_rate: Annotated[
        float, flag("--disconnect-rate", "Share of the clients that disconnect before they receive a response.")
    ] = 0.0,
    output_file: OutputFile = None,
    save_dir: Annotated[Path | None, flag("--save-dir", "Save the images in this folder.", file_okay=False)] = None,
    out: Output,
) -> None:
    """Send a trace to a running server, and report latency, SLO attainment and refused requests.

    Latency counts from the time at which the trace sends the request. Options and figures are named as in the clients
    of vllm-omni and SGLang; `psctl gate` reads the result file. The key is read from PSCTL_API_KEY.

    Examples:

        psctl bench serve --request-rate 2 --num-prompts 100
        psctl bench serve --base-url http://gpu7:8000/v1 --trace gamma --cv 3 --slo --slo-scale 5
        psctl bench serve --stream --disconnect-rate 0.05 --max-concurrency 32 --output-file result.json
    """
    try:
        from ...profiling.http.load import LoadSettings, send_load
        from ...profiling.http.plan import model_of, redrawn, shapes_of, warm_up
        from ...profiling.http.servers import ServerProfile
    except ImportError as error:
        raise MissingExtraError(error.name or "httpx", "http") from error
    from ...data.figures import write_figures
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables
    from ...serving.runs.figures import run_figures
    from ...serving.runs.trace_settings import draw_requests

    check_slo_scale(slo_scale)
    require_places(save_dir, file=output_file)
    settings = LoadSettings(
        base_url,
        endpoint,
        os.environ.get(KEY_VARIABLE) or None,
        served_model,
        stream,
        max_concurrency,
        disconnect_rate,
        save_dir=save_dir,
        seed=trace.seed,
        profile=ServerProfile() if server_profile is None else ServerProfile.read(server_profile),
    )
    name, defaults = model_of(settings.base_url, settings.key, trace)
    trace = trace.with_length(_DEFAULT_NUM_PROMPTS)
    requests = draw_requests(trace, defaults)
    if random_request_config is not None:
        requests = redrawn(requests, random_request_config, trace.seed)
    if slo and not warmup_requests:
        raise UsageError("--slo needs --warmup-requests of 1 or more, which measure the latency alone")
    example = [replace(each, slo_s=1.0) for each in requests] if slo else requests
    settings = settings.discover(example, out.note)
    shapes = shapes_of(requests)
    with out.phases() as start:
        if warmup_requests:
            warm = start("requests of the warm-up", warmup_requests * len(shapes))
            alone_s = warm_up(shapes, settings, warmup_requests, warmup_num_inference_steps, warm)
            if slo:
                requests = [
                    replace(each, slo_s=slo_scale * alone_s[each.resolution, each.num_inference_steps])
                    for each in requests
                ]
        sent = cache(lambda: start("requests", len(requests), expected_s=requests[-1].arrival_s))
        result = send_load(requests, settings, on_finish=lambda record: sent()())
    summary = result.summary(slo_scale=slo_scale if slo else None, model=name, dataset=trace.trace)
    summary["config"] = {
        **trace.to_config(),
        "base_url": base_url,
        "endpoint": endpoint,
        "stream": stream,
        "max_concurrency": max_concurrency,
        "disconnect_rate": disconnect_rate,
    }
    write_figures(summary, run_figures(summary, result.records))
    out.data(summary, table=lambda: to_rich(run_tables(summary)), file=output_file)
    if not result.is_valid:
        raise RunError(
            f"the sender was {1e3 * result.send_lag_p99:.0f} ms late (99th percentile): the machine is too busy to "
            "send this load, and the result says nothing"
        )
