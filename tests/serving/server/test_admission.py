"""Room for requests."""

import pytest

from patchedserve.serving.server.admission import Admission
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.limits import Limits


class Work:
    pending = 0.0
    rate: float | None = None


def admission(work: Work, **limits: float) -> Admission:
    return Admission(Limits(**limits), lambda: work.rate, lambda: work.pending)  # type: ignore[arg-type]


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
