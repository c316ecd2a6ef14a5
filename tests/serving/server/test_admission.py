"""Admission of requests: the queue, shares of keys and rate limits."""

import contextlib
from typing import Any

import pytest

from patchedserve.serving.server.admission import Admission
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.limits import KeyLimits, Limits

TWO = {"a": KeyLimits(), "b": KeyLimits()}


class Work:
    pending = 0.0
    rate: float | None = None
    of_key: dict[str, float] = {}  # noqa: RUF012  a test assigns its own


def admission(work: Work, **limits: Any) -> Admission:
    return Admission(
        Limits(**limits), lambda: work.rate, lambda key: work.pending if key is None else work.of_key.get(key, 0.0)
    )


def refused(room: Admission, count: int = 1, key: str = "", pixel_steps: float = 0.0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        room.reserve(count, key, pixel_steps)
    assert caught.value.status == 429
    return caught.value


def test_n_images_take_n_places_and_release_them_once() -> None:
    room = admission(Work(), max_queue=5)
    first, second = room.reserve(3, "a"), room.reserve(2, "b")
    assert refused(room).code == "queue_full"
    room.release(first)
    room.release(first)
    assert room.num_images == 2
    assert refused(room, 4).code == "queue_full"
    room.release(room.reserve(3, "a"))
    room.release(second)
    assert room.num_images == 0
    assert not room._of_key, "keys of nobody are not kept"


def test_each_key_has_its_own_share() -> None:
    room = admission(Work(), max_per_key=2)
    room.reserve(2, "a")
    assert refused(room, key="a").code == "too_many_in_flight"
    room.reserve(2, "b")


def taken(room: Admission, key: str) -> int:
    """Reserve images of a key one by one until one is refused; return how many were admitted."""
    num_before = room.num_images
    with contextlib.suppress(ApiError):
        while True:
            room.reserve(1, key)
    return room.num_images - num_before


@pytest.mark.parametrize("num_owners", [2, 3, 7, 32, 64, 200])
@pytest.mark.parametrize("max_queue", [1, 2, 8, 64])
def test_every_key_finds_room_despite_load_of_others(max_queue: int, num_owners: int) -> None:
    owners = [f"key-{number}" for number in range(num_owners)]
    room, share = (
        admission(Work(), max_queue=max_queue, keys=dict.fromkeys(owners, KeyLimits())),
        max(1, max_queue // (2 * num_owners)),
    )
    first = taken(room, owners[0])
    assert max_queue / 2 <= first <= max_queue, "a key alone has at least half"
    num_waiting = min(num_owners - 1, max_queue // 2)
    for owner in owners[1:num_waiting]:
        assert taken(room, owner) >= share
    if num_waiting:
        assert taken(room, owners[num_waiting]) >= share
    assert room.num_images <= max_queue


def test_shares_of_the_queue_follow_weights() -> None:
    work = Work()
    room = admission(work, keys={"a": KeyLimits(weight=3), "b": KeyLimits()})
    assert taken(room, "b") == 64 - 24
    assert taken(room, "a") == 24
    work.rate, work.pending, work.of_key = 1e7, 1e9, {"a": 2.2e8, "b": 8e7}
    assert refused(admission(work, keys=room.limits.keys), key="b").code == "queue_too_long", "7.5 of 60 s are b's"
    admission(work, keys=room.limits.keys).reserve(1, "a")


def test_single_or_privileged_key_may_use_the_whole_queue() -> None:
    for limits in ({}, {"keys": {"a": KeyLimits()}}, {"keys": TWO, "max_per_key": 64}):
        assert taken(admission(Work(), **limits), "a") == 64
    room = admission(Work(), keys=TWO)
    assert taken(room, "a") == 48
    assert "48 images of this key are open, and it may have 48" in refused(room, key="a").message
    room.reserve(10, "b")
    assert taken(room, "a") == 0
    assert taken(room, "b") == 6


def test_long_queue_of_one_key_does_not_block_others() -> None:
    work = Work()
    room = admission(work, keys=TWO)
    work.rate, work.pending, work.of_key = 1e7, 1e9, {"a": 1e9}
    assert refused(room, key="a").code == "queue_too_long"
    room.reserve(1, "b")
    work.of_key = {"a": 1e9 - 1.6e8, "b": 1.6e8}
    assert refused(room, key="b").code == "queue_too_long", "16 s of its own wait, of 60 s for both"


def test_request_rate_of_a_key_is_limited() -> None:
    now_s = 100.0
    limits = {"a": KeyLimits(requests_per_minute=3), "b": KeyLimits(pixel_steps_per_second=10), "c": KeyLimits()}
    room = Admission(Limits(keys=limits), lambda: None, lambda key: 0.0, clock=lambda: now_s)

    def wait_of(key: str, pixel_steps: float) -> str:
        error = refused(room, key=key, pixel_steps=pixel_steps)
        assert error.code == "rate_limit_exceeded"
        return error.headers["Retry-After"]

    for key in "aaa":
        room.release(room.reserve(1, key, 1e9))
    assert wait_of("a", 1) == "20"
    now_s += 19
    assert wait_of("a", 1) == "1"
    now_s += 1
    room.release(room.reserve(1, "a", 1e9))
    now_s += 3600
    for key in "aaa":
        room.release(room.reserve(1, key, 1e9))
    assert wait_of("a", 1) == "20", "a long pause saves up no more than a minute's worth"
    # A request that costs more than a minute's allowance is admitted, and the excess is owed.
    room.release(room.reserve(1, "b", 900))
    assert wait_of("b", 100) == "40"
    now_s += 40
    room.release(room.reserve(1, "b", 100))
    for _ in range(50):
        room.release(room.reserve(1, "c", 1e12))
    assert not room.num_images


def test_refusal_for_lack_of_room_consumes_no_quota() -> None:
    room = admission(Work(), max_queue=1, keys={"a": KeyLimits(requests_per_minute=1), "b": KeyLimits()})
    place = room.reserve(1, "b")
    assert refused(room, key="a").code == "queue_full"
    room.release(place)
    room.reserve(1, "a")


def test_open_images_of_a_key_are_limited() -> None:
    room = admission(Work(), keys={"a": KeyLimits(max_open=3), "b": KeyLimits(max_open=60), "c": KeyLimits()})
    assert taken(room, "a") == 3
    assert taken(room, "b") == 64 - 3 - 7 - 10, "7 places are left of the share of a, and 10 of that of c"


def test_requests_beyond_the_queue_time_are_refused() -> None:
    work = Work()
    room = admission(work, max_queue_time_s=60.0)
    work.pending = 1e9
    room.reserve(1, "")  # the rate is not known yet
    work.rate = 1e7
    error = refused(room)
    assert error.code == "queue_too_long"
    assert error.headers["Retry-After"] == "40"
    work.pending = 1e12
    assert refused(room).headers["Retry-After"] == "120", "the client of OpenAI retries up to there"
    work.pending = 6.001e8
    assert refused(room).headers["Retry-After"] == "1"
    work.pending = 5e8
    room.reserve(1, "")
