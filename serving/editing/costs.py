"""Costs of edits for the simulator and the routers. No torch.

The cost of an edit depends on the share of the image that it computes, and on the records in a worker's memory.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...data.edits import active_share
from ...data.errors import UsageError
from ...data.requests import Request, TracedEdit
from ...data.resolution import Resolution
from ...data.traces.edits import mask_of
from ..core.record_key import RecordKey
from ..families.geometry import Geometry
from .profile import EditProfile


@dataclass(frozen=True, slots=True)
class EditCosts:
    """Costs of edits that read records.

    All templates are recorded in advance, and every worker has access to their files. A worker that does not have a
    record in memory reads it while it prepares the edit.

    Attributes:
        share_of: maps a request to the share of its image that steps compute; 1 if they compute all of it.
        record_bytes: maps a record to its size.
        load_s: maps a number of bytes to the seconds until a record of this size is in memory.
        memory_mb: memory for records on each worker.

    Raises:
        UsageError: `memory_mb` is not above 0.
    """

    share_of: Callable[[Request], float]
    record_bytes: Callable[[RecordKey], float]
    load_s: Callable[[float], float]
    memory_mb: float = 2_000.0

    def __post_init__(self) -> None:
        if not self.memory_mb > 0:
            raise UsageError(f"memory of records is {self.memory_mb:g} MB, but it must be above 0")


class MaskShares:
    """Active shares of edits, from their own masks or from the masks that a trace names; images of traces are not read.

    Args:
        geometry: geometry of the model.
        up_to: largest active share at which an edit is computed in part.
    """

    def __init__(self, geometry: Geometry, up_to: float) -> None:
        self._geometry, self._up_to = geometry, up_to
        self._known: dict[tuple[TracedEdit, Resolution], float] = {}

    def __call__(self, request: Request) -> float:
        """Return the share of the image that steps compute: 1 without a record, and if the mask is large.

        Raises UsageError: the mask cannot be read, the mask does not fit the image, or the edit takes no step.
        """
        geometry, edit = self._geometry, request.edited
        if edit is None or not geometry.has_record(request):
            return 1.0
        geometry.check_strength(request)
        share = self._traced(request, edit) if isinstance(edit, TracedEdit) else geometry.active_share(edit)
        return share if share <= self._up_to else 1.0

    def _traced(self, request: Request, edit: TracedEdit) -> float:
        geometry, key = self._geometry, (edit, request.resolution)
        if key not in self._known:
            mask = mask_of(request)
            if mask.shape != (request.resolution.height, request.resolution.width):
                raise UsageError(
                    f"request {request.request_id}: the mask has {mask.shape[1]}x{mask.shape[0]} pixels, but its image "
                    f"{request.resolution}"
                )
            self._known[key] = active_share(geometry.mask_weights(mask), geometry.cell)
        return self._known[key]


def profiled_edits(profile: EditProfile, geometry: Geometry) -> EditCosts:
    """Return the costs of edits as measured by `psctl profile edits`."""
    return EditCosts(MaskShares(geometry, profile.up_to), profile.record_bytes, profile.load_s)


class HeldRecords:
    """The records in one worker's memory, with LRU eviction. A record larger than the memory is never kept."""

    def __init__(self, edits: EditCosts) -> None:
        self._edits = edits
        self._bytes_of: OrderedDict[RecordKey, float] = OrderedDict()
        self._num_bytes = 0.0

    def missing_s(self, record: RecordKey) -> float:
        """Return the seconds that reading the record would take; 0 if it is in memory."""
        return 0.0 if record in self._bytes_of else self._edits.load_s(self._edits.record_bytes(record))

    def read(self, record: RecordKey) -> float:
        """Read a record into memory, and return the seconds that this takes, as `missing_s` does."""
        seconds, size = self.missing_s(record), self._edits.record_bytes(record)
        self._num_bytes += size - self._bytes_of.pop(record, 0.0)
        self._bytes_of[record] = size
        while self._num_bytes > self._edits.memory_mb * 1e6:
            self._num_bytes -= self._bytes_of.popitem(last=False)[1]
        return seconds
