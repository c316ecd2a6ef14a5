"""Circumstances of a block profile. A predictor or schedule made from it serves only a model with the same facts."""

from dataclasses import dataclass
from typing import Self

from ..checks import require_counts
from ..errors import UsageError
from ..run_facts import MeasuredModel

WHOLE_MODEL = "model"
"""Name of all blocks of a model as one, from the input of the first to the output of the last; its index follows that
of the last block."""


@dataclass(frozen=True, slots=True)
class ProfiledModel(MeasuredModel):
    """Model and scheduler of a profile.

    Attributes:
        scheduler: class of the diffusers scheduler.
    """

    scheduler: str

    @property
    def decisive(self) -> tuple[str, ...]:
        return ("scheduler",)


@dataclass(frozen=True, slots=True)
class BlockFacts(ProfiledModel):
    """Model, scheduler, patch size and blocks of a profile.

    Attributes:
        patch_size: side of a patch in latent pixels.
        blocks: names of the cached blocks, in the order in which a step runs them.

    Raises:
        UsageError: the patch size is not positive, or the blocks are not a list of different names.
    """

    patch_size: int
    blocks: tuple[str, ...]

    def __post_init__(self) -> None:
        require_counts({"patch_size": self.patch_size})
        if not self.blocks or len(set(self.blocks)) != len(self.blocks):
            raise UsageError(f"blocks is {list(self.blocks)}, but it must be a list of different names")

    @property
    def decisive(self) -> tuple[str, ...]:
        return ("scheduler", "patch_size", "blocks")

    def check_fits(self, served: Self, *, source: str) -> None:
        """Check that `source` was made for what is served. Raises UsageError that names the first different fact."""
        if (difference := self.difference(served)) is not None:
            model = served.model
            remedy = f"run psctl profile blocks --model {model} and psctl train-predictor cache --model {model}"
            if self.patch_size != served.patch_size:
                remedy = f"give --cache-patch-size {self.patch_size}, or {remedy}"
            raise UsageError(f"{source} {difference}; {remedy}")
