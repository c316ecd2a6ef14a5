"""Plain diffusers in its strongest form: the faster memory format, compiled blocks, recorded passes.

A U-Net has a second form whose convolutions are channels-last in memory. The faster form depends on the batch size, the
dtype and the machine, so it is measured, as are the strategies of convolutions. `--compile` and `--cuda-graphs` apply
to this model as to the patch engine's, with the same code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from ..core.adapters import AdaptedLayers, RowAdapters
from ..core.captured import CapturedPasses, PassBatch, constants_of
from ..core.compiled import compile_blocks, running_blocks
from ..core.controls import NO_NETS, NetRows, Nets, with_residuals
from ..core.denoiser import Conditions, copy_modules, denoise
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..core.timing import medians_us

Format = Literal["default", "channels-last"]
_MEASURED_REQUESTS = (1, 4)
_NO_WEIGHTS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class FormatTiming:
    """Median time of a pass over `rows` of one latent size in both formats, in microseconds."""

    size: tuple[int, int]
    rows: int
    default_us: float
    channels_last_us: float


class PlainModels:
    """The unmodified model and, for a U-Net, its channels-last form.

    Args:
        model: the unmodified model.
        weights: existing channels-last weights of convolutions, by module name.
        is_compiled: whether the transformer blocks of both forms are compiled; both forms are then copies.
        always: the format to use, whether it is faster or not; None to choose the faster one.
        captured: records and replays passes; None to run all passes eagerly.
        nets: ControlNets that requests may name.

    Attributes:
        captured: see above.
        nets: the ControlNets.
        channels_last: the channels-last form, created at its first use.
        points: measured times; sizes without one use the model's own format.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] = _NO_WEIGHTS,
        *,
        is_compiled: bool = False,
        always: Format | None = None,
        captured: CapturedPasses | None = None,
        nets: Nets = NO_NETS,
    ) -> None:
        self.nets: dict[str, Any] = dict(nets)
        if is_compiled:
            self.nets = {name: _compiled_copy(net) for name, net in nets.items()}
        self._nets_in_channels_last: dict[str, nn.Module] = {}
        self.adapters = AdaptedLayers.of(model)
        self._model = _compiled_copy(model) if is_compiled else model
        self._weights, self._is_compiled = weights, is_compiled
        self._always: Format | None = always
        self.captured = captured
        self.channels_last: nn.Module | None = None
        self.points: list[FormatTiming] = []

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the model and of its predictions."""
        return self._model.dtype  # type: ignore[return-value]  diffusers' models have one

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._model.device  # type: ignore[return-value]  as above

    @property
    def formats(self) -> tuple[Format, ...]:
        """Available formats; a transformer has only one, because it has hardly any convolutions."""
        return ("default", "channels-last") if isinstance(self._model, UNet2DConditionModel) else ("default",)

    def predict(
        self,
        batch: PassBatch,
        latents: Tensor,
        timesteps: Tensor,
        conditions: dict[str, Any],
        adapters: RowAdapters | None = None,
        *,
        form: Format | None = None,
        captured: CapturedPasses | None = None,
    ) -> Tensor:
        """Predict for latents [rows, channels, height, width], see `denoise`.

        Args:
            batch: it has the same rows, conditions and adapters in all of its passes.
            latents, timesteps, conditions: arguments of `denoise`.
            adapters: adapters of the rows; None if no row has any.
            form: the format; None for the faster one.
            captured: replays passes in place of `self.captured`.
        """
        model, nets, captured = self._model, self.nets, captured or self.captured
        form = form or self._format_for(latents)
        if form == "channels-last":
            model, nets = self._in_channels_last()
            latents = latents.contiguous(memory_format=torch.channels_last)

        def forward(inputs: dict[str, Any], kept: dict[str, Any], _: object = None) -> Tensor:
            adapted = kept["adapters"]
            blocks = running_blocks(is_compiled=self._is_compiled, is_adapted=adapted is not None)
            latents, timesteps, given = inputs["latents"], inputs["timesteps"], dict(kept["conditions"])
            controls: dict[str, NetRows] = given.pop("controls", {})
            with self.adapters.on(adapted), blocks:
                if controls:
                    found = [_run(nets[name], own, latents, timesteps) for name, own in controls.items()]
                    given = with_residuals(given, found)
                return denoise(model, latents, timesteps, given)

        inputs, kept = {"latents": latents, "timesteps": timesteps}, {"conditions": conditions, "adapters": adapters}
        if captured is None:
            return forward(inputs, kept)
        names = () if adapters is None else tuple(adapters.scales)
        return captured.run(batch, (form, constants_of(conditions), names), kept, forward, inputs)

    def _format_for(self, latents: Tensor) -> Format:
        points = [point for point in self.points if point.size == latents.shape[2:]]
        if self._always is not None:
            return self._always
        if points:
            nearest = min(points, key=lambda point: abs(point.rows - len(latents)))
            if nearest.channels_last_us < nearest.default_us:
                return "channels-last"
        return "default"

    def _in_channels_last(self) -> tuple[nn.Module, dict[str, nn.Module]]:
        """Return the model and its nets in this format."""
        if self.channels_last is None:
            self.channels_last = channels_last_copy(self._model, self._weights)
            self._nets_in_channels_last = {name: channels_last_copy(net) for name, net in self.nets.items()}
            if self._is_compiled:
                for model in (self.channels_last, *self._nets_in_channels_last.values()):
                    compile_blocks(model)
        return self.channels_last, self._nets_in_channels_last

    def tune(self, target: Tuning, conditions: Conditions) -> None:
        """Measure the formats on batches of one resolution, or read it from the folder, see `load_or_measure`."""
        if len(self.formats) < 2:
            return

        def measure() -> list[FormatTiming]:
            examples = target.examples()
            return [self._measure(example, count, conditions) for example in examples for count in _MEASURED_REQUESTS]

        circumstances = target.circumstances(self._model) | {"compile": self._is_compiled}
        if self.captured is not None:
            circumstances |= {"cuda_graphs": True}
        found = load_or_measure(target.folder, "plain", circumstances, FormatTiming, measure)
        # Points of other sizes stay, because SLOs may be measured for a subset of the served sizes.
        sizes = {point.size for point in found}
        self.points = [*(point for point in self.points if point.size not in sizes), *found]

    @torch.inference_mode()
    def _measure(self, example: PreparedRequest, count: int, conditions: Conditions) -> FormatTiming:
        num_rows = example.num_rows * count
        given = conditions({key: torch.cat([part] * count) for key, part in example.conditioning.items()})
        dtype = example.conditioning["text"].dtype
        latents = example.latents.to(dtype).repeat(num_rows, 1, 1, 1)
        timesteps = example.state.timesteps[:1].expand(num_rows)
        # The second pass is recorded; neither of the first two is timed.
        captured = None if self.captured is None else CapturedPasses(self.captured.recorder, patience=1)
        forms: dict[str, Format] = {"default_us": "default", "channels_last_us": "channels-last"}
        run = partial(self.predict, PassBatch(is_complete=True), latents, timesteps, given, captured=captured)
        runs = {name: partial(run, form=form) for name, form in forms.items()}
        return FormatTiming((latents.shape[2], latents.shape[3]), num_rows, **medians_us(runs, latents.device))


def _run(net: nn.Module, own: NetRows, latents: Tensor, timesteps: Tensor) -> list[Tensor]:
    """Return the results of a net for whole images, see `NetRows.results`."""
    given, times = own.of(latents, timesteps)
    return own.results(net, given, times, times, lambda values, _: values, [len(latents)] * len(own.entries))


def _compiled_copy(model: nn.Module) -> nn.Module:
    """Return a copy with compiled blocks; the model itself is shared with users of its eager form."""
    copied = copy_modules(model)
    compile_blocks(copied)
    return copied


def channels_last_copy(model: nn.Module, weights: Mapping[str, Tensor] = _NO_WEIGHTS) -> nn.Module:
    """Return a copy of a model with channels-last convolutions; it shares all other weights.

    `weights` holds existing weights of convolutions in this format, by module name.
    """
    copied = copy_modules(model)
    for name, module in copied.named_modules():
        if isinstance(module, nn.Conv2d):
            if (weight := weights.get(name)) is None:
                weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return copied
