"""Memory that a model takes on a device, from its configuration alone: weights, activations of a step, and decoding.

Plain diffusers runs on the meta device, where tensors have shapes and no values; what counts is the largest sum of the
tensors that exist at the same time. Kernels' workspaces and an allocator's rounding come on top.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...data.resolution import Resolution
from ...serving.core.denoiser import denoiser_of
from ...serving.families import Family, build_family
from ...serving.models.checkpoint import INDEX_FILE, read_index, weight_components
from ...serving.models.components import load_pipeline, on_meta
from ...serving.models.defaults import read_defaults
from ...serving.models.loading import resolve_model
from ...serving.models.placement import quiet_libraries
from ...serving.parallel.cost import Call
from .counting import WholeAttention, reads_values, run_meta
from .model_config import TEXT_LENGTH


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, while they exist.

    Attributes:
        peak: the largest sum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        for storage in _storages((args, given)):
            self._known.add(storage._cdata)
        found = func(*args, **given)
        for storage in _storages(found):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return found

    def _free(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self._now -= num_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of the tensors that a function makes and that exist at the same time, in bytes.

    Attention counts as fused kernels run it, without its scores.
    """
    peak = PeakBytes()
    with torch.no_grad(), WholeAttention(), peak:
        run()
    return peak.peak


def memory_of(
    spec: str, dtype: torch.dtype, sizes: Sequence[Resolution] | None, batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Return the bytes that a model takes, as `psctl doctor --model --json` prints them.

    Steps of models that read values on their way (`reads_values`) are None, as tensors on the meta device have none.

    Args:
        spec: name of the model, as in `load_model`; its weights need not be there.
        dtype: number format of all parts.
        sizes: sizes of images; None for those that the model serves by default.
        batch_sizes: numbers of requests of a batch of one size.

    Raises what `resolve_model` and `build_family` raise.
    """
    quiet_libraries()
    folder = resolve_model(spec)
    index, defaults = read_index(folder / INDEX_FILE, source=spec), read_defaults(folder)
    components = weight_components(index)
    parts = {name: on_meta(folder / name, *components[name]).to(dtype).eval() for name in components}
    pipe = load_pipeline(folder, index, dtype, None, set(), None, parts)
    family = build_family(pipe, max_sequence_length=defaults.max_sequence_length)
    weights = {name: sum(each.nbytes for each in part.parameters()) for name, part in parts.items()}
    rows_each = 2 if family.uses_guidance(defaults.guidance_scale) else 1
    batches = []
    for size in defaults.resolutions if sizes is None else sizes:
        decode = _decode_bytes(pipe, family, size)
        for count in batch_sizes:
            step = _step_bytes(denoiser_of(pipe), family, size, rows_each * count)
            total = None if step is None else sum(weights.values()) + step + decode
            batches.append(
                {
                    "resolution": str(size),
                    "num_requests": count,
                    "step_bytes": step,
                    "decode_bytes": decode,
                    "total_bytes": total,
                }
            )
    return {
        "model": spec,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "rows_per_request": rows_each,
        "batches": batches,
    }


def _step_bytes(model: Any, family: Family, size: Resolution, num_rows: int) -> int | None:
    """Return the bytes of the activations of a pass over rows of one size; None if it cannot run on the meta device."""
    if reads_values(model):
        return None
    call = Call(*family.geometry.latent_size(size), TEXT_LENGTH[type(model).__name__], num_rows)
    return peak_bytes(lambda: run_meta(model, call, family.latent_channels))


def _decode_bytes(pipe: Any, family: Family, size: Resolution) -> int:
    """Return the bytes of the activations of the autoencoder that decodes one image."""
    found = 0

    def decode(latents: Tensor) -> Tensor:
        nonlocal found
        found = peak_bytes(lambda: pipe.vae.decode(latents, return_dict=False))
        raise _MeasuredError

    shape = 1, family.latent_channels, *family.geometry.latent_size(size)
    latents = torch.empty(shape, device="meta", dtype=pipe.vae.dtype)
    with contextlib.suppress(_MeasuredError):
        family.decode(latents, decode)
    return found


class _MeasuredError(Exception):
    """Raised in place of an image, which does not exist on the meta device."""
