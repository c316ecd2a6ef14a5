"""What edits cost whom they are sent to, as far as that is seen from outside: how much of an image each computes, and
which records a worker has in memory. For the simulator and the routers. No torch.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...data.edits import active_share, latent_mask
from ...data.errors import UsageError
from ...data.requests import Request, TracedEdit
from ...data.resolution import Resolution
from ...data.traces.edits import mask_of
from ..core.request_state import RecordId
from ..families.geometry import Geometry
from .profile import EditProfile


@dataclass(frozen=True, slots=True)
class EditCosts:
    """Edits that read records.

    All templates were recorded ahead, and every worker reaches their files. One that has not yet read a record, or has
    let it go since, reads it while it prepares the edit.

    Attributes:
        active_share: of an edit; 1 for one that is computed whole.
        record_bytes: size of a record.
        load_s: seconds until a record of so many bytes is in memory.
        memory_mb: of records, of each worker.

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
        """Share of the image that steps compute; 1 for a new one, and for an exact edit. Raises as `MaskShares`."""
        return self.active_share(request) if reads_record(request) else 1.0


def reads_record(request: Request) -> bool:
    """Whether it is an edit that reads a record where there is one; an edit over HTTP may want to be exact, and records
    are of the model without adapters.
    """
    edit = request.edit
    if request.adapters:
        return False
    return request.traced is not None or (edit is not None and edit.template is not None)


class MaskShares:
    """Active shares of edits, from their masks or those that a trace names; images of traces are not read.

    Args:
        geometry: of the model.
        up_to: share of the cells up to which edits are computed in part.
    """

    def __init__(self, geometry: Geometry, up_to: float) -> None:
        self._geometry, self._up_to = geometry, up_to
        self._known: dict[tuple[TracedEdit, Resolution], float] = {}

    def __call__(self, request: Request) -> float:
        """The share; 1 for one that is computed whole, as the engine would: it reads no record, its mask is large, or
        there is no record for its size or its strength.

        Raises UsageError: the mask cannot be read, or does not fit; or the edit takes no step.
        """
        geometry, edit = self._geometry, request.edit or request.traced
        if edit is None or not reads_record(request):
            return 1.0
        if any(side % geometry.cell for side in geometry.latent_size(request.resolution)):
            return 1.0
        geometry.check_strength(request)
        if edit.strength < 1 and geometry.first_step(request) == 0:
            return 1.0
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
            self._known[key] = active_share(latent_mask(mask, geometry.latent_factor), geometry.cell)
        return self._known[key]


def profiled_edits(profile: EditProfile, geometry: Geometry) -> EditCosts:
    """Edits as `psctl profile edits` has measured them."""
    return EditCosts(MaskShares(geometry, profile.up_to), profile.record_bytes, profile.load_s)


class HeldRecords:
    """The records in one worker's memory: those that were read last, within the bound. A larger one is never held."""

    def __init__(self, edits: EditCosts) -> None:
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
