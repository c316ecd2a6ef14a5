"""A policy made from a function, for tests that need one that psctl lacks."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import Decision, Snapshot

Choose = Callable[[float, Sequence[RequestView], Sequence[RequestView]], Decision]


class FunctionPolicy:
    """Decides by `choose(now_s, waiting, active)`, on batches of any resolutions."""

    name: ClassVar[str] = "function"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def decide(self, snapshot: Snapshot) -> Decision:
        return self._choose(snapshot.now_s, snapshot.waiting, snapshot.active)
