"""The Inception network of FID, in the layer names of the weights file `pt_inception-2015-12-05`.

Inception v3 (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015) as TensorFlow's release
of 2015-12-05 computes it, which differs from the paper's in two places: average pooling leaves the padding out of the
mean, and the last block pools by maximum. The network ends at the 2048 pooled features; the classifier is left out.
"""

import torch
from torch import nn
from torch.nn import functional as F

Kernel = int | tuple[int, int]
# (layer name, output channels, kernel); a layer after "stride" has stride 2 and no padding, all others keep the size.
Layer = tuple[str, int, Kernel]
# One path through a block: layers in order, pooling ("average", "max", "max stride"), or two layers side by side.
Branch = list[Layer | str | tuple[Layer, Layer]]


def _block_35(pool_channels: int) -> list[Branch]:
    return [
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        ["average", ("branch_pool", pool_channels, 1)],
    ]


def _block_17(inner: int) -> list[Branch]:
    wide, tall = (1, 7), (7, 1)
    return [
        [("branch1x1", 192, 1)],
        [("branch7x7_1", inner, 1), ("branch7x7_2", inner, wide), ("branch7x7_3", 192, tall)],
        [
            ("branch7x7dbl_1", inner, 1),
            ("branch7x7dbl_2", inner, tall),
            ("branch7x7dbl_3", inner, wide),
            ("branch7x7dbl_4", inner, tall),
            ("branch7x7dbl_5", 192, wide),
        ],
        ["average", ("branch_pool", 192, 1)],
    ]


def _block_8(pool: str) -> list[Branch]:
    wide, tall = (1, 3), (3, 1)
    return [
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), (("branch3x3_2a", 384, wide), ("branch3x3_2b", 384, tall))],
        [
            ("branch3x3dbl_1", 448, 1),
            ("branch3x3dbl_2", 384, 3),
            (("branch3x3dbl_3a", 384, wide), ("branch3x3dbl_3b", 384, tall)),
        ],
        [pool, ("branch_pool", 192, 1)],
    ]


_BLOCKS: dict[str, list[Branch]] = {
    "Mixed_5b": _block_35(32),
    "Mixed_5c": _block_35(64),
    "Mixed_5d": _block_35(64),
    "Mixed_6a": [
        ["stride", ("branch3x3", 384, 3)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), "stride", ("branch3x3dbl_3", 96, 3)],
        ["max stride"],
    ],
    "Mixed_6b": _block_17(128),
    "Mixed_6c": _block_17(160),
    "Mixed_6d": _block_17(160),
    "Mixed_6e": _block_17(192),
    "Mixed_7a": [
        [("branch3x3_1", 192, 1), "stride", ("branch3x3_2", 320, 3)],
        [
            ("branch7x7x3_1", 192, 1),
            ("branch7x7x3_2", 192, (1, 7)),
            ("branch7x7x3_3", 192, (7, 1)),
            "stride",
            ("branch7x7x3_4", 192, 3),
        ],
        ["max stride"],
    ],
    "Mixed_7b": _block_8("average"),
    "Mixed_7c": _block_8("max"),
}


class _ConvNorm(nn.Module):
    """Convolution without bias, batch norm (inference), ReLU."""

    def __init__(self, in_channels: int, layer: Layer, *, stride: int = 1, padding: bool = True) -> None:
        super().__init__()
        _, channels, kernel = layer
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad = (size[0] // 2, size[1] // 2) if padding else (0, 0)
        self.conv = nn.Conv2d(in_channels, channels, size, stride, pad, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Block(nn.Module):
    """Branches side by side, concatenated over the channels."""

    def __init__(self, in_channels: int, branches: list[Branch]) -> None:
        super().__init__()
        self._branches = branches
        self.channels = sum(self._build(in_channels, branch) for branch in branches)

    def _build(self, channels: int, branch: Branch) -> int:
        stride = 1
        for item in branch:
            if isinstance(item, str):
                stride = 2 if item == "stride" else 1
            elif len(item) == 2:
                for layer in item:
                    self.add_module(layer[0], _ConvNorm(channels, layer))
                channels = sum(layer[1] for layer in item)
            else:
                self.add_module(item[0], _ConvNorm(channels, item, stride=stride, padding=stride == 1))
                channels, stride = item[1], 1
        return channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._run(x, branch) for branch in self._branches], dim=1)

    def _run(self, x: torch.Tensor, branch: Branch) -> torch.Tensor:
        for item in branch:
            if item == "stride":
                continue  # says how the next layer was built
            if isinstance(item, str):
                x = _pool(x, item)
            elif len(item) == 2:
                x = torch.cat([self.get_submodule(layer[0])(x) for layer in item], dim=1)
            else:
                x = self.get_submodule(item[0])(x)
        return x


class InceptionNet(nn.Module):
    """Images (n, 3, 299, 299), scaled to -1..1, to features (n, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        stem = {
            "Conv2d_1a_3x3": (3, 32, 3, 2, False),
            "Conv2d_2a_3x3": (32, 32, 3, 1, False),
            "Conv2d_2b_3x3": (32, 64, 3, 1, True),
            "Conv2d_3b_1x1": (64, 80, 1, 1, True),
            "Conv2d_4a_3x3": (80, 192, 3, 1, False),
        }
        for name, (in_channels, channels, kernel, stride, padding) in stem.items():
            self.add_module(name, _ConvNorm(in_channels, (name, channels, kernel), stride=stride, padding=padding))
        channels = 192
        for name, branches in _BLOCKS.items():
            block = _Block(channels, branches)
            self.add_module(name, block)
            channels = block.channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, module in self.named_children():
            if name in ("Conv2d_3b_1x1", "Mixed_5b"):
                x = _pool(x, "max stride")
            x = module(x)
        return x.mean(dim=(2, 3))


def _pool(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "average":
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    if kind == "max":
        return F.max_pool2d(x, 3, stride=1, padding=1)
    assert kind == "max stride", kind
    return F.max_pool2d(x, 3, stride=2)
