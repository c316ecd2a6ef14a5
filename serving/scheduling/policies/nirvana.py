"""NIRVANA as PatchedServe section 8 compares with it: fewer denoising steps, and continuous batching."""

from collections.abc import Sequence
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, fill_by_arrival


class NirvanaPolicy:
    """Runs every request with 79 % of its steps, and fills every free place in order of arrival. Never drops.

    NIRVANA (Agarwal et al., NSDI 2024) starts from noise that it cached for a similar prompt and so skips the first
    steps; its authors report 21 % less GPU compute on average over a production trace. PatchedServe has no such cache
    of earlier prompts either and runs fewer steps in its place, with ORCA's batching; so do we. Images are drawn
    with the smaller number of steps, so their quality can be measured. It runs on the plain engine in the paper
    (`--engine plain`).
    """

    name: ClassVar[str] = "nirvana"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False
    num_steps_scale: ClassVar[float] = 0.79

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
    ) -> Decision:
        """See `Policy.decide`."""
        return fill_by_arrival(waiting, active, max_batch_size)
