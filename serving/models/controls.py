"""ControlNets that requests name: loaded beside a pipeline, checked against its U-Net."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...data.controls import Control
from ...data.errors import RunError, UsageError
from ..core.bounded_cache import BoundedCache
from ..core.controls import window
from ..core.denoiser import denoiser_of
from ..core.prepared import PreparedControl
from ..options import NamedFile
from ..samplers.single import SamplerState
from .components import load_component
from .defaults import read_json

_KIND = "ControlNetModel"
_SHARED = ("in_channels", "block_out_channels", "layers_per_block", "cross_attention_dim", "addition_embed_type")
"""Settings that a net has in common with its U-Net."""


class ModelControls:
    """The ControlNets of a pipeline.

    Args:
        pipe: the pipeline, on its device and in its dtype.
        given: the nets to load.

    Attributes:
        nets: the nets by name; each without the layers that see images (`core.controls.Nets`).

    Raises:
        UsageError: a net is of another kind, or of another model.
        RunError: a file of a net is missing or damaged.
    """

    def __init__(self, pipe: Any, given: Sequence[NamedFile]) -> None:
        unet = denoiser_of(pipe)
        self._device: torch.device = unet.device
        self.nets: dict[str, Any] = {}
        self._readers: dict[str, nn.Module] = {}
        self._is_bgr: dict[str, bool] = {}
        for each in given:
            net = _load(each, unet).to(unet.device)
            self._is_bgr[each.name] = net.config.controlnet_conditioning_channel_order == "bgr"
            net.register_to_config(controlnet_conditioning_channel_order="rgb")
            self._readers[each.name], net.controlnet_cond_embedding = net.controlnet_cond_embedding, nn.Identity()
            self.nets[each.name] = net

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use."""
        return tuple(self.nets)

    @torch.inference_mode()
    def prepare(
        self, controls: Sequence[Control], state: SamplerState, known: BoundedCache[Tensor]
    ) -> dict[str, PreparedControl]:
        """Prepare the controls of a request that takes these steps; `known` keeps what nets have made of images."""
        return {
            each.name: PreparedControl(self._embed(each, known), each.scale, *window_of(each, state))
            for each in controls
        }

    def _embed(self, control: Control, known: BoundedCache[Tensor]) -> Tensor:
        key = f"{control.name}:{control.digest}"
        found = known.find(key)
        if found is None:
            dtype = next(self._readers[control.name].parameters()).dtype
            pixels = torch.tensor(control.image, device=self._device).permute(2, 0, 1)[None].float() / 255
            if self._is_bgr[control.name]:
                pixels = pixels.flip(1)
            found = self._readers[control.name](pixels.to(dtype))
            known.keep(key, found)
        return found


def window_of(control: Control, state: SamplerState) -> tuple[float, float]:
    """Return the timesteps between which a control holds. Raises what `window` raises."""
    return window(state.scheduler.timesteps[state.first :].tolist(), control.start, control.end)


def _load(given: NamedFile, unet: Any) -> Any:
    """Load a net in the dtype of its U-Net. Raises as `ModelControls`."""
    option = f"--controlnet {given.name}={given.path}"
    if not given.path.is_dir():
        raise UsageError(f"{option}: there is no such folder; give one of diffusers, with config.json and weights")
    config = read_json(given.path / "config.json")
    if (kind := config.get("_class_name")) != _KIND:
        raise UsageError(f"{option} is a {kind}, but it must be a {_KIND}")
    try:
        net = load_component(Path(given.path), "diffusers", _KIND, unet.dtype)
    except RunError as error:
        raise RunError(f"{option}: {error}") from error
    for name in _SHARED:
        own, wanted = net.config[name], unet.config[name]
        own, wanted = (list(value) if isinstance(value, tuple) else value for value in (own, wanted))
        if own != wanted:
            raise UsageError(f"{option} is of another model: its {name} is {own}, the model's is {wanted}")
    if net.config.global_pool_conditions:
        raise UsageError(f"{option} adds the means of whole images (global_pool_conditions), which is not served")
    return net
