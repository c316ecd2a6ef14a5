"""The memory format in which plain diffusers runs a batch of one resolution: whichever is faster.

A U-Net has a second form whose convolutions are channels-last in memory. Which form is faster depends on the size of
the batch, the dtype and the machine, so it is measured, as the strategies of convolutions are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from ..core.adapters import AdaptedLayers
from ..core.denoiser import Conditions, copy_modules, denoise
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..core.timing import medians_us

Format = Literal["default", "channels-last"]
_MEASURED_REQUESTS = (1, 4)
_NO_WEIGHTS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Point:
    """What a pass over `rows` of one latent size took in both formats, median in microseconds."""

    size: tuple[int, int]
    rows: int
    default_us: float
    channels_last_us: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))  # JSON has lists only


class PlainModels:
    """The unmodified model, and of a U-Net its channels-last form.

    Args:
        model: the unmodified model.
        weights: of convolutions in channels-last format, by the module's name, as far as they exist already.
        is_compiled: whether the model runs through torch.compile; the other form does then, too.
        always: the format that is used whatever is faster.
        adapters: the layers that requests may change; None for none.

    Attributes:
        channels_last: the channels-last form, once it was needed.
        points: what was measured; where nothing was, the model's own format is used.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] = _NO_WEIGHTS,
        *,
        is_compiled: bool = False,
        always: Format | None = None,
        adapters: AdaptedLayers | None = None,
    ) -> None:
        self.adapters = adapters or AdaptedLayers()
        self._model, self._weights, self._is_compiled, self._always = model, weights, is_compiled, always
        self.channels_last: nn.Module | None = None
        self.points: list[Point] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, and of what it predicts."""
        return self._model.dtype  # type: ignore[return-value]  diffusers' models have one

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._model.device  # type: ignore[return-value]  as above

    @property
    def formats(self) -> tuple[Format, ...]:
        """A transformer has next to no convolutions, so that a second form would be the same."""
        return ("default", "channels-last") if isinstance(self._model, UNet2DConditionModel) else ("default",)

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
        """Predict for latents [rows, channels, height, width] in the faster format, see `denoise`."""
        points = [point for point in self.points if point.size == latents.shape[2:]]
        if self._always == "channels-last":
            return self._in_channels_last(latents, timesteps, conditions)
        if points and self._always is None:
            nearest = min(points, key=lambda point: abs(point.rows - len(latents)))
            if nearest.channels_last_us < nearest.default_us:
                return self._in_channels_last(latents, timesteps, conditions)
        return denoise(self._model, latents, timesteps, conditions)

    def _in_channels_last(self, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
        if self.channels_last is None:
            self.channels_last = channels_last_copy(self._model, self._weights)
            if self._is_compiled:
                compile_whole(self.channels_last)
        return denoise(self.channels_last, latents.contiguous(memory_format=torch.channels_last), timesteps, conditions)

    def tune(self, target: Tuning, conditions: Conditions) -> None:
        """Measure the formats on batches of one resolution, or read it from the folder, see `load_or_measure`."""
        if len(self.formats) < 2:
            return

        def measure() -> list[Point]:
            examples = target.examples()
            return [self._measure(example, count, conditions) for example in examples for count in _MEASURED_REQUESTS]

        circumstances = target.circumstances(self._model) | {"compile": self._is_compiled}
        found = load_or_measure(target.folder, "plain", circumstances, Point, measure)
        # What is known of other sizes stays: SLOs may be measured for some of those that are served.
        sizes = {point.size for point in found}
        self.points = [*(point for point in self.points if point.size not in sizes), *found]

    @torch.inference_mode()
    def _measure(self, example: PreparedRequest, count: int, conditions: Conditions) -> Point:
        num_rows = example.num_rows * count
        given = conditions({key: torch.cat([part] * count) for key, part in example.conditioning.items()})
        dtype = example.conditioning["text"].dtype
        latents = example.latents.to(dtype).repeat(num_rows, 1, 1, 1)
        timesteps = example.state.timesteps[:1].expand(num_rows)
        forms = {"default_us": partial(denoise, self._model), "channels_last_us": self._in_channels_last}
        times = medians_us(
            {name: partial(run, latents, timesteps, given) for name, run in forms.items()}, latents.device
        )
        return Point((latents.shape[2], latents.shape[3]), num_rows, **times)


def compile_whole(model: nn.Module) -> None:
    """Let an unmodified model compile when it first runs, once for all resolutions and batch sizes."""
    model.compile(dynamic=True)


def channels_last_copy(model: nn.Module, weights: Mapping[str, Tensor] = _NO_WEIGHTS) -> nn.Module:
    """A copy of a model whose convolutions are channels-last in memory; it shares all other weights.

    `weights` holds those of convolutions that exist in that format, by module name.
    """
    copied = copy_modules(model)
    for name, module in copied.named_modules():
        if isinstance(module, nn.Conv2d):
            if (weight := weights.get(name)) is None:
                weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return copied
