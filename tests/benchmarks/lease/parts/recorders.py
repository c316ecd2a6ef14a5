"""A recorder that counts."""

from collections.abc import Callable

from torch import Tensor

from patchedserve.serving.core.captured import Recorder


class CountingRecorder:
    """Records as another recorder does, and counts.

    Attributes:
        recorded, played: passes that were recorded, and replays.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recorded = self.played = 0

    def reset(self) -> None:
        """Count from 0 again."""
        self.recorded = self.played = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """As of the other recorder."""
        play, result = self._recorder(work)
        self.recorded += 1

        def replay() -> object:
            self.played += 1
            return play()

        return replay, result
