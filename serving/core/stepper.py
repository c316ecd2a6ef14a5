"""The seam between the engine and whatever denoises: plain diffusers, patches, and the systems to come."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..samplers.single import SamplerState
from .failures import Failures
from .prepared import PreparedRequest


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a denoise stage is to be fast for.

    Attributes:
        sizes: (height, width) of the latents.
        folder: where measurements are kept.
        fingerprint: of the model's files.
        examples: prepares a request of each size.
    """

    sizes: Sequence[tuple[int, int]]
    folder: Path
    fingerprint: str
    examples: Callable[[], Sequence[PreparedRequest]]

    def circumstances(self, model: Any) -> dict[str, Any]:
        """What the times of the denoising model depend on."""
        return {
            "fingerprint": self.fingerprint,
            "sizes": sorted([list(size) for size in set(self.sizes)]),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


class Stepper(Protocol):
    """The denoise stage. One instance serves one model; one thread at a time calls `step`.

    Attributes:
        batch_failures: steps of several requests that failed, even if all of them then took them in smaller batches.
    """

    batch_failures: Failures

    @property
    def name(self) -> str: ...

    @property
    def forecast(self) -> Collection[int]:
        """The requests, by id, that took the last step without the model, by what it said of steps before."""
        ...

    def tune(self, target: Tuning) -> None:
        """Measure what is faster for such requests, or read what was measured before. Raises as `ServedModel.tune`."""
        ...

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError if the engine cannot take the steps of this schedule, or latents of this (height, width)."""
        ...

    def prepare(self, prepared: PreparedRequest) -> None:
        """Get a request ready for its first `step`; called from the prepare stage, beside the denoise loop."""
        ...

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one denoising step of every active request, each at its own timestep; moves their states on.

        The latents of a request are up to date in its `latents` once it has finished, failed, or left the active set
        and another step was taken.

        Returns:
            The requests that failed, by id, with the reason. The others have taken their step.
        """
        ...

    def peek(self, prepared: PreparedRequest) -> torch.Tensor | None:
        """The clean latents (1, channels, height / 8, width / 8) that the last step predicts of a request of its batch,
        in float32 and in memory of their own; None where that cannot be told. Called between two steps.
        """
        ...

    def close(self) -> None:
        """Let go of what outlives the calls, such as other processes; no step is taken afterwards."""
        ...
