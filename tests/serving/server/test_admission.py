"""Room for requests."""

import contextlib
from typing import Any

import pytest

from patchedserve.serving.server.admission import Admission
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.limits import Limits


class Work:
    pending = 0.0
    rate: float | None = None
    of_key: dict[str, float] = {}  # noqa: RUF012  a test gives it one of its own


def admission(work: Work, **limits: Any) -> Admission:
    return Admission(
        Limits(**limits), lambda: work.rate, lambda key: work.pending if key is None else work.of_key.get(key, 0.0)
    )


def refused(room: Admission, count: int = 1, key: str = "") -> ApiError:
    with pytest.raises(ApiError) as caught:
        room.reserve(count, key)
    assert caught.value.status == 429
    return caught.value


def test_n_images_take_n_places_and_give_them_back_once() -> None:
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


def test_a_key_has_a_share_of_its_own() -> None:
    room = admission(Work(), max_per_key=2)
    room.reserve(2, "a")
    assert refused(room, key="a").code == "too_many_in_flight"
    room.reserve(2, "b")


def taken(room: Admission, key: str) -> int:
    """How many images of a key are let in, one by one."""
    num_before = room.num_images
    with contextlib.suppress(ApiError):
        while True:
            room.reserve(1, key)
    return room.num_images - num_before


@pytest.mark.parametrize("num_owners", [2, 3, 7, 32, 64, 200])
@pytest.mark.parametrize("max_queue", [1, 2, 8, 64])
def test_every_key_finds_room_whatever_the_others_send(max_queue: int, num_owners: int) -> None:
    owners = [f"key-{number}" for number in range(num_owners)]
    room, share = admission(Work(), max_queue=max_queue, owners=owners), max(1, max_queue // (2 * num_owners))
    first = taken(room, owners[0])
    assert max_queue / 2 <= first <= max_queue, "a key alone has at least half"
    num_waiting = min(num_owners - 1, max_queue // 2)
    for owner in owners[1:num_waiting]:
        assert taken(room, owner) >= share
    if num_waiting:
        assert taken(room, owners[num_waiting]) >= share
    assert room.num_images <= max_queue


def test_the_whole_queue_is_for_one_key_or_for_whom_it_is_given() -> None:
    for limits in ({}, {"owners": ("a",)}, {"owners": ("a", "b"), "max_per_key": 64}):
        assert taken(admission(Work(), **limits), "a") == 64
    room = admission(Work(), owners=("a", "b"))
    assert taken(room, "a") == 48
    assert "48 images of this key are open, and it may have 48" in refused(room, key="a").message
    room.reserve(10, "b")
    assert taken(room, "a") == 0
    assert taken(room, "b") == 6


def test_a_long_queue_of_one_key_does_not_keep_others_out() -> None:
    work = Work()
    room = admission(work, owners=("a", "b"))
    work.rate, work.pending, work.of_key = 1e7, 1e9, {"a": 1e9}
    assert refused(room, key="a").code == "queue_too_long"
    room.reserve(1, "b")
    work.of_key = {"a": 1e9 - 1.6e8, "b": 1.6e8}
    assert refused(room, key="b").code == "queue_too_long", "16 s of its own wait, of 60 s for both"


def test_what_takes_too_long_waits_outside() -> None:
    work = Work()
    room = admission(work, max_queue_time_s=60.0)
    work.pending = 1e9
    room.reserve(1, "")  # nothing is known of the rate yet
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
