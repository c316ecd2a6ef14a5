"""`psctl bench serve`: sends load to a server of OpenAI's images API, ours or another."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ...data.errors import MissingExtraError, UsageError
from ...data.files import require_places
from ...serving.runs.trace_settings import TraceSettings, check_slo_scale
from ..flags import flag
from ..options.common import OutputFile, require_seeds
from ..options.groups import TRACE
from ..options.http import KEY_VARIABLE
from ..output import Output

_DEFAULT_NUM_PROMPTS = 32
_DEFAULT_NUM_TRACES = 3
_AGAINST_KEY_VARIABLE = "PSCTL_API_KEY_AGAINST"


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
    against: Annotated[
        str | None,
        flag("--against", "Base URL of a second server, which receives the same traces by turns.", metavar="URL"),
    ] = None,
    against_profile: Annotated[
        Path | None,
        flag("--against-profile", "--server-profile of the second server.", metavar="FILE", dir_okay=False),
    ] = None,
    num_seeds: Annotated[
        int | None,
        flag(
            "--num-seeds",
            "With --against: number of traces, with seeds from --seed on. Default: 3.",
            min=1,
            metavar="N",
        ),
    ] = None,
    compare_images: Annotated[
        bool, flag("--compare-images", "With --against: compare the images of both servers (PSNR and SSIM).")
    ] = False,
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
    of vllm-omni and SGLang; `psctl gate` reads the result file. The key is read from PSCTL_API_KEY, that of the second
    server from PSCTL_API_KEY_AGAINST.

    Examples:

        psctl bench serve --request-rate 2 --num-prompts 100
        psctl bench serve --base-url http://gpu7:8000/v1 --trace gamma --cv 3 --slo --slo-scale 5
        psctl bench serve --stream --disconnect-rate 0.05 --max-concurrency 32 --output-file result.json
        psctl bench serve --against http://gpu8:8000/v1 --compare-images --output-file two.json
    """
    try:
        from ...profiling.http.against import check_sender, two_servers, two_servers_table
        from ...profiling.http.load import LoadSettings
        from ...profiling.http.plan import LoadPlan
        from ...profiling.http.servers import ServerProfile
    except ImportError as error:
        raise MissingExtraError(error.name or "httpx", "http") from error
    from ...data.figures import write_figures
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables
    from ...serving.runs.figures import run_figures

    check_slo_scale(slo_scale)
    require_places(save_dir, file=output_file)
    only_of_two = {"--against-profile": against_profile, "--num-seeds": num_seeds, "--compare-images": compare_images}
    if against is None and (given := [name for name, value in only_of_two.items() if value]):
        raise UsageError(f"{given[0]} is for two servers: name the second one with --against")
    sides = [
        LoadSettings(
            base_url,
            endpoint,
            os.environ.get(KEY_VARIABLE) or None,
            served_model,
            stream,
            max_concurrency,
            disconnect_rate,
            save_dir=save_dir,
            seed=trace.seed,
            profile=ServerProfile.read(server_profile),
        )
    ]
    if against is not None:
        key = os.environ.get(_AGAINST_KEY_VARIABLE) or None
        profile = ServerProfile.read(against_profile)
        sides.append(replace(sides[0], base_url=against, key=key, model=None, profile=profile))
    trace = trace.with_length(_DEFAULT_NUM_PROMPTS)
    num_traces = 1 if against is None else num_seeds or _DEFAULT_NUM_TRACES
    require_seeds(trace.seed, num_traces, "traces")
    plan = LoadPlan(
        tuple(sides),
        trace,
        num_traces,
        random_request_config,
        warmup_requests,
        warmup_num_inference_steps,
        slo_scale if slo else None,
        compare_images,
    )
    config = {
        **trace.to_config(),
        "base_url": base_url,
        "endpoint": endpoint,
        "stream": stream,
        "max_concurrency": max_concurrency,
        "disconnect_rate": disconnect_rate,
    }

    with out.phases() as start, plan.sent(start, out.note) as rounds:
        if against is None:
            (summary,), (result,) = rounds[0].summaries, rounds[0].results
            summary["config"] = config
            write_figures(summary, run_figures(summary, result.records))
            tables = run_tables(summary)
        else:
            summary = {**two_servers(rounds, (base_url, against)), "config": {**config, "against": against}}
            if compare_images:
                from ...eval.compare.servers import add_images

                for warning in add_images(summary, [pair for each in rounds for pair in each.pairs()]):
                    out.warn(warning)
            tables = [two_servers_table(summary)]
    out.data(summary, table=lambda: to_rich(tables), file=output_file)
    check_sender(rounds)
