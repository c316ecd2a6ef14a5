"""Fair assignment of places to lines of batches."""

import asyncio
import random
from collections.abc import Mapping

from patchedserve.serving.server.batches.places import FairPlaces


async def drawn(
    places: FairPlaces, owner: str, works: list[float], order: list[tuple[str, float]], weight: float
) -> None:
    """Acquire places for lines one by one, as a batch does; each line takes ten loop iterations per unit of work."""
    async with asyncio.TaskGroup() as tasks:

        async def draw(work: float) -> None:
            for _ in range(int(10 * work)):
                await asyncio.sleep(0)
            places.release()

        for work in works:
            await places.acquire(owner, work, weight)
            order.append((owner, work))
            tasks.create_task(draw(work))


def order_of(
    num_places: int, works: dict[str, list[float]], weights: Mapping[str, float] | None = None
) -> list[tuple[str, float]]:
    async def use() -> list[tuple[str, float]]:
        places, order = FairPlaces(num_places), list[tuple[str, float]]()
        of = weights or {}
        await asyncio.gather(
            *(drawn(places, owner, of_owner, order, of.get(owner, 1.0)) for owner, of_owner in works.items())
        )
        return order

    return asyncio.run(use())


def test_few_lines_do_not_wait_behind_many() -> None:
    order = order_of(2, {"many": [1.0] * 1000, "few": [1.0] * 5})
    assert max(place for place, (owner, _) in enumerate(order) if owner == "few") < 15
    assert len(order) == 1005


def test_owners_get_equal_work_regardless_of_line_costs() -> None:
    rng = random.Random(5)
    for num_places in (1, 2, 7):
        mixed = [rng.choice([1.0, 5.0, 25.0]) for _ in range(160)]
        works = {"large": [40.0] * 40, "small": [1.0] * 1600, "mixed": mixed}
        had, all_of = dict.fromkeys(works, 0.0), {owner: sum(of_owner) for owner, of_owner in works.items()}
        for owner, work in order_of(num_places, works):
            had[owner] += work
            if any(had[each] >= all_of[each] for each in works):
                break
            assert max(had.values()) - min(had.values()) <= 40.0 * (num_places + 1)
        assert min(had.values()) > 1000


def test_work_of_owners_follows_their_weights() -> None:
    works = {"a": [1.0] * 600, "b": [1.0] * 600}
    first = [owner for owner, _ in order_of(2, works, {"a": 3.0})][:400]
    assert abs(first.count("a") - 300) <= 4


def test_cancelled_line_takes_no_place() -> None:
    async def use() -> None:
        places = FairPlaces(1)
        await places.acquire("a", 1.0)
        waiting = [asyncio.ensure_future(places.acquire("b", 1.0)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        places.release()
        # The second is cancelled in the same iteration in which it is assigned its place.
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [each.cancelled() for each in waiting] == [True, True, False]
        places.release()
        await asyncio.wait_for(places.acquire("c", 1.0), 5)

    asyncio.run(use())


def test_idle_owner_accumulates_no_credit() -> None:
    async def use() -> list[str]:
        places, order = FairPlaces(1), list[str]()
        for _ in range(100):
            await places.acquire("a", 1.0)
            places.release()
        await places.acquire("a", 1.0)

        async def ask(owner: str) -> None:
            await places.acquire(owner, 1.0)
            order.append(owner)
            places.release()

        asked = [asyncio.ensure_future(ask(owner)) for owner in "bbbaaa"]
        await asyncio.sleep(0)
        places.release()
        await asyncio.gather(*asked)
        return order

    assert "".join(asyncio.run(use())) == "bbabaa"
