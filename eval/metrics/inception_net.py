"""Inception network of FID, with the layer names of the weights file `pt_inception-2015-12-05`.

Inception v3 (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015) as TensorFlow's release
of 2015-12-05 computes it, which differs from the paper in two places: average pooling excludes the padding from the
mean, and the last block uses max pooling. The network ends at the 2048 pooled features, without the classifier.
Channels and kernels are those of the weights, so that only the order of the layers is defined here.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

# Name, stride, and whether padding keeps the size but for the stride; "halve" is max pooling.
_STEM = (
    ("Conv2d_1a_3x3", 2, False),
    ("Conv2d_2a_3x3", 1, False),
    ("Conv2d_2b_3x3", 1, True),
    "halve",
    ("Conv2d_3b_1x1", 1, True),
    ("Conv2d_4a_3x3", 1, False),
    "halve",
)
# Branches of blocks: poolings, and layers without the "branch" that their names begin with. "/" is before a layer of
# stride 2 without padding; two layers in a tuple of their own are side by side.
_Branch = tuple[str | tuple[str, str], ...]
_BLOCK_35: tuple[_Branch, ...] = (
    ("1x1",),
    ("5x5_1", "5x5_2"),
    ("3x3dbl_1", "3x3dbl_2", "3x3dbl_3"),
    ("average", "_pool"),
)
_BLOCK_17: tuple[_Branch, ...] = (
    ("1x1",),
    ("7x7_1", "7x7_2", "7x7_3"),
    ("7x7dbl_1", "7x7dbl_2", "7x7dbl_3", "7x7dbl_4", "7x7dbl_5"),
    ("average", "_pool"),
)
_BLOCK_8: tuple[_Branch, ...] = (
    ("1x1",),
    ("3x3_1", ("3x3_2a", "3x3_2b")),
    ("3x3dbl_1", "3x3dbl_2", ("3x3dbl_3a", "3x3dbl_3b")),
)
_BLOCKS: dict[str, tuple[_Branch, ...]] = {
    **dict.fromkeys(("Mixed_5b", "Mixed_5c", "Mixed_5d"), _BLOCK_35),
    "Mixed_6a": (("/3x3",), ("3x3dbl_1", "3x3dbl_2", "/3x3dbl_3"), ("halve",)),
    **dict.fromkeys(("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"), _BLOCK_17),
    "Mixed_7a": (("3x3_1", "/3x3_2"), ("7x7x3_1", "7x7x3_2", "7x7x3_3", "/7x7x3_4"), ("halve",)),
    "Mixed_7b": (*_BLOCK_8, ("average", "_pool")),
    "Mixed_7c": (*_BLOCK_8, ("max", "_pool")),
}
_POOLS = {
    "average": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False),
    "max": partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
    "halve": partial(F.max_pool2d, kernel_size=3, stride=2),
}
_NORM = ("bn/running_mean", "bn/running_var", "bn/weight", "bn/bias")


def layer_names() -> Iterator[str]:
    """Yield the names of the 94 layers, each a convolution without bias, batch norm and ReLU."""
    yield from (step[0] for step in _STEM if not isinstance(step, str))
    for block, branches in _BLOCKS.items():
        for step in (step for branch in branches for step in branch):
            for name in (step,) if isinstance(step, str) else step:
                if name not in _POOLS:
                    yield f"{block}.branch{name.removeprefix('/')}"


class InceptionNet(nn.Module):
    """Network that maps images (n, 3, 299, 299), scaled to -1..1, to features (n, 2048).

    Args:
        state: `conv.weight`, and `weight`, `bias`, `running_mean` and `running_var` of `bn`, of every layer by its
            name; other entries are ignored.

    Raises:
        RuntimeError: a tensor is missing.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        wanted = [f"{layer}.{part}".replace("/", ".") for layer in layer_names() for part in ("conv/weight", *_NORM)]
        if missing := [name for name in wanted if name not in state]:
            raise RuntimeError(f"the Inception weights have no {missing[0]}")
        # A parameter's name must not hold dots.
        given = {name.replace(".", "/"): nn.Parameter(state[name], requires_grad=False) for name in wanted}
        self.tensors = nn.ParameterDict(given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in _STEM:
            x = _POOLS[step](x) if isinstance(step, str) else self._layer(x, *step)
        for block, branches in _BLOCKS.items():
            x = torch.cat([self._branch(x, block, branch) for branch in branches], dim=1)
        return x.mean(dim=(2, 3))

    def _branch(self, x: torch.Tensor, block: str, branch: _Branch) -> torch.Tensor:
        for step in branch:
            if isinstance(step, tuple):
                x = torch.cat([self._layer(x, f"{block}.branch{name}") for name in step], dim=1)
            elif step in _POOLS:
                x = _POOLS[step](x)
            else:
                is_halved = step.startswith("/")
                x = self._layer(x, f"{block}.branch{step.removeprefix('/')}", 1 + is_halved, not is_halved)
        return x

    def _layer(self, x: torch.Tensor, name: str, stride: int = 1, is_padded: bool = True) -> torch.Tensor:
        prefix = name.replace(".", "/")
        weight = self.tensors[f"{prefix}/conv/weight"]
        padding = [side // 2 if is_padded else 0 for side in weight.shape[2:]]
        x = F.conv2d(x, weight, stride=stride, padding=padding)
        return F.relu(F.batch_norm(x, *(self.tensors[f"{prefix}/{part}"] for part in _NORM), eps=0.001))
