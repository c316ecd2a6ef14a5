"""Memory that a model takes on a device, from its configuration alone: weights, activations of a step, and decoding.

Plain diffusers runs on the meta device, where tensors have shapes and no values; what counts is the largest sum of the
tensors that exist at the same time. Kernels' workspaces and an allocator's rounding come on top.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...data.resolution import RESOLUTION_MULTIPLE, Resolution
from ...serving.core.denoiser import denoise
from ...serving.families.table import entry_of
from ...serving.models.checkpoint import INDEX_FILE, read_index, weight_components
from ...serving.models.components import on_meta
from ...serving.models.loading import resolve_model
from ...serving.models.placement import quiet_libraries
from .counting import WholeAttention

_TEXT_LENGTHS: Mapping[str, int] = {
    "UNet2DConditionModel": 77,
    "SD3Transformer2DModel": 77 + 256,
    "AuraFlowTransformer2DModel": 256,
    "Lumina2Transformer2DModel": 256,
    "PixArtTransformer2DModel": 300,
}
_LONGEST_TEXT = 512
"""Number of text tokens of all other classes."""
_TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "caption_channels", "cap_feat_dim")


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


def step_bytes(model: Any, channels: int, resolution: Resolution, num_rows: int) -> int:
    """Return the bytes of the activations of a pass over rows of one resolution.

    Args:
        model: denoising model on the meta device, in the dtype of the pass.
        channels: channels of latents.
        resolution: size of the images, or the part of it that latents of more channels have.
        num_rows: number of rows: two for each request with guidance.
    """
    config = model.config

    def empty(*shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, device="meta", dtype=model.dtype)

    length = _TEXT_LENGTHS.get(type(model).__name__, _LONGEST_TEXT)
    width = next(config[name] for name in _TEXT_WIDTHS if config.get(name))
    given: dict[str, Any] = {"encoder_hidden_states": empty(length, width if isinstance(width, int) else width[0])}
    if config.get("pooled_projection_dim"):
        given["pooled_projections"] = empty(config["pooled_projection_dim"])
    if config.get("guidance_embeds"):
        given["guidance"] = empty()
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        given["added_cond_kwargs"] = {"text_embeds": empty(pooled), "time_ids": empty(6)}
    height, width = resolution.height // RESOLUTION_MULTIPLE, resolution.width // RESOLUTION_MULTIPLE
    return peak_bytes(lambda: denoise(model, empty(channels, height, width), empty(), given))


def memory_of(spec: str, dtype: torch.dtype, sizes: Sequence[Resolution], batch_sizes: Iterable[int]) -> dict[str, Any]:
    """Return the bytes that a model takes, as `psctl doctor --model --json` prints them.

    Figures are None where plain diffusers reads values on its way, which tensors of the meta device have not.

    Args:
        spec: name of the model, as in `load_model`; its weights need not be there.
        dtype: number format of all parts.
        sizes: sizes of images.
        batch_sizes: numbers of requests of a batch of one size.

    Raises what `resolve_model` raises.
    """
    quiet_libraries()
    folder = resolve_model(spec)
    components = weight_components(read_index(folder / INDEX_FILE, source=spec))
    parts: dict[str, nn.Module] = {
        name: on_meta(folder / name, *components[name]).to(dtype).eval() for name in components
    }
    weights = {name: sum(each.nbytes for each in part.parameters()) for name, part in parts.items()}
    denoiser = next(part for name, part in parts.items() if name in ("unet", "transformer"))
    vae: Any = parts["vae"]
    entry = entry_of(type(denoiser).__name__)
    folds = 1 if entry is None else entry.folds
    channels = _channels(vae) * folds**2
    rows_each = 1 if type(denoiser).__name__.startswith("Flux") else 2
    decoding = {
        size: _known(lambda size=size: peak_bytes(lambda: vae.decode(_latents(vae, size), return_dict=False)))
        for size in sizes
    }
    batches = []
    for size, count in product(sizes, batch_sizes):
        latents = Resolution(size.width // folds, size.height // folds)
        step = _known(lambda size=latents, rows=rows_each * count: step_bytes(denoiser, channels, size, rows))
        found = (step, decoding[size])
        total = None if None in found else sum(weights.values()) + sum(found)  # type: ignore[arg-type]
        batches.append(
            {"resolution": str(size), "num_requests": count, "step_bytes": step, "decode_bytes": decoding[size]}
            | {"total_bytes": total}
        )
    return {
        "model": spec,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "rows_per_request": rows_each,
        "batches": batches,
    }


def _channels(vae: Any) -> int:
    """Return the channels of an autoencoder's latents."""
    return vae.config.get("latent_channels") or vae.config["z_dim"]


def _latents(vae: Any, size: Resolution) -> Tensor:
    frames = (1,) if "z_dim" in vae.config else ()  # of an autoencoder of videos
    sides = size.height // RESOLUTION_MULTIPLE, size.width // RESOLUTION_MULTIPLE
    return torch.empty((1, _channels(vae), *frames, *sides), device="meta", dtype=vae.dtype)


def _known(measure: Callable[[], int]) -> int | None:
    """Return a measurement; None if it reads values of tensors."""
    try:
        return measure()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        return None
