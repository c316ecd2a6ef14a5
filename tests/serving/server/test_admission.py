"""Room for requests, and images that can be fetched for a while."""

import pytest

from patchedserve.serving.server.admission import Admission
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.image_store import ImageStore
from patchedserve.serving.server.limits import Limits


class Work:
    pending = 0.0
    rate: float | None = None


def admission(work: Work, **limits: float) -> Admission:
    return Admission(Limits(**limits), lambda: work.rate, lambda: work.pending)  # type: ignore[arg-type]


def refused(room: Admission, count: int = 1, key: str = "") -> ApiError:
    with pytest.raises(ApiError) as caught:
        room.reserve(count, 1, key)
    assert caught.value.status == 429
    return caught.value


def test_n_images_take_n_places_and_give_them_back_once() -> None:
    room = admission(Work(), max_queue=5)
    first, second = room.reserve(3, 10, "a"), room.reserve(2, 10, "b")
    assert refused(room).code == "queue_full"
    room.release(first)
    room.release(first)
    assert room.num_images == 2
    assert refused(room, 4).code == "queue_full"
    room.release(room.reserve(3, 10, "a"))
    room.release(second)
    assert room.num_images == 0
    assert not room._of_key, "keys of nobody are not kept"


def test_a_key_has_a_share_of_its_own() -> None:
    room = admission(Work(), max_per_key=2)
    room.reserve(2, 1, "a")
    assert refused(room, key="a").code == "too_many_in_flight"
    room.reserve(2, 1, "b")


def test_what_takes_too_long_waits_outside() -> None:
    work = Work()
    room = admission(work, max_queue_time_s=60.0)
    work.pending = 1e9
    room.reserve(1, 1, "")  # nothing is known of the rate yet
    work.rate = 1e7
    error = refused(room)
    assert error.code == "queue_too_long"
    assert error.headers["Retry-After"] == "40"
    work.pending = 1e12
    assert refused(room).headers["Retry-After"] == "120", "the client of OpenAI retries up to there"
    work.pending = 6.001e8
    assert refused(room).headers["Retry-After"] == "1"
    work.pending = 5e8
    room.reserve(1, 1, "")


def test_the_oldest_images_go_first() -> None:
    now = 0.0
    store = ImageStore(max_bytes=10, max_age_s=100, clock=lambda: now)
    store.put("a", b"12345", "image/png")
    now = 50.0
    store.put("b", b"123", "image/png")
    assert (len(store), store.num_bytes) == (2, 8)
    store.put("c", b"1234", "image/webp")
    assert store.get("a") is None
    found = store.get("c")
    assert found is not None
    assert (found.content, found.media_type) == (b"1234", "image/webp")
    now = 151.0
    assert store.get("b") is None
    assert (len(store), store.num_bytes) == (0, 0)
    store.put("large", b"12345678901", "image/png")
    assert store.get("large") is None
    store.put("a", b"1", "image/png")
    store.put("a", b"22", "image/png")
    assert store.num_bytes == 2
    store.drop("a")
    store.drop("a")
    assert store.num_bytes == 0
