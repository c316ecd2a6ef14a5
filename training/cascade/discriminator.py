"""The discriminator: how likely an image is to be real, which is the confidence that a light image is good enough.

Source: DiffServe section 3.2. Its file names the models whose images it has learnt from: a discriminator of another
light model is refused.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...data.files import sha256_of
from ..sealed import Sealed
from .nets import NETS, SIDE, NetName, new_net

DISCRIMINATOR_FILE = "discriminator.safetensors"
_VERSION = 1
_FILE = Sealed("psctl.discriminator", "a discriminator", "psctl train-predictor discriminator")

RealImages = Literal["gt", "heavy", "vae", "near"]
REAL_IMAGES: tuple[RealImages, ...] = get_args(RealImages)
"""What passes for real: ground truth (the paper's `w GT`), the heavy model's images (`w Fake`), ground truth that went
through the autoencoder, so that its traces tell nothing (`vae`), or those light images that are nearest to ground truth
in what FID sees (`near`, ours)."""


@dataclass(frozen=True, slots=True)
class DiscriminatorAbout:
    """What a discriminator is.

    Attributes:
        net: which network.
        real: what it has learnt to be real.
        light, heavy: of the models whose images it has learnt from: name, fingerprint of the files and steps.
        temperature: that logits are divided by, fitted to images that were held out.
        fit: numbers of images, steps, errors: see `fitting.fit_discriminator`. JSON.
    """

    net: NetName
    real: RealImages
    light: Mapping[str, Any]
    heavy: Mapping[str, Any]
    temperature: float = 1.0
    fit: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError if it is not what the file's head holds."""
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        if data["net"] not in NETS or data["real"] not in REAL_IMAGES or not data["temperature"] > 0:
            raise ValueError("its network is unknown")
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


class Discriminator:
    """A network with its temperature.

    Args:
        net: logits of drawn and real.
        about: what it is.
    """

    def __init__(self, net: nn.Module, about: DiscriminatorAbout) -> None:
        self.net, self.about = net.eval().requires_grad_(False), about
        self.digest = ""

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        self.net.to(device)
        return self

    @torch.inference_mode()
    def confidences(self, thumbnails: Tensor) -> Tensor:
        """How likely images are to be real, (n,) from 0 to 1 in float32 on the CPU.

        Args:
            thumbnails: uint8 (n, 3, 96, 96), as `thumbnail` makes them.
        """
        weight = next(self.net.parameters())
        # One by one: whatever else is in a batch, an image has the same score to the last bit.
        logits = [self.net(normalised(each[None].to(weight.device))) for each in thumbnails]
        if not logits:
            return torch.zeros(0)
        return (torch.cat(logits).float() / self.about.temperature).softmax(1)[:, 1].cpu()

    def confidence(self, image: Any) -> float:
        """Of one image: PIL, or uint8 (h, w, 3)."""
        return float(self.confidences(thumbnail(image)[None])[0])

    def save(self, path: Path) -> None:
        """Write it, atomically. Raises OSError."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in self.net.state_dict().items()}
        _FILE.write(path, arrays, {"version": _VERSION, **asdict(self.about)})
        self.digest = sha256_of(path)

    def require_models(self, light: Mapping[str, Any], heavy: Mapping[str, Any]) -> None:
        """Raise UsageError unless it has learnt from the images of these models."""
        for leg, own, other in (("light", self.about.light, light), ("heavy", self.about.heavy, heavy)):
            if dict(own) != dict(other):
                raise UsageError(
                    f"the discriminator has learnt from images of {_words(own)} as {leg} model, but {_words(other)} is "
                    "served: psctl train-predictor discriminator"
                )


def load_discriminator(path: Path) -> Discriminator:
    """Read what `Discriminator.save` has written. Raises UsageError: it is missing, damaged, or something else."""
    arrays, content = _FILE.read(path)
    try:
        about = DiscriminatorAbout.from_json(content)
        net = new_net(about.net)
        net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _FILE.of_another_version(path, error) from error
    found = Discriminator(net, about)
    found.digest = sha256_of(path)
    return found


def thumbnail(image: Any) -> Tensor:
    """An image as discriminators see it, uint8 (3, 96, 96): PIL, or uint8 (h, w, 3)."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8, copy=True)).permute(2, 0, 1)[None].float()
    small = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8)[0]


def normalised(thumbnails: Tensor) -> Tensor:
    """What networks take of uint8 images: float32 from -1 to 1."""
    return thumbnails.float() / 127.5 - 1


def calibration_error(confidences: Tensor, is_real: Tensor, num_bins: int = 15) -> float:
    """ECE: how far confidences are from the shares of real images, over bins of equal width (Guo et al., 2017).

    Args:
        confidences: (n,) from 0 to 1.
        is_real: (n,) of booleans.
    """
    bins = (confidences * num_bins).long().clamp(max=num_bins - 1)
    error = 0.0
    for number in range(num_bins):
        inside = bins == number
        if inside.any():
            gap = confidences[inside].mean() - is_real[inside].float().mean()
            error += float(gap.abs()) * float(inside.float().mean())
    return error


def _words(model: Mapping[str, Any]) -> str:
    return f"{model.get('model')} in {model.get('num_steps')} steps ({str(model.get('fingerprint'))[:12]})"
