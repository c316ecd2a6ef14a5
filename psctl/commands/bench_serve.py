"""`psctl bench serve`: sends load to a server of OpenAI's images API, ours or another."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from ...data.errors import MissingExtraError, RunError, UsageError
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
        from ...profiling.http.against import SIDES, send_by_turns, two_servers, two_servers_table
        from ...profiling.http.load import LoadSettings
        from ...profiling.http.plan import card_of, model_of, shapes_of, traces_of, warm_up, with_slos
        from ...profiling.http.servers import ServerProfile
    except ImportError as error:
        raise MissingExtraError(error.name or "httpx", "http") from error
    from ...data.figures import write_figures
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables
    from ...serving.runs.figures import run_figures

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
    only_of_two = {"--against-profile": against_profile, "--num-seeds": num_seeds, "--compare-images": compare_images}
    if against is None and (given := [name for name, value in only_of_two.items() if value]):
        raise UsageError(f"{given[0]} is for two servers: name the second one with --against")
    if slo and not warmup_requests:
        raise UsageError("--slo needs --warmup-requests of 1 or more, which measure the latency alone")
    sides = [settings]
    if against is not None:
        profile = ServerProfile() if against_profile is None else ServerProfile.read(against_profile)
        key = os.environ.get(_AGAINST_KEY_VARIABLE) or None
        sides.append(replace(settings, base_url=against, key=key, model=None, profile=profile))
    name, defaults = model_of(settings.base_url, settings.key, trace)
    names = [name, *(str(card_of(side.base_url, side.key).get("id", "unknown")) for side in sides[1:])]
    trace = trace.with_length(_DEFAULT_NUM_PROMPTS)
    num_traces = 1 if against is None else num_seeds or _DEFAULT_NUM_TRACES
    require_seeds(trace.seed, num_traces, "traces")
    traces = traces_of(trace, defaults, random_request_config, num_traces)
    every = [replace(each, slo_s=1.0) if slo else each for requests in traces for each in requests]
    sides = [side.discover(every, out.note) for side in sides]
    if compare_images and (blind := [side.url for side in sides if side.profile.lacks("seed")]):
        raise UsageError(f"--compare-images: {blind[0]} takes no seed, so its images have no partners")
    shapes = shapes_of(every)
    with ExitStack() as stack:
        if against is not None:
            root = save_dir
            if root is None and compare_images:
                root = Path(stack.enter_context(TemporaryDirectory(prefix="psctl-images-")))
            if root is not None:
                sides = [replace(side, save_dir=root / place) for side, place in zip(sides, SIDES, strict=True)]
        start = stack.enter_context(out.phases())
        if warmup_requests:
            warm = start("requests of the warm-up", warmup_requests * len(shapes) * len(sides))
            alone_s, *_ = [warm_up(shapes, side, warmup_requests, warmup_num_inference_steps, warm) for side in sides]
            if slo:
                traces = [with_slos(requests, alone_s, slo_scale) for requests in traces]
        expected_s = len(sides) * sum(requests[-1].arrival_s for requests in traces)
        sent = cache(lambda: start("requests", len(every) * len(sides), expected_s=expected_s))
        rounds = send_by_turns(
            traces,
            sides,
            slo_scale=slo_scale if slo else None,
            models=names,
            dataset=trace.trace,
            on_finish=lambda record: sent()(),
        )
        config = {
            **trace.to_config(),
            "base_url": base_url,
            "endpoint": endpoint,
            "stream": stream,
            "max_concurrency": max_concurrency,
            "disconnect_rate": disconnect_rate,
        }
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
    lag_s = max(result.send_lag_p99 for each in rounds for result in each.results)
    if not all(result.is_valid for each in rounds for result in each.results):
        raise RunError(
            f"the sender was {1e3 * lag_s:.0f} ms late (99th percentile): the machine is too busy to "
            "send this load, and the result says nothing"
        )
