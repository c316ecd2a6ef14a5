"""Small networks that classify images as real or drawn: EfficientNet-, ResNet- and ViT-like (DiffServe section 4.4).

All map images (n, 3, 96, 96) in -1 to 1 to logits (n, 2) of drawn and real, and have at most 0.6 million parameters.
GroupNorm replaces the originals' BatchNorm, so that an image's score never depends on other images, not even in
training.
"""

from typing import Literal

import torch
from torch import Tensor, nn

SIDE = 96
NetName = Literal["mbconv", "resnet", "vit"]
_GROUPS = 8


class MBConv(nn.Module):
    """An inverted residual with squeeze and excitation (Tan and Le, 2019)."""

    def __init__(self, inside: int, outside: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        wide = inside * expansion
        self.expand = nn.Sequential(nn.Conv2d(inside, wide, 1, bias=False), nn.GroupNorm(_GROUPS, wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.GroupNorm(_GROUPS, wide), nn.SiLU()
        )
        narrow = max(8, inside // 4)
        self.squeeze = nn.Sequential(nn.Conv2d(wide, narrow, 1), nn.SiLU(), nn.Conv2d(narrow, wide, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, outside, 1, bias=False), nn.GroupNorm(_GROUPS, outside))
        self.is_residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + y if self.is_residual else y


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.GroupNorm(_GROUPS, outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.GroupNorm(_GROUPS, outside),
        )
        is_same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.body(x))


class Head(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x.mean((2, 3)))


class ViT(nn.Module):
    """A transformer over patches of 12 pixels (Dosovitskiy et al., 2021), with mean pooling and no class token."""

    def __init__(self, width: int = 96, depth: int = 4, patch: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIDE // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.classify = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        return self.classify(self.layers(tokens).mean(1))


def new_net(name: NetName) -> nn.Module:
    """Return a network with random weights."""
    if name == "vit":
        return ViT()
    if name == "resnet":
        widths = ((16, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 80, 2), (80, 80, 1), (80, 96, 1))
        stem = nn.Conv2d(3, 16, 5, 2, 2)
        return nn.Sequential(stem, nn.ReLU(), *(BasicBlock(*each) for each in widths), Head(96))
    shapes = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 64, 2), (64, 64, 1), (64, 96, 1), (96, 96, 1))
    # Without a norm, which would remove the contrast of an image.
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU())
    last = nn.Sequential(nn.Conv2d(96, 192, 1, bias=False), nn.GroupNorm(_GROUPS, 192), nn.SiLU())
    return nn.Sequential(stem, *(MBConv(*shape) for shape in shapes), last, Head(192))
