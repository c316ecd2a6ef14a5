"""Device and number format of a loaded model."""

import re
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ..core.quiet import quiet_imports

if TYPE_CHECKING:
    import torch

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_device(name: str) -> "torch.device":
    """Return the device of this name, in the form of loaded models: `cuda` is `cuda:0`. Raises UsageError: unknown."""
    import torch

    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"unknown device {name!r}: allowed are auto, cpu, cuda and cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def resolve_dtype(name: str, device: "torch.device", pipeline: str) -> "torch.dtype":
    """Return the number format of this name for a pipeline of a supported class. Raises UsageError: there is none.

    `auto` on CUDA is float16 for U-Nets, whose weights are published in it, and bfloat16 for transformers: FLUX and
    Z-Image were trained in bfloat16 and overflow in float16 (diffusers issue 9096, Tongyi-MAI/Z-Image issue 14).
    """
    import torch

    from ...kernels.launch import has_fast_bfloat16
    from ..families.table import FAMILIES

    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}: allowed are {', '.join(_DTYPES)}")
    if name == "auto":
        if device.type == "cpu":
            # Measured on 2 cores, bfloat16 against float32. Xeon with AMX, emoji-xl: a step of 16 images of 256 px
            # 142 ms against 361, one image of 128 px 16.6 against 15.8. EPYC with AVX512-BF16: a step of 4S 4M 4L
            # 161 ms against 202 (emoji-xl) and 140 against 211 (emoji-3), twelve requests served in 6.4 s against 8.4.
            return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        return torch.float16 if FAMILIES[pipeline].model == "UNet2DConditionModel" else torch.bfloat16
    return getattr(torch, name)


def quiet_libraries() -> None:
    """Silence progress bars and notices of libraries; errors are still raised."""
    quiet_imports()
    import diffusers.utils.logging
    import huggingface_hub.utils
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()


def name_of(dtype: "torch.dtype") -> str:
    """Return the name of a dtype, as in options."""
    return str(dtype).removeprefix("torch.")
