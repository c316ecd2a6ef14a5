"""The machine of the lease: the card, and its packages compared with those that `constraints.txt` pins."""

import subprocess
from collections.abc import Iterator

import torch

from patchedserve.serving.runs.machine import cpu_name

from ..context import Context, Row
from ..versions import versions


def machine(context: Context) -> Iterator[Row]:
    """Yield a row for each fact and one for each package."""
    facts = {"processor": cpu_name(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if context.device.type == "cuda":
        about = torch.cuda.get_device_properties(context.device)
        facts |= {
            "card": about.name,
            "memory": f"{about.total_memory / 2**30:.1f} GiB",
            "multiprocessors": str(about.multi_processor_count),
            "cuDNN": str(torch.backends.cudnn.version()),
            "driver": _driver(),
        }
    else:
        facts["card"] = "none"
    known = context.known
    yield from ({"label": name, "value": value} for name, value in facts.items() if name not in known)
    for each in versions():
        label = f"package {each['name']}"
        if label not in known:
            yield {"label": label, "here": each["here"], "pinned": str(each["pinned"]), "differs": each["differs"]}


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__})"
