"""Entries of several owners within one bound."""

import random

from patchedserve.data.fair_store import FairStore


def test_owners_below_an_equal_share_lose_nothing() -> None:
    rng, most = random.Random(3), 100
    store, names, sizes = FairStore[int](most), {owner: list[str]() for owner in "abcd"}, dict[str, int]()
    for number in range(3000):
        owner = "cd"[number % 2] if number % 150 < 2 else rng.choice("aaaaab")
        name = f"{owner}{number}"
        sizes[name] = 1 if owner in "cd" else rng.randint(1, 9)
        store.put(owner, name, number, sizes[name])
        names[owner].append(name)
        kept = {each: [name for name in of_owner if name in store] for each, of_owner in names.items()}
        assert sum(sizes[name] for of_owner in kept.values() for name in of_owner) == store.size <= most
        assert len(store) == sum(map(len, kept.values()))
        for each, of_owner in kept.items():
            assert of_owner == names[each][len(names[each]) - len(of_owner) :], "its oldest go first"
        names = {each: of_owner[-200:] for each, of_owner in names.items()}
    assert kept["c"] == names["c"]
    assert kept["d"] == names["d"]
    assert len(kept["c"]) == len(kept["d"]) == 20
    assert min(sum(sizes[name] for name in kept[each]) for each in "ab") > (most - 40) / 2 - 10


def test_eviction_is_lru_and_oversized_entries_are_not_stored() -> None:
    store = FairStore[str](10)
    for name in "xyz":
        store.put("a", name, name, 3)
    store.touch("x")
    store.put("a", "w", "w", 3)
    assert [store.get(name) for name in "xyzw"] == ["x", None, "z", "w"]
    store.put("b", "large", "", 11)
    store.put("a", "x", "again", 11)
    assert (store.get("large"), store.get("x"), len(store), store.size) == (None, None, 2, 6)
    assert store.pop("gone") is None
    store.evict_while(lambda value: value == "z")
    assert [name in store for name in "zw"] == [False, True]
