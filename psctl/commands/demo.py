"""`psctl demo`: serves an overloaded trace with bucketed diffusers, with psctl, and with psctl's cache."""

from pathlib import Path
from typing import Annotated

from ...data.files import require_places
from ...serving.options import EngineOptions
from ...serving.scheduling.systems import get_system
from ..flags import flag
from ..options.common import NumInferenceSteps, Seed
from ..options.system import with_cache_of
from ..options.target import Target
from ..output import Output


def demo(
    *,
    duration: Annotated[float, flag("--duration", "Length of the trace in seconds.", min=0.1)] = 15.0,
    load: Annotated[
        float,
        flag(
            "--load", "Request rate, as a multiple of the throughput of bucketed diffusers on this machine.", min=0.01
        ),
    ] = 1.3,
    num_inference_steps: NumInferenceSteps = 20,
    seed: Seed = 7,
    output_dir: Annotated[Path, flag("--output-dir -o", "Folder for the page and the images.", file_okay=False)] = Path(
        "psctl-demo"
    ),
    target: Target,
    out: Output,
) -> None:
    """Serve one overloaded trace of mixed resolutions with bucketed diffusers and with psctl.

    psctl serves it twice: exactly, which is the default, and with the recommended cache. This takes about three minutes
    on a laptop. One page compares the requests in time, their latency, the batches and the images.

    Examples:

        psctl demo
        psctl demo --model emoji-3 --load 2 --output-dir demo-emoji-3
    """
    require_places(output_dir, target.workspace)
    served, place = target.load(out, with_cache_of([get_system("patched-schedule")], EngineOptions(), {}, target, out))
    from ...profiling.sweep.demo import DemoSettings, run_demo

    settings = DemoSettings(duration, load, num_inference_steps or DemoSettings.num_inference_steps, seed=seed)
    with out.phases() as start:
        outcome = run_demo(
            served,
            place,
            output_dir,
            settings,
            on_note=out.note,
            on_warning=out.warn,
            on_start=lambda system, requests: start(
                f"requests to {system}", len(requests), expected_s=requests[-1].arrival_s
            ),
        )
    from ...profiling.report.comparison import figures_table

    result = {
        "systems": {run.name: run.summary for run in outcome.runs},
        "headline": outcome.headline,
        "page": str(outcome.page),
    }
    out.data(result, table=lambda: figures_table(outcome.runs).to_rich())
    out.note(f"Open in a browser: file://{outcome.page.resolve()}")
    out.note(outcome.headline)
