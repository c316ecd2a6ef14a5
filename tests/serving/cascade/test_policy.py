"""Choice of the next batch from a worker's queue."""

import math

from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.policy import CascadePolicy
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies.base import Decision, Snapshot

SMALL, LARGE = Resolution(64, 64), Resolution(128, 128)


def batch_s(resolution: Resolution, count: int) -> float:
    """Return one second for each small image and two for each large one."""
    return count * (1.0 if resolution == SMALL else 2.0)


def view(request_id: int, resolution: Resolution = SMALL, deadline_s: float | None = None) -> RequestView:
    return RequestView(request_id, resolution, float(request_id), deadline_s, 4)


def test_first_request_is_batched_with_others_of_its_size() -> None:
    queue = [view(0, LARGE), view(1), view(2, LARGE), view(3, LARGE)]
    assert CascadePolicy(batch_s).decide(Snapshot(10.0, queue, [], 2)) == Decision((0, 2))


def test_earliest_deadline_is_served_first() -> None:
    queue = [view(0, LARGE, 30.0), view(1, deadline_s=25.0), view(2), view(3, deadline_s=20.0)]
    assert CascadePolicy(batch_s).decide(Snapshot(10.0, queue, [], 2)) == Decision((3, 1))


def test_late_requests_are_dropped_and_the_batch_is_rebuilt() -> None:
    # Three small images end at 13 s: the second would be late, and without it the others take two seconds.
    queue = [view(0, deadline_s=20.0), view(1, deadline_s=12.5), view(2, deadline_s=20.0)]
    decision = CascadePolicy(batch_s).decide(Snapshot(10.0, queue, [], 3))
    assert decision.admit == (0, 2)
    assert decision.drop == ((1, "it would be late in a batch of 3"),)
    # Alone, it is in time.
    assert CascadePolicy(batch_s).decide(Snapshot(10.0, queue, [], 1)) == Decision((1,))
    # No request is dropped for a batch that it is not in.
    queue = [view(0, LARGE, 12.2), *(view(number, deadline_s=12.5) for number in range(1, 4))]
    assert CascadePolicy(batch_s).decide(Snapshot(10.0, queue, [], 2)) == Decision((0,))


def test_batch_runs_to_completion_including_decoding() -> None:
    policy, queue = CascadePolicy(batch_s), [view(1, deadline_s=10.5)]
    assert policy.decide(Snapshot(10.0, queue, [view(0)], 4)) == Decision()
    for free_s in (10.2, math.inf):
        assert policy.decide(Snapshot(10.0, queue, [], 4, decoder_free_s=free_s)) == Decision()
    assert policy.decide(Snapshot(10.0, queue, [], 4, decoder_free_s=10.0)).drop
