"""Where requests go, and how many replicas there are: the parts that need no Ray."""

import random
import threading

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cluster.autoscale import replicas_needed
from patchedserve.serving.cluster.deployment import last_line_of
from patchedserve.serving.cluster.load_book import LoadBook
from patchedserve.serving.core.request_state import RequestView


def begin(book: LoadBook, number: int, pixels: int, num_steps: int) -> None:
    book.begin(RequestView(number, Resolution(pixels, 1), 0.0, None, num_steps))


def test_a_request_goes_where_the_least_is_pending() -> None:
    book = LoadBook()
    for number, pixels, num_steps in ((1, 100, 10), (2, 10, 10), (3, 10, 10), (4, 1, 1)):
        begin(book, number, pixels, num_steps)
    assert book.pending() == 1201, "it is to be done before anybody has chosen"
    assert [book.reserve(number, ["a", "b"])[0] for number in (1, 2, 3)] == ["a", "b", "b"]
    assert (book.pending("a"), book.pending("b")) == (1000, 200)
    # Its steps shrink it, and never grow it again.
    book.stepped(1, 1)
    book.stepped(1, 5)
    assert book.pending("a") == 100
    assert book.reserve(4, ["a", "b"])[0] == "a"
    # It went elsewhere after all.
    book.confirm(4, "b")
    assert (book.pending("a"), book.pending("b")) == (100, 201)
    for _ in range(2):
        book.release(4)
    assert book.pending("b") == 200
    # Chosen for when it was released already.
    assert book.reserve(4, ["a", "b"]) == ["a", "b"]
    book.confirm(4, "a")
    assert (book.pending("a"), book.pending()) == (100, 300)


def test_what_a_dead_replica_had_goes_elsewhere() -> None:
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
    # There is none at all: it counts as pending all the same.
    begin(book, 9, 10, 1)
    assert book.reserve(9, []) == []
    assert book.pending() == 50


def test_the_books_balance_whatever_threads_do() -> None:
    book, names = LoadBook(), ["a", "b", "c"]

    def work(seed: int) -> None:
        draws = random.Random(seed)
        for each in range(300):
            number = seed * 1000 + each
            begin(book, number, draws.randrange(1, 50), 10)
            book.reserve(number, names)
            book.confirm(number, draws.choice(names))
            for left in range(9, draws.randrange(10), -1):
                book.stepped(number, left)
            book.release(number)
            book.release(number)
            # Ray was about to choose for it, in a thread of its own.
            book.reserve(number, names)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert book.pending() == 0
    assert [book.pending(name) for name in names] == [0, 0, 0]


def test_how_many_replicas() -> None:
    bounds = {"least": 1, "most": 8}
    assert replicas_needed(0, 100, 10, **bounds) == 1
    assert replicas_needed(1000, 100, 10, **bounds) == 1
    assert replicas_needed(1001, 100, 10, **bounds) == 2
    assert replicas_needed(1e9, 100, 10, **bounds) == 8
    assert replicas_needed(1e9, None, 10, now=3, **bounds) == 3
    for wrong in ({"least": 0}, {"least": 3, "most": 2}):
        with pytest.raises(UsageError, match="replicas go from"):
            replicas_needed(1, 1, 1, **wrong)
    with pytest.raises(UsageError, match="must be more than 0"):
        replicas_needed(1, 1, 0)


def test_what_ray_says_is_one_line_whatever_it_says() -> None:
    assert last_line_of(RuntimeError("trace\n  of another process\nno room\n")) == "no room"
    assert last_line_of(RuntimeError("")) == "RuntimeError"
