"""What a measurement was taken on: processor, device, threads and versions."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..serving.models.served import ServedModel


def cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; nothing where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the processor in words."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def describe(result: Mapping[str, Any]) -> str:
    """Say in a few words what a result with the fields of `circumstances` was measured on."""
    threads = result["threads"]
    count = f", {threads} thread{'s' if threads > 1 else ''}" if result["device"] == "cpu" else ""
    # Of a path or a hub id the last part will do.
    name = result["model"].rstrip("/").rpartition("/")[2]
    return f"{name}, {result['dtype']}, {result['device_name']}{count}"


def circumstances(model: "ServedModel") -> dict[str, Any]:
    """Return what the speed of a model depends on, for the head of a table: names of JSON fields and their values."""
    import torch

    is_cuda = model.device.type == "cuda"
    guidance_scale = model.defaults.guidance_scale
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "device_name": torch.cuda.get_device_name(model.device) if is_cuda else cpu_name(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "guidance_scale": guidance_scale,
        "is_guided": model.family.uses_guidance(guidance_scale),
    }
