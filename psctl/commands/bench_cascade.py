"""`psctl bench cascade`: compares systems of a light and a heavy model on a virtual clock."""

from dataclasses import replace
from typing import Annotated

from ...data.errors import UsageError
from ...data.files import require_places
from ...serving.cascade.legs import parse_cascade
from ...serving.runs.trace_settings import TraceSettings
from ..flags import flag
from ..options.cascade import DEFAULT_CASCADE, Cascade, CascadeOptions
from ..options.common import Gpus, OutputFile, Seed, numbers_of
from ..options.groups import TRACE
from ..options.target import WHERE, Target
from ..output import Output
from .simulate_cascade import find_cascade_images

_SYSTEMS = "diffserve,diffserve-static,proteus,clipper-light,clipper-heavy"
_ABLATIONS = ("diffserve-static-threshold", "diffserve-aimd", "diffserve-no-queue")
_BASE, _REUSED = "diffserve", "diffserve --reuse-light"
_HOW_TO_REUSE = "needs times and images of psctl profile cascade --reuse-light STRENGTH"


def bench_cascade(
    *,
    cascade: Cascade = DEFAULT_CASCADE,
    systems: Annotated[str, flag("--systems", "Systems to compare.", metavar="NAME,...")] = _SYSTEMS,
    ablations: Annotated[bool, flag("--ablations", f"Also measure {', '.join(_ABLATIONS)}.")] = False,
    ours: Annotated[
        bool, flag("--ours", "Also measure diffserve with each extension of ours, such as --on-late light.")
    ] = False,
    slo_scales: Annotated[
        str, flag("--slo-scales", "SLOs, as multiples of the heavy model's standalone latency.", metavar="SCALE,...")
    ] = "2.8",
    lambdas: Annotated[
        str, flag("--lambdas", "Factors by which capacity must exceed demand.", metavar="FACTOR,...")
    ] = "1.05",
    num_seeds: Annotated[int, flag("--num-seeds", "Number of traces per point.", min=1)] = 5,
    num_resamples: Annotated[
        int, flag("--num-resamples", "Number of bootstrap resamples for each interval of an FID difference.", min=2)
    ] = 40,
    trace: Annotated[
        TraceSettings,
        TRACE.without("prompts", "guidance_scale", "num_inference_steps", "seed"),
    ],
    gpus: Gpus = 16,
    seed: Seed = 0,
    options: CascadeOptions,
    output_file: OutputFile = None,
    target: Annotated[Target, WHERE.only("workspace")],
    out: Output,
) -> None:
    """Compare systems that serve a light and a heavy model by image quality and late requests.

    All systems serve the same requests on a virtual clock, with the times and images measured by psctl profile cascade.
    FID is computed over the images that each system serves; differences from diffserve have 95 % intervals.

    Examples:

        psctl bench cascade --trace shape --rate-range 2:16 --duration 600
        psctl bench cascade --trace shape --rate-range 2:16 --duration 600 --ablations --lambdas 1,1.05,1.2,1.5
        psctl bench cascade --trace shape --rate-range 2:16 --duration 600 --systems diffserve --ours
        psctl bench cascade --request-rate 8 --num-prompts 2000 --slo-scales 1.5,2,3,4,6 --json
    """
    parse_cascade(cascade)
    require_places(target.workspace, file=output_file)
    names = [name.strip() for name in systems.split(",") if name.strip()]
    if ablations:
        names += [name for name in _ABLATIONS if name not in names]
    images = find_cascade_images(cascade, options, target, wants_reused=ours or _REUSED in names, on_published=out.note)
    if _REUSED in names and not images.has_reused:
        raise UsageError(f"--systems has {_REUSED}, which {_HOW_TO_REUSE}")
    with out.status("Loading ..."):
        from ...eval.cascade.bank import load_features
        from ...eval.cascade.bench import (
            OURS,
            CascadeBenchSettings,
            run_cascade_bench,
            write_cascade_bench,
        )
    if ours:
        if not images.has_reused:
            out.note(f"{_REUSED} is left out; it {_HOW_TO_REUSE}")
        names += [name for name in OURS if name not in names and (name != _REUSED or images.has_reused)]
    settings = CascadeBenchSettings(
        tuple(names),
        tuple(numbers_of("--slo-scales", slo_scales)),
        tuple(numbers_of("--lambdas", lambdas)),
        tuple(range(seed, seed + num_seeds)),
        num_resamples,
    )
    features = load_features(images.bank_folder, len(images.bank.entries))
    deployment = images.deployment(options, _BASE, gpus, settings.slo_scales[0], seed)
    with out.phases() as start:
        result = run_cascade_bench(
            deployment, images.bank, features, replace(trace, seed=seed), images.defaults, settings, start_phase=start
        )
    result |= {"cascade": cascade, "profile": str(images.profile_file), "bank": str(images.bank_folder)}
    result["run_dir"] = str(images.place(target).new_run("cascade"))
    out.outcome(write_cascade_bench(result), output_file)
