"""Circumstances of a measurement: processor, device, threads and versions."""

import platform
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.run_facts import RunFacts

if TYPE_CHECKING:
    from ..models.served import ServedModel


def cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; empty if there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the name of the processor."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def run_facts(model: "ServedModel") -> RunFacts:
    """Return the facts on which the times of this model depend; loading a predictor compares them."""
    import torch

    from ..patched.stepper import PatchedStepper

    stepper, guidance_scale = model.stepper, model.defaults.guidance_scale
    is_cuda = model.device.type == "cuda"
    options = model.options.patch_options
    options["order"] = stepper.model.order if isinstance(stepper, PatchedStepper) else "image"
    return RunFacts(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        device_name=torch.cuda.get_device_name(model.device) if is_cuda else cpu_name(),
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        guidance_scale=guidance_scale,
        is_guided=model.family.uses_guidance(guidance_scale),
        engine=stepper.name,
        date=date.today().isoformat(),
        **options,
    )
