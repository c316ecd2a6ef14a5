"""The discriminator: the probability that an image is real, used as confidence that a light image is good enough.

Source: DiffServe section 3.2. The file names the models whose images the discriminator was trained on; one that was
trained for another light model is refused.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...data.files import sha256_of
from ...data.parsing import parse
from ..sealed import Sealed
from .nets import SIDE, NetName, new_net

DISCRIMINATOR_FILE = "discriminator.safetensors"
_VERSION = 1
_FILE = Sealed("psctl.discriminator", "a discriminator", "psctl train-predictor discriminator")

RealImages = Literal["gt", "heavy", "vae", "near"]
"""Images labelled as real in training: ground truth (`gt`, the paper's `w GT`), the heavy model's images (`heavy`, `w
Fake`), ground truth passed through the autoencoder, whose artefacts then do not separate the classes (`vae`), or the
light images that are nearest to ground truth in the features of FID (`near`, ours)."""


@dataclass(frozen=True, slots=True)
class DiscriminatorAbout:
    """Description of a discriminator.

    Attributes:
        net: name of the network.
        real: images labelled as real in training.
        light, heavy: name, fingerprint of the files and number of steps of the models whose images it was trained on.
        temperature: divisor of the logits, fitted to held-out images.
        fit: numbers of images, steps and errors (`fitting.fit_discriminator`), as JSON.
    """

    net: NetName
    real: RealImages
    light: Mapping[str, Any]
    heavy: Mapping[str, Any]
    temperature: float = 1.0
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"temperature is {self.temperature}, but it must be above 0")


class Discriminator:
    """A network with its temperature.

    Args:
        net: network that returns logits of drawn and real.
        about: description of the discriminator.
    """

    def __init__(self, net: nn.Module, about: DiscriminatorAbout) -> None:
        self.net, self.about = net.eval().requires_grad_(False), about
        self.digest = ""

    def to(self, device: torch.device) -> Self:
        """Move the network to a device; returns the discriminator itself."""
        self.net.to(device)
        return self

    @torch.inference_mode()
    def confidences(self, thumbnails: Tensor) -> Tensor:
        """Return the probability that each image is real, (n,) float32 from 0 to 1, on the CPU.

        Args:
            thumbnails: uint8 (n, 3, 96, 96), as `thumbnail` makes them.
        """
        weight = next(self.net.parameters())
        # One by one, so that an image has the same score to the last bit whatever else is in its batch.
        logits = [self.net(normalised(each[None].to(weight.device))) for each in thumbnails]
        if not logits:
            return torch.zeros(0)
        return (torch.cat(logits).float() / self.about.temperature).softmax(1)[:, 1].cpu()

    def confidence(self, image: Any) -> float:
        """Return the probability that an image is real: PIL, or uint8 (h, w, 3)."""
        return float(self.confidences(thumbnail(image)[None])[0])

    def save(self, path: Path) -> None:
        """Write the discriminator, atomically. Raises OSError."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in self.net.state_dict().items()}
        _FILE.write(path, arrays, {"version": _VERSION, **asdict(self.about)})
        self.digest = sha256_of(path)

    def require_models(self, light: Mapping[str, Any], heavy: Mapping[str, Any]) -> None:
        """Raise UsageError unless it was trained on images of these models."""
        for leg, own, other in (("light", self.about.light, light), ("heavy", self.about.heavy, heavy)):
            if dict(own) != dict(other):
                raise UsageError(
                    f"the discriminator has learnt from images of {_label(own)} as {leg} model, but {_label(other)} is "
                    "served: psctl train-predictor discriminator"
                )


def load_discriminator(path: Path) -> Discriminator:
    """Read a file that `Discriminator.save` has written.

    Raises UsageError: it is missing, damaged or of another kind.
    """
    arrays, content = _FILE.read(path)
    try:
        _FILE.require_version(content, _VERSION)
        about = parse(DiscriminatorAbout, content)
        net = new_net(about.net)
        net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _FILE.version_error(path, error) from error
    found = Discriminator(net, about)
    found.digest = sha256_of(path)
    return found


def thumbnail(image: Any) -> Tensor:
    """Resize an image (PIL, or uint8 (h, w, 3)) to the input of discriminators, uint8 (3, 96, 96)."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8, copy=True)).permute(2, 0, 1)[None].float()
    small = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8)[0]


def normalised(thumbnails: Tensor) -> Tensor:
    """Convert uint8 images to the networks' input, float32 from -1 to 1."""
    return thumbnails.float() / 127.5 - 1


def calibration_error(confidences: Tensor, is_real: Tensor, num_bins: int = 15) -> float:
    """Return the expected calibration error, over bins of equal width (Guo et al., 2017).

    Args:
        confidences: (n,) from 0 to 1.
        is_real: (n,) booleans.
        num_bins: number of bins.
    """
    bins = (confidences * num_bins).long().clamp(max=num_bins - 1)
    error = 0.0
    for number in range(num_bins):
        inside = bins == number
        if inside.any():
            gap = confidences[inside].mean() - is_real[inside].float().mean()
            error += float(gap.abs()) * float(inside.float().mean())
    return error


def _label(model: Mapping[str, Any]) -> str:
    return f"{model.get('model')} in {model.get('num_steps')} steps ({str(model.get('fingerprint'))[:12]})"
