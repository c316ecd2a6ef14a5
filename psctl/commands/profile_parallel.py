"""`psctl profile parallel`: counts computation, traffic and memory of one image on several devices."""

from dataclasses import asdict
from typing import Annotated

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ..flags import flag
from ..options.common import OutputFile
from ..output import Output


def profile_parallel(
    *,
    config: Annotated[
        str,
        flag(
            "--config",
            "sdxl, sd3-medium, the config.json of a denoising model, or a model as for --model of other commands.",
            metavar="NAME|FILE|MODEL",
        ),
    ] = "sdxl",
    resolutions: Annotated[
        str, flag("--resolutions", "Sizes, such as 1024,1280x1920.", metavar="SIZE,...")
    ] = "1024,1280x1920,2048,3840",
    num_ranks: Annotated[str, flag("--num-ranks", "Numbers of devices.", metavar="N,...")] = "1,2,4,8",
    sync_ms: Annotated[float, flag("--sync-ms", "Time per step that devices lose by waiting for each other.")] = 10.0,
    bandwidth: Annotated[float, flag("--bandwidth", "Bandwidth of the link in GB/s per device.")] = 185.0,
    displaced_share: Annotated[
        float, flag("--displaced-share", "Share of the waiting that remains in displaced steps.")
    ] = 0.45,
    output_file: OutputFile = None,
    out: Output,
) -> None:
    """Count computation, traffic and memory of one image on several devices.

    A step has two rows, as with guidance. MACs are computed from a closed form, and counted by torch's FlopCounter in
    the unmodified model. No weights are needed and nothing is computed; each size takes a few seconds. SDXL is compared
    with DistriFusion's figures. The default link is fitted to DistriFusion's table 2.

    Examples:

        psctl profile parallel --config sdxl
        psctl profile parallel --config emoji-xl --resolutions 128,256 --num-ranks 2,4
        psctl profile parallel --config sd3-medium --resolutions 1024 --bandwidth 25 --json
    """
    # Everything that can be wrong is looked at before torch is imported.
    from ...profiling.parallel.plan import AccountingPlan
    from ...profiling.steps.model_config import TEXT_LENGTH, read_config
    from ...serving.parallel.latency_model import Link

    sizes, ranks = parse_list(resolutions), _counts(num_ranks)
    link = Link(sync_ms / 1e3, bandwidth * 1e9, displaced_share)
    given = read_config(config)
    require_places(file=output_file)

    from ...profiling.parallel.accounting import ELEMENT_BYTES, NUM_STEPS, RESULT_KIND, account, figures_tables
    from ...profiling.report.table import to_rich
    from ...profiling.steps.counting import counted_macs, meta_model
    from ...serving.models.placement import quiet_libraries
    from ...serving.parallel.cost import Cost
    from ...serving.parallel.model_levels import levels_of

    quiet_libraries()
    model = meta_model(given, config)
    kind = type(model).__name__
    plan = AccountingPlan(Cost(levels_of(model)), TEXT_LENGTH[kind], sizes, ranks, link, config == "sdxl")
    counted = {}
    with out.phases() as start:
        calls = plan.calls()
        advance = start("sizes", len(calls))
        for call in calls:
            counted[call] = counted_macs(model, call)
            advance()
    figures = account(plan, counted)
    payload = {
        "kind": RESULT_KIND,
        "version": 1,
        "config": config,
        "class": kind,
        "settings": {
            "rows": 2,
            "text_length": plan.text_length,
            "num_inference_steps": NUM_STEPS,
            "element_bytes": ELEMENT_BYTES,
            "link": asdict(link),
        },
        "figures": [figure.to_json() for figure in figures],
    }
    out.data(payload, table=lambda: to_rich(figures_tables(figures)), file=output_file)


def _counts(text: str) -> tuple[int, ...]:
    """Return the numbers of devices, without 1, which needs no figures of its own."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise UsageError(f"--num-ranks is {text!r}, but it must be whole numbers of at least 1 with commas between")
    return tuple(count for count in found if count > 1)
