"""`psctl serve --cascade`: a light and a heavy model serve a trace on the wall clock, in processes of this machine."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from ...data.files import require_places, sha256_of
from ...data.run_facts import usable_cores
from ...profiling.runs.trace_settings import TraceSettings
from ...serving.cascade.legs import LEGS, Leg, parse_cascade
from ..options.cascade import CascadeOptions
from ..options.target import Target
from ..output import Output
from .simulate_cascade import cascade_table, found_images


def serve_cascade(
    cascade: str,
    system: str,
    trace: TraceSettings,
    options: CascadeOptions,
    *,
    num_workers: int,
    slo_scale: float,
    output_file: Path | None,
    target: Target,
    out: Output,
) -> None:
    """Serve, write the run, and print its figures. Arguments as of `serve`."""
    from ...data.traces.traces import TRACE_KINDS
    from ...profiling.runs.cascade import CascadeRun, cascade_summary, write_cascade_run
    from ...profiling.runs.trace_settings import draw_requests
    from ...serving.cascade.balancer import Balancer
    from ...serving.cascade.cluster import CascadeCluster, settings_for
    from ...serving.cascade.dispatcher import Dispatcher, LegModel
    from ...serving.cascade.systems import get_cascade_system
    from ...serving.cascade.worker import WorkerSettings, image_file
    from ...training.cascade.discriminator import DISCRIMINATOR_FILE

    specs = parse_cascade(cascade)
    get_cascade_system(system)
    images = found_images(cascade, options, target)
    deployment = images.deployment(options, system, num_workers, slo_scale, trace.seed)
    requests = draw_requests(trace, images.defaults)
    places = None
    if trace.prompts is None and trace.trace in TRACE_KINDS:
        # Whose images both models have drawn, so that those that are served can be judged.
        requests, places = images.bank.dealt(requests, trace.seed)
    promised = deployment.promised(requests)
    place = images.place(target)
    discriminator = place.find_predictor(DISCRIMINATOR_FILE)
    if discriminator is None:
        raise UsageError(f"no discriminator of {cascade} is in {place.root}: psctl train-predictor discriminator")
    if sha256_of(discriminator) != images.profile.discriminator:
        raise UsageError(f"{discriminator} is another discriminator than {images.profile_file} was measured with")
    require_places(target.workspace, file=output_file)
    parts = deployment.parts(promised)
    run_dir = place.new_run("serve")
    template = WorkerSettings(
        0,
        {leg: specs[leg].model for leg in LEGS},
        {leg: LegModel(parts.models[leg].num_steps, parts.models[leg].batches) for leg in LEGS},
        target.device,
        target.dtype,
        discriminator,
        {leg: target.root.for_model(specs[leg].model, _device_name(target.device)).tables for leg in LEGS},
        run_dir / "images",
    )
    settings = settings_for(template, num_workers, usable_cores())
    with out.phases() as start:
        ended: list[Callable[[int], None]] = []
        dispatcher = Dispatcher(
            parts.models,
            parts.controller,
            Balancer(options.balance, trace.seed),
            parts.direct,
            options.on_late,
            deployment.system.batching,
            on_end=lambda record, leg: ended[0](1) if ended else None,
        )
        cluster = CascadeCluster(settings, dispatcher, on_note=out.note)
        out.note(f"Starting {num_workers} workers with both models ...")
        error: RunError | None = None
        try:
            cluster.run(
                promised,
                lambda: ended.append(start("requests", len(promised), expected_s=promised[-1].arrival_s)),
            )
        except RunError as failure:
            if not dispatcher.result.records:
                raise
            error = failure
    result = dispatcher.result
    if not result.records:
        # Ctrl-C came before the first request.
        raise KeyboardInterrupt
    run = CascadeRun(result, parts.allocator, parts.peak)
    for row in result.legs:
        if row.is_deferred and result.served_by.get(row.request_id) == "heavy":
            image_file(template, row.request_id, "light").unlink(missing_ok=True)
    quality: dict[str, Any] | None = None
    if places is not None:
        from ...eval.cascade.bank import load_features
        from ...eval.cascade.quality import served_quality

        with out.status("Measuring the images that were served ..."):
            served: list[Leg | None] = [result.served_by.get(request.request_id) for request in promised]
            quality = served_quality(load_features(images.bank_folder, len(images.bank.entries)), places, served)
    config = {
        **trace.to_config(),
        "cascade": cascade,
        "system": system,
        "workers": num_workers,
        "slo_scale": slo_scale,
        **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "cascade_profile": str(images.profile_file),
        "bank": str(images.bank_folder),
    }
    summary = cascade_summary(run, deployment, specs, dataset=trace.trace, config=config, quality=quality)
    summary |= {"was_interrupted": cluster.was_interrupted, "workers_lost": result.num_lost}
    report = write_cascade_run(run_dir, run, specs, summary)
    out.data(summary, table=lambda: cascade_table(summary), file=output_file)
    out.note(f"Results: {report}")
    if cluster.was_interrupted:
        raise KeyboardInterrupt
    if error is not None:
        raise error


def _device_name(device: str) -> str:
    from ...serving.models.loading import resolve_device

    return str(resolve_device(device))
