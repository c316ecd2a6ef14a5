"""An event loop on a virtual clock, which advances when nothing is left to do, with a check after each turn."""

import asyncio
import random
import selectors
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

_MOST_TURNS = 200_000


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances to the next timer as soon as nothing is ready.

    Work for other threads runs at once in this one; its future completes some time later.

    Attributes:
        after_turn: called after each turn of the loop.
    """

    def __init__(self, rng: random.Random, now_s: float) -> None:
        super().__init__(_NoWaiting(self))
        self.now_s, self.num_turns = now_s, 0
        self.after_turn: Callable[[], None] = lambda: None
        self._rng = rng

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        if isinstance(executor, ThreadPoolExecutor) and executor._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        done = self.create_future()
        try:
            tell = partial(done.set_result, func(*args))
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            tell = partial(done.set_exception, error)
        self.call_later(self._rng.choice((0.0, 0.001, 0.1)), lambda: None if done.done() else tell())
        return done

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.num_turns += 1
        assert self.num_turns < _MOST_TURNS, "it never comes to an end"
        self.after_turn()


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, loop: FastLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will ever come"
            self._loop.now_s += max(0.0, timeout)
        return ready
