"""Assignment of requests to workers by their pending work."""

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from patchedserve.data.adapters import read_adapters
from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.block_facts import ProfiledModel
from patchedserve.data.work import Work
from patchedserve.serving.core.record_key import RecordKey
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.editing.costs import EditCosts, HeldRecords, MaskShares
from patchedserve.serving.families.geometry import Geometry
from patchedserve.serving.fleet.book import LoadBook
from patchedserve.serving.scheduling.routers import ROUTERS, make_router
from patchedserve.serving.scheduling.step_latency import TableLatency
from patchedserve.training.cache.schedule import CacheSchedule, StepPlan

from ...support.edits import image_of

SIZE, TEMPLATE = Resolution(32, 32), TemplateSpec()
RECORDS = [RecordKey(name, SIZE, 4) for name in ("one", "two", "three")]
COSTS = EditCosts(lambda request: 0.3, lambda record: 1e6, lambda size: 4.0, memory_mb=2.0)
"""Two of these records fit into a replica."""


class Steps:
    """Step latencies of 1 s plus 1 s for each image, in proportion less for a part."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        return 1.0 + sum(each.active_share if isinstance(each, Work) else 1.0 for each in active)


@dataclass
class Worker:
    """A replica as a plain list of requests, in order of arrival."""

    max_batch_size: int
    views: dict[int, RequestView] = field(default_factory=dict)
    held: HeldRecords = field(default_factory=lambda: HeldRecords(COSTS))

    @property
    def num_requests(self) -> int:
        return len(self.views)

    @property
    def pixel_steps(self) -> int:
        return sum(SIZE.pixels * (each.num_steps - each.steps_done) for each in self.views.values())

    def requests(self) -> Sequence[RequestView]:
        ordered = [self.views[number] for number in sorted(self.views)]
        return [each for each in ordered if each.steps_done] + [each for each in ordered if not each.steps_done]

    def load_s(self, view: RequestView) -> float:
        return 0.0 if view.record is None else self.held.missing_s(view.record)

    def take(self, view: RequestView) -> None:
        self.views[view.request_id] = view
        if view.record is not None:
            self.held.read(view.record)


def begin(book: LoadBook, number: int, pixels: int, num_steps: int) -> None:
    book.begin(RequestView(number, Resolution(pixels, 1), 0.0, None, num_steps))


def test_request_is_routed_to_the_least_pending_work() -> None:
    book = LoadBook()
    for number, pixels, num_steps in ((1, 100, 10), (2, 10, 10), (3, 10, 10), (4, 1, 1)):
        begin(book, number, pixels, num_steps)
    assert book.pending() == 1201, "it is to be done before anybody has chosen"
    assert [book.reserve(number, ["a", "b"])[0] for number in (1, 2, 3)] == ["a", "b", "b"]
    assert (book.pending("a"), book.pending("b")) == (1000, 200)
    # Steps reduce the pending work; a late report never increases it.
    book.stepped(1, 9, 10)
    book.stepped(1, 5, 10)
    assert book.pending("a") == 100
    assert book.reserve(4, ["a", "b"])[0] == "a"
    # Another replica than the chosen one received the request.
    book.confirm(4, "b")
    assert (book.pending("a"), book.pending("b")) == (100, 201)
    for _ in range(2):
        book.release(4)
    assert book.pending("b") == 200
    # A choice for a request that was already released has no effect.
    assert book.reserve(4, ["a", "b"]) == ["a", "b"]
    book.confirm(4, "a")
    assert (book.pending("a"), book.pending()) == (100, 300)


def test_request_counts_only_computed_steps() -> None:
    schedule = CacheSchedule(ProfiledModel("tiny", "", ""), {30: StepPlan(30, (0, 5, 9, 13, 17, 22))})
    book, pixels = LoadBook(computed_of=schedule.num_computed), SIZE.pixels
    request = Request(1, "", SIZE, 30)
    book.begin(book.view_of(request))
    assert book.pending() == 6 * pixels
    book.stepped(1, 15, 30)
    assert book.pending() == 3 * pixels
    book.begin(book.view_of(replace(request, request_id=2, cache=False)))
    assert book.pending() == 33 * pixels


def test_requests_of_a_dead_replica_are_rerouted() -> None:
    book = LoadBook()
    for number in range(4):
        begin(book, number, 10, 1)
        book.reserve(number, ["a", "b"])
    assert (book.pending("a"), book.pending("b")) == (20, 20)
    for number in (0, 2):
        book.release(number)
        begin(book, number, 10, 1)
        assert book.reserve(number, ["b"]) == ["b"]
    assert (book.pending("a"), book.pending("b")) == (0, 40)
    # Without any replica, the request still counts as pending.
    begin(book, 9, 10, 1)
    assert book.reserve(9, []) == []
    assert book.pending() == 50


def test_load_book_balances_under_concurrency() -> None:
    book, names = LoadBook(), ["a", "b", "c"]

    def work(seed: int) -> None:
        draws = random.Random(seed)
        for each in range(300):
            number = seed * 1000 + each
            begin(book, number, draws.randrange(1, 50), 10)
            book.reserve(number, names)
            book.confirm(number, draws.choice(names))
            for done in range(1, draws.randrange(1, 10)):
                book.stepped(number, done, 10)
            book.release(number)
            book.release(number)
            # Ray may still choose a replica for it in another thread.
            book.reserve(number, names)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert book.pending() == 0
    assert [book.pending(name) for name in names] == [0, 0, 0]


@pytest.mark.parametrize("name", ROUTERS)
def test_load_book_chooses_like_its_router(name: str) -> None:
    """The reference is the same router over plain lists of every replica's requests."""
    draws, names = random.Random(name), ["a", "b", "c"]
    book, router = LoadBook(name, Steps(), edits=COSTS, max_batch_size=3), make_router(name, Steps())
    workers, place_of = [Worker(3) for _ in names], dict[int, int]()
    for number in range(400):
        record = draws.choice([None, *RECORDS])
        view = RequestView(
            number, SIZE, float(number), None, draws.randint(1, 9), 0, None, 0.3 if record else 1.0, record
        )
        place = router.choose(view, workers)
        book.begin(view)
        assert book.reserve(number, draws.sample(names, 3))[0] == names[place]
        book.confirm(number, names[place])
        workers[place].take(view)
        place_of[number] = place
        for other in draws.sample(sorted(place_of), min(3, len(place_of))):
            worker = workers[place_of[other]]
            if draws.random() < 0.1:
                worker.views.pop(other, None)
                book.release(other)
            elif other in worker.views:
                old = worker.views[other]
                new = old._replace(steps_done=old.steps_done + 1)
                book.stepped(other, new.steps_done, new.num_steps)
                del worker.views[other]
                if new.steps_done < new.num_steps:
                    worker.views[other] = new
        assert [book.pending(each) for each in names] == [worker.pixel_steps for worker in workers]


def test_edit_is_routed_to_its_record() -> None:
    book, names, numbers = LoadBook("mask-aware", Steps(), edits=COSTS), ["a", "b", "c"], itertools.count()

    def sent(record: RecordKey | None, *, replicas: Sequence[str] = names, steps: int = 2) -> tuple[int, str]:
        number = next(numbers)
        book.begin(RequestView(number, SIZE, float(number), None, steps, 0, None, 0.3 if record else 1.0, record))
        replica = book.reserve(number, replicas)[0]
        book.confirm(number, replica)
        return number, replica

    def done(record: RecordKey | None, **options: Any) -> str:
        number, replica = sent(record, **options)
        book.release(number)
        return replica

    (busy, first), other = sent(None, steps=9), done(RECORDS[0])
    assert (first, other) == ("a", "b")
    book.release(busy)
    # All replicas are idle, and the one with the record is not the first.
    assert [done(RECORDS[0]) for _ in range(3)] == ["b"] * 3
    assert [done(RECORDS[1]) for _ in range(3)] == ["a"] * 3
    # The record is worth a short wait, not a long one, as it can be read in 4 s.
    queue = [sent(RECORDS[0], steps=2) for _ in range(2)]
    assert queue[0][1] == "b"
    long = [sent(RECORDS[0], steps=40) for _ in range(8)]
    assert len({replica for _, replica in long}) > 1
    for number, _ in (*queue, *long):
        book.release(number)
    # The replica with the record has died; its successor has another name and has read nothing.
    assert done(RECORDS[1], replicas=["b", "c", "d"]) in ("b", "c", "d")
    assert book.pending("a") == 0
    # Another replica than the chosen one receives the request and reads the record.
    number = next(numbers)
    book.begin(RequestView(number, SIZE, 0.0, None, 2, 0, None, 0.3, RECORDS[2]))
    assert book.reserve(number, names)[0] == "a"
    book.confirm(number, "c")
    book.release(number)
    assert done(RECORDS[2]) == "c"


def test_load_book_views_of_requests() -> None:
    picture, mask = image_of(Resolution(64, 32)), np.indices((32, 64))[1] < 16
    geometry = Geometry.of_unet(8, 3)
    book = LoadBook("mask-aware", Steps(), share_of=MaskShares(geometry, 0.6), edits=COSTS)

    def edit(
        template: TemplateSpec | None = TEMPLATE, prompt: str = "", steps: int = 4, lora: str = "", **parts: Any
    ) -> RequestView:
        spec = EditSpec(**{"image": picture, "mask": mask, "template": template, **parts})
        return book.view_of(Request(1, prompt, spec.resolution, steps, edit=spec, adapters=read_adapters(lora)))

    record = edit().record
    assert record is not None
    assert (edit().work, edit(strength=0.5).num_steps) == (Work(64, 32, 0.5), 2)
    assert edit(prompt="a cat", mask=mask[:, ::-1]).record == record, "it is the template's"
    others = [edit(steps=5), edit(TemplateSpec(seed=1)), edit(TemplateSpec("a")), edit(image=picture[::-1])]
    others.append(edit(TemplateSpec(kind="trajectory")))
    assert len({record, *(each.record for each in others)}) == 6
    # Computed whole: exact edits, edits with an adapter or too large a mask, and sizes that are not whole cells.
    for whole in (
        edit(None),
        edit(lora="ink"),
        edit(mask=np.ones_like(mask)),
        edit(image=picture[:24], mask=mask[:24]),
    ):
        assert (whole.active_share, whole.record) == (1.0, None)
    assert LoadBook().view_of(Request(1, "", SIZE)).work == SIZE
    with pytest.raises(UsageError, match=r"strength is 0\.1"):
        edit(strength=0.1)
    with pytest.raises(UsageError, match="64x64"):
        LoadBook("mask-aware", TableLatency({(SIZE,): 1.0})).view_of(Request(1, "", Resolution(64, 64)))
    with pytest.raises(UsageError, match="router mask-aware asks how long steps take"):
        LoadBook("mask-aware")
