"""Routers: choices worked out by hand, and invariants on random states."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.data.work import Work
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.routers import ROUTERS, RandomWorker, make_router

S, L = Resolution(100, 100), Resolution(200, 200)


class Steps:
    """Step latencies of 1 s plus 1 s for each whole image of 100x100 pixels."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        return 1 + sum(each[0] * each[1] * (each[2] if isinstance(each, Work) else 1) for each in active) / 1e4


@dataclass
class Worker:
    """A worker as a router sees it; requests in `missing` must first read a record, which takes this many seconds."""

    views: list[RequestView] = field(default_factory=list)
    max_batch_size: int = 2
    missing: dict[int, float] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.views)

    @property
    def pixel_steps(self) -> float:
        return sum(view.resolution.pixels * (view.num_steps - view.steps_done) for view in self.views)

    def requests(self) -> Sequence[RequestView]:
        return self.views

    def load_s(self, view: RequestView) -> float:
        return self.missing.get(view.request_id, 0.0)


def view(request_id: int, steps: int = 4, size: Resolution = S, share: float = 1.0, done: int = 0) -> RequestView:
    return RequestView(request_id, size, float(request_id), None, steps, done, None, share)


def choice(name: str, workers: Sequence[Worker], request: RequestView | None = None) -> int:
    return make_router(name, Steps()).choose(request or view(99), workers)


def test_round_robin_takes_turns() -> None:
    router, workers = make_router("round-robin", Steps()), [Worker(), Worker(), Worker()]
    assert [router.choose(view(99), workers) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert router.choose(view(99), workers[:2]) == 0


def test_each_router_uses_the_load_in_its_name() -> None:
    one_large = Worker([view(0, steps=2, size=L)])
    two_parts = Worker([view(1, steps=6, size=L, share=0.2), view(2, steps=6, size=L, share=0.25)])
    three_short = Worker([view(number, steps=3, size=S, done=2) for number in (3, 4, 5)])
    workers = [one_large, two_parts, three_short]
    assert choice("least-requests", workers) == 0
    # 40,000 pixels; 0.45 of 40,000; 30,000.
    assert choice("least-tokens", workers) == 1
    # 80,000 pixel steps; 480,000; 30,000.
    assert choice("fewest-pixels", workers) == 2


def test_random_workers_are_equally_likely_and_repeatable() -> None:
    workers = [Worker([view(0)]), Worker(), Worker()]
    first, again = ([router.choose(view(99), workers) for _ in range(300)] for router in map(RandomWorker, (7, 7)))
    assert first == again
    assert min(first.count(index) for index in range(3)) > 60


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_first_worker(name: str) -> None:
    assert choice(name, [Worker([view(0)]), Worker(), Worker()]) in ((0,) if name == "round-robin" else (1,))


def test_mask_aware_compares_end_times_and_the_paper_step_times() -> None:
    long_part, short_whole = Worker([view(0, steps=100, share=0.5)]), Worker([view(1, steps=2)])
    # The next step is shorter beside the part: 2.5 s against 3 s.
    assert choice("mask-aware-step", [short_whole, long_part]) == 1
    # Beside the whole image the request takes 2 x 3 + 2 x 2 s and delays that image by 2 x 1 s: 12 s. Beside the part
    # it takes 4 x 2.5 s and delays the part by 4 x 1 s: 14 s.
    assert choice("mask-aware", [long_part, short_whole]) == 1
    # With a single step, 3 + 1 s against 2.5 + 1 s.
    assert choice("mask-aware", [short_whole, long_part], view(99, steps=1)) == 1


def test_mask_aware_counts_waiting_requests() -> None:
    full = Worker([view(0, steps=2), view(1, steps=2), view(2, steps=1)])
    # On the full worker the request joins after 2 x 3 s, takes a step of 3 s with the third and 3 x 2 s alone, and
    # delays the third by 1 s: 16 s. Beside one of 9 steps, if there is room, it takes 4 x 3 s and delays that one by
    # 4 s: also 16 s. In a batch of one it waits for 9 x 2 s and takes 4 x 2 s: 26 s.
    assert choice("mask-aware", [Worker([view(3, steps=9)]), full]) == 0
    assert choice("mask-aware", [full, Worker([view(3, steps=9)])]) == 0
    assert choice("mask-aware", [Worker([view(3, steps=9)], max_batch_size=1), full]) == 1


def test_mask_aware_counts_records_that_are_read_first() -> None:
    request = view(99, share=0.5)
    # Alone, 4 x 1.5 s after the record is read; beside another, 4 x 2.5 s at once and a delay of 4 x 0.5 s.
    beside = Worker([view(0)])
    assert choice("mask-aware", [Worker(missing={99: 6.1}), beside], request) == 1
    assert choice("mask-aware", [Worker(missing={99: 5.9}), beside], request) == 0
    # A request that waits for its record is overtaken: 4 x 1.5 s end before that record is read.
    assert choice("mask-aware", [Worker(), Worker([view(1, share=0.5)], 1, {1: 6.0})], request) == 0
    assert choice("mask-aware", [beside, Worker([view(1, share=0.5)], 1, {1: 6.0})], request) == 1


def test_cost_of_the_paper_prefers_workers_with_free_places() -> None:
    full, free = Worker([view(0, share=0.1), view(1, share=0.1)]), Worker([view(2, size=L)])
    assert choice("mask-aware-step", [full, free]) == 1
    assert choice("mask-aware-step", [full, Worker([view(2, size=L), view(3)])]) == 0


def test_mask_aware_equals_steps_taken_one_by_one() -> None:
    """The router skips from one request's end to the next; a plain loop over single steps gives the same ends."""
    rng = random.Random(0)
    for _ in range(2_000):
        count = rng.randint(0, 6)
        views = [
            view(number, rng.randint(1, 6), rng.choice((S, L)), rng.choice((0.2, 0.5, 1.0))) for number in range(count)
        ]
        missing = {number: rng.uniform(0, 9) for number in (*range(count), 99) if rng.random() < 0.3}
        worker = Worker(views, rng.randint(1, 4), missing)
        workers = [worker, Worker([view(50, rng.randint(1, 30))], 1)]
        request = view(99, rng.randint(1, 6), share=rng.choice((0.3, 1.0)))
        costs = [_ends_s(each, [*each.views, request]) - _ends_s(each, each.views) for each in workers]
        if abs(costs[0] - costs[1]) > 1e-9:
            assert choice("mask-aware", workers, request) == costs.index(min(costs))


def _ends_s(worker: Worker, views: Sequence[RequestView]) -> float:
    """Return the sum of the times at which the requests end."""
    waiting, running, now_s, sum_s = list(views), {}, 0.0, 0.0
    while waiting or running:
        for each in list(waiting):
            if len(running) < worker.max_batch_size and worker.load_s(each) <= now_s:
                running[each] = each.num_steps
                waiting.remove(each)
        if not running:
            now_s = min(map(worker.load_s, waiting))
            continue
        now_s += Steps().step_latency_s([each.work for each in running])
        sum_s += now_s * sum(left == 1 for left in running.values())
        running = {each: left - 1 for each, left in running.items() if left > 1}
    return sum_s


def test_unknown_router_is_refused() -> None:
    with pytest.raises(
        UsageError, match="router is 'best', but it must be one of round-robin, least-requests, least-to"
    ):
        make_router("best", Steps())
