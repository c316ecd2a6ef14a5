"""Standalone latencies that a served run puts in doubt, because requests took far less time in it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.checked_request import CheckedRequest
from ..core.request_state import RequestRecord
from .standalone import RequestShape, shape_of

if TYPE_CHECKING:
    from ..models.served import ServedModel

_MAX_TIMES_SERVED = 5.0
"""Ratio of a request's standalone latency to its time in a run above which its SLO is in doubt."""


def doubtful_alone(records: Sequence[RequestRecord], requests: Sequence[CheckedRequest]) -> dict[str, float]:
    """Return, by resolution, the ratio of the standalone latency on plain diffusers to the shortest time in which a
    request was served, waiting excluded. Only ratios above `_MAX_TIMES_SERVED` are returned.

    Steps take longer in a batch, not shorter, and neither the cache nor fewer steps save as much. Such a ratio means
    that the standalone latencies, from which the SLOs are derived, were measured on a busy machine.
    """
    alone_s = {each.request.request_id: each.standalone_s for each in requests}
    found: dict[str, float] = {}
    for record in records:
        alone, served_s = alone_s[record.request_id], _without_waiting_s(record)
        if alone is None or served_s is None:
            continue
        times = alone / served_s
        found[str(record.resolution)] = max(times, found.get(str(record.resolution), 0.0))
    return {name: times for name, times in sorted(found.items()) if times > _MAX_TIMES_SERVED}


def exact_s(
    model: "ServedModel", requests: Sequence[CheckedRequest], records: Sequence[RequestRecord]
) -> dict[RequestShape, float]:
    """Return, by shape, the shortest time in which a new image without reused steps was served, waiting excluded.

    Empty if passes were compiled or recorded, which makes them faster by more than the error of a measurement.
    """
    least_s: dict[RequestShape, float] = {}
    new = [each.request for each in requests if each.request.edit is None]
    shapes = {request.request_id: shape_of(model, request) for request in new}
    for record in () if model.options.compile or model.options.cuda_graphs else records:
        shape, served_s = shapes.get(record.request_id), _without_waiting_s(record)
        if shape is not None and served_s is not None and not record.steps_reused:
            least_s[shape] = min(served_s, least_s.get(shape, math.inf))
    return least_s


def _without_waiting_s(record: RequestRecord) -> float | None:
    """Return the seconds that a request took, excluding the time it waited for others; None if it was not served."""
    if record.latency_s is None or record.admitted_s is None:
        return None
    prepare_s = (record.prepare_end_s or 0.0) - (record.prepare_start_s or 0.0)
    return (record.finish_s or 0.0) - record.admitted_s + prepare_s
