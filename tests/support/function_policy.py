"""A policy that is made of a function, for tests that need one which psctl does not have."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import ALL_IN_TIME, Decision, Lately
from patchedserve.serving.scheduling.policies.base import StepLatencyPredictor

Choose = Callable[[float, Sequence[RequestView], Sequence[RequestView]], Decision]


class FunctionPolicy:
    """Decides as `choose(now_s, waiting, active)` says, on batches of any resolutions."""

    name: ClassVar[str] = "function"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
        decoder_free_s: float = 0.0,
        lately: Lately = ALL_IN_TIME,
    ) -> Decision:
        return self._choose(now_s, waiting, active)
