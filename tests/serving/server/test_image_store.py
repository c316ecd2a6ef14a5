"""Store of images by address: the newest, up to a number of bytes and an age."""

from patchedserve.serving.server.image_store import ImageStore


def test_oldest_images_are_evicted_first() -> None:
    now_s = 0.0
    store = ImageStore(max_bytes=10, max_age_s=60, clock=lambda: now_s)
    for name in "abc":
        store.put(name, b"1234", "image/png")
        now_s += 1
    assert store.get("a") is None
    assert (store.get("b") is None, len(store), store.num_bytes) == (False, 2, 8)
    store.put("c", b"12", "image/webp")
    found = store.get("c")
    assert found is not None
    assert (found.content, found.media_type, store.num_bytes) == (b"12", "image/webp", 6)
    now_s = 61.5
    assert store.get("b") is None
    now_s = 64
    assert (store.get("c"), len(store), store.num_bytes) == (None, 0, 0)
    store.put("large", b"12345678901", "image/png")
    assert store.get("large") is None
    store.drop("large")


def test_images_of_one_key_do_not_evict_those_of_another() -> None:
    now_s = 0.0
    store = ImageStore(max_bytes=100, max_age_s=60, clock=lambda: now_s)
    store.put("b", bytes(30), "image/png", "blue")
    for number in range(50):
        now_s += 1
        store.put(f"r{number}", bytes(10), "image/png", "red")
    assert store.get("b") is not None
    assert [store.get(f"r{number}") is None for number in (0, 42, 43, 49)] == [True, True, False, False]
    now_s = 61
    assert store.get("b") is None
    assert store.get("r49") is not None
