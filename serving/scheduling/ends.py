"""How requests have fared lately: what fair policies go by."""

from ...data.resolution import Resolution
from ..core.request_state import RequestRecord
from .policies import ALL_IN_TIME, Lately

_WINDOW = 100
"""Requests after which one counts a third."""
_BEHIND = 0.08
_FEW = 4.0
_FORGOTTEN = 0.05


class RecentEnds:
    """Shares of requests that met their deadline, of all and by resolution; older ones count less and less.

    A resolution is behind where its share is 8 points below that of all; one of which few have ended is taken to be as
    good as the others. At first all are taken to have been in time.
    """

    def __init__(self) -> None:
        # By resolution: how many have ended, and how many of them in time, each by its weight.
        self._ended: dict[Resolution, tuple[float, float]] = {}
        self._before = float(_WINDOW)
        self._lately: Lately | None = ALL_IN_TIME

    def note(self, record: RequestRecord) -> None:
        """Take note of a record that is closed. Those without a deadline do not count, nor those that were withdrawn
        or failed.
        """
        if record.status not in ("completed", "discarded") or record.slo_met is None:
            return
        kept = 1 - 1 / _WINDOW
        self._before *= kept
        faded = {size: (kept * ended, kept * in_time) for size, (ended, in_time) in self._ended.items()}
        ended, in_time = faded.get(record.resolution, (0.0, 0.0))
        faded[record.resolution] = ended + 1, in_time + record.slo_met
        self._ended = {size: counts for size, counts in faded.items() if counts[0] > _FORGOTTEN}
        self._lately = None

    @property
    def lately(self) -> Lately:
        """What has become of them."""
        if self._lately is None:
            ended, in_time = map(sum, zip(*self._ended.values(), strict=True))
            mean = in_time / ended
            behind = (
                size
                for size, (of_size, met) in self._ended.items()
                if (met + _FEW * mean) / (of_size + _FEW) < mean - _BEHIND
            )
            count = ended + self._before
            self._lately = Lately((in_time + self._before) / count, frozenset(behind), count)
        return self._lately
