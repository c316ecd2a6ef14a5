"""Who waits for the decoder, and when it will be free."""

import math

from ..core.request_state import RequestState
from .policies import EndPredictor


class DecoderQueue:
    """The requests that wait for the decoder or are decoded. It takes one at a time, in the order of `put`.

    Args:
        learner: how long the decoder has for a request, which it is told of every one that was decoded; None where
            nobody knows.
    """

    def __init__(self, learner: EndPredictor | None) -> None:
        self._learner = learner
        self._states: dict[int, RequestState] = {}
        # When the decoder ended the last request.
        self._ended_s = 0.0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def states(self) -> list[RequestState]:
        """All of them, in order."""
        return list(self._states.values())

    def put(self, state: RequestState) -> None:
        """A request has taken its last step."""
        self._states[state.request.request_id] = state

    def end(self, state: RequestState, now_s: float) -> None:
        """The decoder is done with a request, whose record is closed, or need not begin."""
        del self._states[state.request.request_id]
        start_s, self._ended_s = self._start_s(state, self._ended_s), max(now_s, self._ended_s)
        if self._learner is not None and state.record.status == "completed":
            self._learner.observe_end(state.request.resolution, max(0.0, now_s - start_s))

    def free_s(self) -> float:
        """When the decoder will have done what it was given; infinity where it is at work and nobody knows."""
        if self._learner is None:
            return math.inf if self._states else self._ended_s
        free_s = self._ended_s
        for state in self._states.values():
            after_s = self._learner.after_steps_s(state.request.resolution) or 0.0
            free_s = self._start_s(state, free_s) + after_s
        return free_s

    def _start_s(self, state: RequestState, free_s: float) -> float:
        """Since when a decoder that was free by then could work on a request."""
        assert state.record.denoise_end_s is not None
        return max(state.record.denoise_end_s, free_s)
