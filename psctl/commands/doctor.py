"""`psctl doctor`: reports installed libraries, the machine, and the integrity of bundled models."""

import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...data.resolution import parse_list
from ...data.run_facts import usable_cores
from ...data.workspace import Workspace
from ...serving.runs.machine import cpu_info, cpu_name
from ..flags import flag
from ..options.common import counts_of
from ..options.target import WHERE, Target
from ..output import Output

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

_DISTRIBUTION = "psctl"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
_DTYPES = ("float32", "bfloat16", "float16")


def doctor(
    *,
    model: Annotated[
        str | None,
        flag(
            "--model -m",
            "Also estimate the memory of a model, whose weights need not be there: name, folder or hub id.",
            metavar="NAME|DIR|ID",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], flag("--dtype", "With --model: number format of the model.")
    ] = "float16",
    resolutions: Annotated[
        str | None,
        flag("--resolutions", "With --model: sizes of images. Default: those that it serves.", metavar="LIST"),
    ] = None,
    batch_sizes: Annotated[
        str, flag("--batch-sizes", "With --model: numbers of requests in a batch.", metavar="LIST")
    ] = "1,4,16",
    target: Annotated[Target, WHERE.only("workspace")],
    out: Output,
) -> None:
    """Report versions, devices, number formats, extras, bundled models and the workspace.

    With `--model`, also the memory of its weights, of a step of batches of each size, and of decoding. Exits with 1 if
    something that every command needs is broken: a required library or a bundled model.

    Examples:

        psctl doctor
        psctl doctor --json | jq .models
        psctl doctor --model stabilityai/stable-diffusion-xl-base-1.0 --resolutions 512,1024
    """
    counts = counts_of("--batch-sizes", batch_sizes)
    with out.status("Looking at libraries, devices and bundled models ..."):
        report = examine(target.root)
        if model is not None:
            report["memory"] = _memory_of(model, dtype, resolutions, counts)
    out.data(report, table=lambda: _render(report))
    for problem in report["problems"]:
        out.warn(problem)
    if report["problems"]:
        raise typer.Exit(1)


def _memory_of(model: str, dtype: str, resolutions: str | None, counts: Sequence[int]) -> dict[str, Any]:
    import torch

    from ...profiling.steps.memory import memory_of

    return memory_of(model, getattr(torch, dtype), None if resolutions is None else parse_list(resolutions), counts)


def examine(workspace: Workspace) -> dict[str, Any]:
    """Return everything that `psctl doctor` reports; `problems` lists what is broken, one line each."""
    required, extras = _requirements()
    libraries = {name: _version(name) for name in required}
    models = _models()
    problems = [f"{name} is required but not installed" for name, version in libraries.items() if version is None]
    problems += [f"{name}: {problem}" for name, found in models.items() for problem in found["problems"]]
    has_torch = libraries.get("torch") is not None
    return {
        "psctl": _version(_DISTRIBUTION),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": libraries,
        "threads": _threads(has_torch),
        "devices": _devices() if has_torch else [],
        "extras": {name: _extra(name, packages) for name, packages in extras.items()},
        "models": models,
        "workspace": _workspace(workspace),
        "problems": problems,
        "is_ok": not problems,
    }


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the required libraries, and those of each extra, from the metadata of the installation."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in metadata.requires(_DISTRIBUTION) or ():
        requirement, _, marker = line.partition(";")
        name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
        if extra is None:
            required.append(name)
        else:
            extras.setdefault(extra[1], []).append(name)
    return required, extras


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra(name: str, packages: list[str]) -> dict[str, Any]:
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    return {
        "is_installed": not missing,
        "packages": versions,
        "missing": missing,
        "install": f"pip install '{_DISTRIBUTION}[{name}]'",
    }


def _threads(has_torch: bool) -> dict[str, int | None]:
    cores = usable_cores()
    if not has_torch:
        return {"cores": cores, "torch": None, "torch_interop": None}
    import torch

    return {"cores": cores, "torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()}


def _devices() -> list[dict[str, Any]]:
    import torch

    from ...kernels.launch import has_fast_bfloat16

    info = cpu_info()
    flags = {flag: flag in info.get("flags", info.get("Features", "")).split() for flag in _CPU_FLAGS}
    cpu = torch.device("cpu")
    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": cpu_name(),
            "flags": [flag for flag, is_there in flags.items() if is_there],
            "dtypes": {dtype: _matmul_works(cpu, dtype) for dtype in _DTYPES},
            "has_fast_bfloat16": has_fast_bfloat16(cpu),
            "defaults": _defaults(cpu),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "dtypes": {dtype: _matmul_works(torch.device("cuda", index), dtype) for dtype in _DTYPES},
                "has_fast_bfloat16": has_fast_bfloat16(torch.device("cuda", index)),
                "defaults": _defaults(torch.device("cuda", index)),
            }
        )
    return devices


def _defaults(device: "torch.device") -> dict[str, str]:
    """Return what models run with on this device unless options say otherwise."""
    from ...kernels.launch import use_triton
    from ...serving.models.placement import name_of, resolve_dtype
    from ...serving.options import order_on, stages_on, why_not_recorded

    kernels = "triton" if use_triton("auto", device) else "torch"
    return {
        "dtype_unet": name_of(resolve_dtype("auto", device, "StableDiffusionXLPipeline")),
        "dtype_transformer": name_of(resolve_dtype("auto", device, "StableDiffusion3Pipeline")),
        "order": order_on(device.type, kernels),
        "kernels": kernels,
        "passes": "recorded" if why_not_recorded(device.type, {}) is None else "eager",
        "stages": stages_on(device.type, usable_cores()),
    }


def _matmul_works(device: "torch.device", dtype_name: str) -> bool:
    """Return whether a matrix product in this format runs and is exact: all sums are 64."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    try:
        product = torch.ones(64, 64, device=device, dtype=dtype) @ torch.ones(64, 64, device=device, dtype=dtype)
    except RuntimeError:
        return False
    return bool((product == 64).all())


def _models() -> dict[str, dict[str, Any]]:
    from ...data.models.bundled import BUNDLED, bundled_model_path, verify_bundled

    return {name: {"path": str(bundled_model_path(name)), "problems": verify_bundled(name)} for name in BUNDLED}


def _workspace(workspace: Workspace) -> dict[str, Any]:
    root = workspace.root.absolute()
    # The workspace may not exist yet; then its nearest existing parent counts.
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    return {
        "path": str(root),
        "exists": root.exists(),
        "is_writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        "free_bytes": shutil.disk_usage(existing).free,
    }


def _render(report: dict[str, Any]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for heading, name, value, style in _rows(report):
        if section and heading != section:
            table.add_row()
        # Text, because names and paths may hold brackets, which a plain string would give to rich as styles.
        table.add_row("" if heading == section else heading, Text(name), Text(value, style=style))
        section = heading
    return table


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield section, name, value and style of every line that people see."""
    for name in ("psctl", "python", "platform"):
        yield "system", name, str(report[name]), ""
    threads = report["threads"]
    yield "system", "threads", f"{threads['torch']} of torch on {threads['cores']} cores", ""
    for name, version in report["libraries"].items():
        yield "libraries", name, version or "missing", "" if version else "red"
    for device in report["devices"]:
        yield "devices", device["device"], device["name"] + _memory(device), ""
        works = ", ".join(name for name, is_working in device["dtypes"].items() if is_working)
        yield "devices", "", f"{works} (bfloat16 is {'fast' if device['has_fast_bfloat16'] else 'slow'} here)", ""
        chosen = device["defaults"]
        yield (
            "devices",
            "",
            f"by default: U-Nets in {chosen['dtype_unet']}, transformers in {chosen['dtype_transformer']}, "
            f"{chosen['order']} order, {chosen['kernels']} kernels, {chosen['passes']} passes, "
            f"stages {chosen['stages']}",
            "",
        )
        if device.get("flags"):
            yield "devices", "", " ".join(device["flags"]), "dim"
    for name, extra in report["extras"].items():
        if extra["is_installed"]:
            yield "extras", name, "installed", "green"
        else:
            yield "extras", name, f"no {', '.join(extra['missing'])}: {extra['install']}", ""
    for name, model in report["models"].items():
        is_whole = not model["problems"]
        yield (
            "models",
            name,
            model["path"] if is_whole else "; ".join(model["problems"]),
            "green" if is_whole else "red",
        )
    if "memory" in report:
        yield from _rows_of_memory(report["memory"])
    workspace = report["workspace"]
    state = "exists" if workspace["exists"] else "not there yet"
    access = "writable" if workspace["is_writable"] else "NOT writable"
    free = f"{workspace['free_bytes'] / 2**30:.1f} GiB free"
    yield "workspace", workspace["path"], f"{state}, {access}, {free}", "" if workspace["is_writable"] else "red"


def _rows_of_memory(memory: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    heading = f"memory of {memory['model']}, {memory['dtype']}"
    for name, num_bytes in memory["weight_bytes"].items():
        yield heading, name, f"{_mib(num_bytes)} of weights", ""
    for each in memory["batches"]:
        step, decode, total = (_mib(each[f"{name}_bytes"]) for name in ("step", "decode", "total"))
        what = f"a step takes {step}, decoding an image {decode}: {total} with the weights"
        yield heading, f"{each['num_requests']} of {each['resolution']}", what, ""


def _mib(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"


def _memory(device: dict[str, Any]) -> str:
    if "memory_bytes" not in device:
        return ""
    return f", {device['memory_bytes'] / 2**30:.0f} GiB, compute capability {device['capability']}"
