"""Interface between the engine and the implementations of the denoise stage, such as plain diffusers and patches."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..samplers.single import SamplerState
from .failures import Failures
from .prepared import PreparedRequest
from .progress import OnProgress, no_progress


@dataclass(frozen=True, slots=True)
class Tuning:
    """Workload that a denoise stage is tuned for.

    Attributes:
        sizes: (height, width) of the latents.
        folder: directory of the measurements.
        fingerprint: fingerprint of the model's files.
        examples: prepares a request of each size.
        max_batch_size: largest batch whose passes are recorded in advance, if passes are recorded; 0 for none.
        on_progress: called with the progress of measurements and recordings.
    """

    sizes: Sequence[tuple[int, int]]
    folder: Path
    fingerprint: str
    examples: Callable[[], Sequence[PreparedRequest]]
    max_batch_size: int = 0
    on_progress: OnProgress = no_progress

    def circumstances(self, model: Any) -> dict[str, Any]:
        """Return the facts on which the times of the denoising model depend."""
        return {
            "fingerprint": self.fingerprint,
            "sizes": sorted([list(size) for size in set(self.sizes)]),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


class Stepper(Protocol):
    """The denoise stage. One instance serves one model; only one thread at a time may call `step`.

    Attributes:
        batch_failures: steps of several requests that failed, even if all of them then took them in smaller batches.
    """

    batch_failures: Failures

    @property
    def name(self) -> str: ...

    @property
    def forecast(self) -> Collection[int]:
        """Ids of the requests that took the last step without the model, from its predictions in earlier steps."""
        ...

    def tune(self, target: Tuning) -> None:
        """Measure the alternatives for such requests, or load earlier measurements. Raises as `ServedModel.tune`."""
        ...

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError if the engine does not support this schedule, or latents of this (height, width)."""
        ...

    def prepare(self, prepared: PreparedRequest) -> None:
        """Prepare a request for its first `step`; called from the prepare stage, concurrently with the denoise loop."""
        ...

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one denoising step of every active request, each at its own timestep, and advance their states.

        The latents of a request are up to date in its `latents` once it has finished, failed, or left the active set
        and another step was taken.

        Returns:
            The requests that failed, by id, with the reason. The others have taken their step.
        """
        ...

    def peek(self, prepared: PreparedRequest) -> torch.Tensor | None:
        """Return the clean latents (1, channels, height / 8, width / 8) that the last step predicts for a request of
        its batch, in float32 and in memory of their own; None if they are not available. Called between two steps.
        """
        ...

    def close(self) -> None:
        """Release long-lived resources, such as other processes; no step is taken afterwards."""
        ...
