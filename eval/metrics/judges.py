"""Networks that judge images, loaded when a metric first needs them, with the checksums that results record."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...data.files import sha256_of
from .clip import DEFAULT_CLIP, Clip, load_clip
from .inception import InceptionFeatures, find_inception_weights, load_inception
from .lpips import WEIGHTS_SHA256, Lpips, find_lpips_weights, load_lpips


@dataclass
class Judges:
    """CLIP, Inception and LPIPS's AlexNet.

    Attributes:
        clip_model: bundled name, folder or hub id of a CLIP model.
        fid_weights, lpips_weights: weights files; None searches for them.
        device: device on which the networks run.
    """

    clip_model: str = DEFAULT_CLIP
    fid_weights: Path | None = None
    lpips_weights: Path | None = None
    device: str | torch.device = "cpu"

    def check(self, metrics: tuple[str, ...]) -> None:
        """Load what the metrics need, so that missing weights are found before hours of generation.

        Raises:
            UsageError, RunError: weights are missing or not the known ones, or CLIP cannot be loaded.
        """
        if "clip" in metrics:
            _ = self.clip
        if "lpips" in metrics:
            _ = self.lpips
        if {"fid", "kid"} & set(metrics):
            _ = self.inception

    @property
    def clip_name(self) -> str:
        """Name of the CLIP model in results: its name or hub id, or the last part of a folder."""
        path = Path(self.clip_model)
        return path.name if path.is_absolute() or path.is_dir() else self.clip_model

    @cached_property
    def clip(self) -> Clip:
        """The CLIP model. Raises as `load_clip`."""
        return load_clip(self.clip_model, self.device)

    @cached_property
    def inception(self) -> InceptionFeatures:
        """FID's feature network. Raises as `load_inception`."""
        return load_inception(self.fid_weights, self.device)

    @cached_property
    def lpips(self) -> Lpips:
        """The network of LPIPS. Raises as `load_lpips`."""
        return load_lpips(self.lpips_weights, self.device)

    @cached_property
    def inception_sha256(self) -> str:
        """SHA-256 of the Inception weights file."""
        return sha256_of(find_inception_weights(self.fid_weights))

    @cached_property
    def clip_details(self) -> dict[str, Any]:
        """Details of the CLIP model for results: its name and the SHA-256 of its parameters."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.clip.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return {"clip_model": self.clip_model, "weights_sha256": digest.hexdigest()}

    def inception_details(self) -> dict[str, Any]:
        """Return the details of the Inception weights for results."""
        return {"weights": find_inception_weights(self.fid_weights).name, "weights_sha256": self.inception_sha256}

    def lpips_details(self) -> dict[str, Any]:
        """Return the details of the LPIPS weights for results; loading them has verified the checksum."""
        return {"weights": find_lpips_weights(self.lpips_weights).name, "weights_sha256": WEIGHTS_SHA256}
