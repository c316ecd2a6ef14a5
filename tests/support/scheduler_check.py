"""Consistency check of a scheduler's state."""

from typing import get_args

from patchedserve.serving.core.request_state import Stage
from patchedserve.serving.scheduling.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the state of every open request. Raises AssertionError if the scheduler is inconsistent."""
    of = {stage: {one for one in scheduler._open.values() if one.stage == stage} for stage in get_args(Stage)}
    for room, yields in ((scheduler._waiting, False), (scheduler._yielding, True)):
        waiting = {one.request.request_id: one for one in of["waiting"] if one.request.yields == yields}
        offered, requests = {view.request_id for view in room.queue}, {i: one.request for i, one in waiting.items()}
        assert offered ^ room.held.keys() == set(waiting)
        listed = [
            (owner, rank, i) for owner, ranks in room._classes.items() for rank, found in ranks.items() for i in found
        ]
        assert sorted(listed) == sorted((one.owner, one.priority, i) for i, one in requests.items())
        lowest = {owner: min(ranks) for owner, ranks in room._classes.items()}
        is_lowest = {i for i, one in requests.items() if one.priority == lowest[one.owner]}
        assert is_lowest <= offered
        # Beyond these, only overdue requests are offered.
        assert all(requests[i].slo_s is not None for i in offered - is_lowest)
        for owner, own in room._by_owner.items():
            assert [view.request_id for view in own] == [
                view.request_id for view in room.queue if requests[view.request_id].owner == owner
            ]
        ahead = {i for i, one in waiting.items() if one.is_prepared or one is scheduler._preparing}
        assert set(room.untouched) == set(waiting) - ahead
        # A whole batch of requests that yield may be waiting again.
        assert room.num_ahead == len(ahead) <= scheduler._max_ahead + yields * scheduler._max_batch_size
    assert set(scheduler._joining.values()) == of["joining"]
    assert set(scheduler._ready) == {one for one in of["joining"] if one.is_prepared}
    assert set(scheduler._active) == of["active"]
    assert set(scheduler._decoding.states) == of["decoding"]
    assert len(scheduler._active) + len(scheduler._joining) <= scheduler._max_batch_size
    assert all(one.is_prepared for one in scheduler._active)
    assert all(one.record.status == "pending" for one in scheduler._open.values())
    assert scheduler.works == sorted(one.view.work for one in scheduler._active)
    assert scheduler.batch == sorted(one.request.resolution for one in scheduler._active)
    assert scheduler._batch_pixels == sum(size.pixels for size in scheduler.batch)
    ends = [one.first_step + one.num_iterations for one in scheduler._active]
    assert scheduler._next_leave == min(ends, default=0)
    assert all(end > scheduler.num_steps for end in ends)
    to_denoise = set(scheduler._open.values()) - of["decoding"]
    assert scheduler.num_prepared == sum(one.is_prepared for one in to_denoise)
    assert scheduler.pixel_steps == sum(map(scheduler._pixel_steps_of, to_denoise))
