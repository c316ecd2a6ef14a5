"""Recent SLO attainment, overall and by resolution, which fair policies read."""

from ...data.resolution import Resolution
from ..core.request_state import RequestRecord
from .policies import ALL_IN_TIME, RecentAttainment

_WINDOW = 100
"""Number of later requests after which the weight of a request has fallen to about a third."""
_BEHIND = 0.08
_FEW = 4.0
_FORGOTTEN = 0.05


class AttainmentTracker:
    """Exponentially weighted shares of requests that met their deadline, overall and by resolution.

    A resolution is behind if its share is more than 8 points below the overall share; the share of a resolution with
    few ended requests is pulled towards the overall share. Initially, all requests are assumed to have been in time.
    """

    def __init__(self) -> None:
        # By resolution: the weights of the requests that ended, and of those that ended in time, summed.
        self._ended: dict[Resolution, tuple[float, float]] = {}
        self._before = float(_WINDOW)
        self._attainment: RecentAttainment | None = ALL_IN_TIME

    def note(self, record: RequestRecord) -> None:
        """Count a closed record. Requests without a deadline, withdrawn requests and failed ones do not count."""
        if record.status not in ("completed", "discarded") or record.slo_met is None:
            return
        kept = 1 - 1 / _WINDOW
        self._before *= kept
        faded = {size: (kept * ended, kept * in_time) for size, (ended, in_time) in self._ended.items()}
        ended, in_time = faded.get(record.resolution, (0.0, 0.0))
        faded[record.resolution] = ended + 1, in_time + record.slo_met
        self._ended = {size: counts for size, counts in faded.items() if counts[0] > _FORGOTTEN}
        self._attainment = None

    @property
    def attainment(self) -> RecentAttainment:
        """Current shares, in the form that policies read."""
        if self._attainment is None:
            ended, in_time = map(sum, zip(*self._ended.values(), strict=True))
            mean = in_time / ended
            behind = (
                size
                for size, (of_size, met) in self._ended.items()
                if (met + _FEW * mean) / (of_size + _FEW) < mean - _BEHIND
            )
            count = ended + self._before
            self._attainment = RecentAttainment((in_time + self._before) / count, frozenset(behind), count)
        return self._attainment
