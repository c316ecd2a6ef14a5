"""Circumstances of a block profile. A predictor or schedule made from it serves only a model with the same facts."""

from dataclasses import asdict, dataclass
from typing import Any

from ..checks import require_counts
from ..errors import UsageError

WHOLE_MODEL = "model"
"""Name of all blocks of a model as one, from the input of the first to the output of the last; its index follows that
of the last block."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """Model and scheduler of a profile.

    Attributes:
        model: the user's name for the model.
        fingerprint: fingerprint of the model's files (`serving.models.checkpoint.fingerprint`); empty if it has none.
        scheduler: class of the diffusers scheduler.
    """

    model: str
    fingerprint: str
    scheduler: str

    def check_model(self, served: "ProfiledModel", *, source: str, remedy: str) -> None:
        """Check that `source` was made for the served model and scheduler; `remedy` ends the message.

        Models are compared by fingerprint, or by name if one of them has none.

        Raises:
            UsageError: naming the first fact that differs.
        """
        if self.fingerprint and served.fingerprint:
            if self.fingerprint != served.fingerprint:
                other = "other weights of" if self.model == served.model else f"{self.model}, not for"
                raise UsageError(f"{source} was made for {other} {served.model}; {remedy}")
        elif self.model != served.model:
            raise UsageError(f"{source} was made for {self.model}, not for {served.model}; {remedy}")
        if self.scheduler != served.scheduler:
            raise UsageError(
                f"{source} was made with the scheduler {self.scheduler}, but {served.model} runs with "
                f"{served.scheduler}; {remedy}"
            )


@dataclass(frozen=True, slots=True)
class BlockFacts(ProfiledModel):
    """Model, scheduler, patch size and blocks of a profile.

    Attributes:
        model, fingerprint, scheduler: as in `ProfiledModel`.
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

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return asdict(self) | {"blocks": list(self.blocks)}

    def check_fits(self, served: "BlockFacts", *, source: str) -> None:
        """Check that `source` was made for what is served. Raises UsageError that names the first different fact."""
        model = served.model
        remedy = f"run psctl profile blocks --model {model} and psctl train-predictor cache --model {model}"
        self.check_model(served, source=source, remedy=remedy)
        if self.patch_size != served.patch_size:
            raise UsageError(
                f"{source} was made for patches of {self.patch_size} latent pixels, but they have "
                f"{served.patch_size} now; give --cache-patch-size {self.patch_size} or profile again"
            )
        if self.blocks != served.blocks:
            raise UsageError(
                f"{source} was made for {len(self.blocks)} blocks ({', '.join(self.blocks)}), but {served.model} "
                f"has {len(served.blocks)} ({', '.join(served.blocks)}); {remedy}"
            )
