"""Consistency check of a scheduler's state."""

from typing import get_args

from patchedserve.serving.core.request_state import RequestState, Stage
from patchedserve.serving.scheduling.scheduler import Scheduler
from patchedserve.serving.scheduling.waiting_room import WaitingRoom

_STAGES = get_args(Stage)


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the state of every open request. Raises AssertionError if the scheduler is inconsistent."""
    of: dict[str, set[RequestState]] = {stage: set() for stage in _STAGES}
    for one in scheduler._open.values():
        of[one.stage].add(one)
        assert one.record.status == "pending"
    for room, yields in ((scheduler._waiting, False), (scheduler._yielding, True)):
        _check_room(scheduler, room, [one for one in of["waiting"] if one.request.yields == yields], yields=yields)
    assert set(scheduler._joining.values()) == of["joining"]
    assert set(scheduler._ready) == {one for one in of["joining"] if one.is_prepared}
    assert set(scheduler._active) == of["active"]
    assert set(scheduler._decoding.states) == of["decoding"]
    assert len(scheduler._active) + len(scheduler._joining) <= scheduler._max_batch_size
    assert all(one.is_prepared for one in scheduler._active)
    assert scheduler.works == sorted(one.view.work for one in scheduler._active)
    sizes = scheduler.batch
    assert sizes == sorted(one.request.resolution for one in scheduler._active)
    assert scheduler._batch_pixels == sum(size.pixels for size in sizes)
    ends = [one.first_step + one.num_iterations for one in scheduler._active]
    assert scheduler._next_leave == min(ends, default=0)
    assert all(end > scheduler.num_steps for end in ends)
    to_denoise = [*of["waiting"], *of["joining"], *of["active"]]
    assert scheduler.num_prepared == sum(one.is_prepared for one in to_denoise)
    assert scheduler.pixel_steps == sum(map(scheduler._pixel_steps_of, to_denoise))


def _check_room(scheduler: Scheduler, room: WaitingRoom, states: list[RequestState], *, yields: bool) -> None:
    """Check the waiting requests of one kind. Most of the time there are none."""
    if not states:
        kept = (room.queue, room.held, room._classes, room._by_owner, room.untouched, room.num_ahead)
        assert not any(kept)
        return
    waiting = {one.request.request_id: one for one in states}
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
