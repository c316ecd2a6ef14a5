"""What decides the images of a model, whichever process draws them. No torch."""

from dataclasses import dataclass

from ..options import EngineOptions


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A loaded model, told apart from all others.

    Attributes:
        name: the user's name for it.
        fingerprint: of its files.
        dtype: such as `bfloat16`.
        device: its kind, such as `cuda`.
        options: of the engine.
    """

    name: str
    fingerprint: str
    dtype: str
    device: str
    options: EngineOptions
