"""Identity of a loaded model: the settings that determine its images in any process. No torch."""

from dataclasses import dataclass

from ..options import EngineOptions


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of a loaded model.

    Attributes:
        name: the user's name for it.
        fingerprint: fingerprint of its files.
        dtype: its dtype, such as `bfloat16`.
        device: type of its device, such as `cuda`.
        options: options of the engine.
    """

    name: str
    fingerprint: str
    dtype: str
    device: str
    options: EngineOptions
