"""A recorder that counts its recordings and replays."""

from collections.abc import Callable

from torch import Tensor

from patchedserve.serving.core.captured import Pause, Recorder


class CountingRecorder:
    """Recorder that delegates to another and counts.

    Attributes:
        recorded, played: numbers of recorded passes and of replays.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recorded = self.played = 0

    def reset(self) -> None:
        """Reset the counts to 0."""
        self.recorded = self.played = 0

    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record with the other recorder."""
        play, result = self._recorder(work)
        self.recorded += 1

        def replay() -> object:
            self.played += 1
            return play()

        return replay, result
