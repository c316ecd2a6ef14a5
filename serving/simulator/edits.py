"""What edits are to the simulator: how much of an image each computes, and the records that a GPU has in memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...data.errors import UsageError
from ...data.requests import Request
from ..core.request_state import RecordId


@dataclass(frozen=True, slots=True)
class SimulatedEdits:
    """Edits of a trace that read records.

    All templates were recorded ahead, and every GPU reaches their files. One that has not yet read a record, or has
    let it go since, reads it while it prepares the edit.

    Attributes:
        active_share: of an edit; 1 for one that is computed whole.
        record_bytes: size of a record.
        load_s: seconds until a record of so many bytes is in memory.
        memory_mb: of records, on each GPU.

    Raises:
        UsageError: the memory is not above 0.
    """

    active_share: Callable[[Request], float]
    record_bytes: Callable[[RecordId], float]
    load_s: Callable[[float], float]
    memory_mb: float = 2_000.0

    def __post_init__(self) -> None:
        if not self.memory_mb > 0:
            raise UsageError(f"memory of records is {self.memory_mb:g} MB, but it must be above 0")

    def share_of(self, request: Request) -> float:
        """Share of the image that steps compute; 1 for a new one."""
        return 1.0 if request.traced is None else self.active_share(request)


class HeldRecords:
    """The records in one GPU's memory: those that were read last, within the bound. A larger one is never held."""

    def __init__(self, edits: SimulatedEdits) -> None:
        self._edits = edits
        self._bytes_of: OrderedDict[RecordId, float] = OrderedDict()
        self._num_bytes = 0.0

    def missing_s(self, record: RecordId) -> float:
        """Seconds that it would have to be read for; 0 if it is there."""
        return 0.0 if record in self._bytes_of else self._edits.load_s(self._edits.record_bytes(record))

    def read(self, record: RecordId) -> float:
        """Read it, as `missing_s` says, and hold it."""
        seconds, size = self.missing_s(record), self._edits.record_bytes(record)
        self._num_bytes += size - self._bytes_of.pop(record, 0.0)
        self._bytes_of[record] = size
        while self._num_bytes > self._edits.memory_mb * 1e6:
            self._num_bytes -= self._bytes_of.popitem(last=False)[1]
        return seconds
