"""Prefetching of results by threads, in order and a bounded distance ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD_PER_WORKER = 4
"""Results per thread that may wait for the consumer: memory is bounded, and a slow item does not stall the rest."""


def prefetch(items: Iterable[T], function: Callable[[T], R], workers: int) -> Iterator[R]:
    """Yield `function(item)` in the order of the items, computed by threads.

    Pillow releases the interpreter's lock while it decodes and scales, so threads suffice. If the consumer stops early,
    items that have not begun are dropped. An error is raised at the item that caused it.
    """
    waiting: deque[Future[R]] = deque()
    source = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="psctl-images")
    try:
        waiting.extend(pool.submit(function, item) for item in islice(source, workers * AHEAD_PER_WORKER))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(source, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
