"""`psctl serve --cascade`: serves a trace with a light and a heavy model, in worker processes on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import UsageError
from ...data.files import require_places
from ...serving.cascade.legs import parse_cascade
from ..options.cascade import CascadeOptions, CascadePlan
from ..options.target import Target
from ..output import Output
from .simulate_cascade import CascadeImages, cascade_table, find_cascade_images

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ...serving.runs.cascade.serve import CascadeFiles


@dataclass(frozen=True, slots=True)
class CascadeLaunch:
    """Settings from which the workers of a cascade are started."""

    images: CascadeImages
    files: "CascadeFiles"
    place: "ModelWorkspace"


def find_cascade_launch(cascade: str, options: CascadeOptions, target: Target) -> CascadeLaunch:
    """Look up these settings before anything is loaded. Raises UsageError: a part is missing or of other models."""
    from ...serving.runs.cascade.serve import CascadeFiles
    from ...training.cascade.discriminator import DISCRIMINATOR_FILE

    images = find_cascade_images(cascade, options, target)
    place = images.place(target)
    discriminator = place.find_predictor(DISCRIMINATOR_FILE)
    if discriminator is None:
        raise UsageError(f"no discriminator of {cascade} is in {place.root}: psctl train-predictor discriminator")
    files = CascadeFiles(parse_cascade(cascade), target.root, target.device, target.dtype, discriminator)
    files.require_profiled(images.profile)
    return CascadeLaunch(images, files, place)


def serve_cascade(plan: CascadePlan, output_file: Path | None, target: Target, out: Output) -> None:
    """Serve, write the run, and print its figures."""
    from ...data.traces.traces import TRACE_KINDS
    from ...serving.cascade.systems import get_cascade_system
    from ...serving.runs.cascade.folder import cascade_summary, write_cascade_run
    from ...serving.runs.cascade.serve import serve_cascade as run_serve
    from ...serving.runs.trace_requests import draw_requests

    get_cascade_system(plan.system)
    found, trace = find_cascade_launch(plan.cascade, plan.options, target), plan.trace
    images, specs, place = found.images, found.files.specs, found.place
    deployment = images.deployment(plan.options, plan.system, plan.num_workers, plan.slo_scale, trace.seed)
    requests = draw_requests(trace, images.defaults)
    places = None
    if trace.prompts is None and trace.trace in TRACE_KINDS:
        # Whose images both models have drawn, so that those that are served can be judged.
        requests, places = images.bank.dealt(requests, trace.seed)
    promised = deployment.promised(requests)
    require_places(target.workspace, file=output_file)
    run_dir = place.new_run("serve")
    out.note(f"Starting {plan.num_workers} workers with both models ...")
    with out.phases() as start:
        served = run_serve(
            deployment,
            promised,
            found.files,
            image_dir=run_dir / "images",
            on_note=out.note,
            on_start=lambda: start("requests", len(promised), expected_s=promised[-1].arrival_s),
        )
    result = served.run.result
    quality: dict[str, Any] | None = None
    if places is not None:
        with out.status("Measuring the images that were served ..."):
            quality = images.quality_served(promised, places, result)
    config = images.config(plan, num_workers="workers")
    summary = cascade_summary(served.run, deployment, specs, dataset=trace.trace, config=config, quality=quality)
    summary |= {"was_interrupted": served.was_interrupted, "workers_lost": result.num_lost}
    from ...profiling.report.cascade_page import write_cascade_report

    report = write_cascade_run(run_dir, served.run, specs, summary, write_cascade_report)
    out.data(summary, table=lambda: cascade_table(summary), file=output_file)
    out.note(f"Results: {report}")
    if served.was_interrupted:
        raise KeyboardInterrupt
    if served.error is not None:
        raise served.error
