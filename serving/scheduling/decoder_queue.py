"""Queue of requests that wait for the decoder, and the predicted time at which the decoder is free."""

import math

from ..core.request_state import RequestState
from .policies import EndPredictor


class DecoderQueue:
    """Requests that wait for the decoder or are being decoded. The decoder takes one at a time, in the order of `put`.

    Args:
        learner: predicts how long the decoder takes for a request, and receives the measured time of every decoded
            request; None if decoder times are not predicted.
    """

    def __init__(self, learner: EndPredictor | None) -> None:
        self._learner = learner
        self._states: dict[int, RequestState] = {}
        # Time at which the decoder ended the last request.
        self._ended_s = 0.0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def states(self) -> list[RequestState]:
        """States of these requests, in order."""
        return list(self._states.values())

    def put(self, state: RequestState) -> None:
        """Append a request that has taken its last step."""
        self._states[state.request.request_id] = state

    def end(self, state: RequestState, now_s: float) -> None:
        """Remove a request whose record is closed: the decoder is done with it or need not begin."""
        del self._states[state.request.request_id]
        start_s, self._ended_s = self._start_s(state, self._ended_s), max(now_s, self._ended_s)
        if self._learner is not None and state.record.status == "completed":
            self._learner.observe_end(state.request.resolution, max(0.0, now_s - start_s))

    def free_s(self) -> float:
        """Return the time at which the decoder will have emptied its queue; infinity if it is busy and its end is not
        known.
        """
        if self._learner is None:
            return math.inf if self._states else self._ended_s
        free_s = self._ended_s
        for state in self._states.values():
            after_s = self._learner.after_steps_s(state.request.resolution) or 0.0
            free_s = self._start_s(state, free_s) + after_s
        return free_s

    def _start_s(self, state: RequestState, free_s: float) -> float:
        """Return the time from which a decoder that is free at `free_s` can work on a request."""
        assert state.record.denoise_end_s is not None
        return max(state.record.denoise_end_s, free_s)
