"""Threads that compute with torch beside the denoise loop, each on one processor."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def compute_alone() -> None:
    """Let the operators of the calling thread run without OpenMP workers.

    If all threads together have more workers than there are processors, workers sleep between parallel regions instead
    of spinning (libgomp): a step of the denoise loop then took 52 ms instead of 18 ms on 2 cores.
    """
    # A thread's first query sets its number to the process's; our setting must come after that, or it is lost.
    torch.get_num_threads()
    torch.set_num_threads(1)


class LoneThread(threading.Thread):
    """A daemon thread that computes without OpenMP workers. Arguments are those of `threading.Thread`."""

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._is_ready = threading.Event()

    def start(self) -> None:
        """Start the thread, leaving the caller's own number of CPU threads as it was."""
        num_threads = torch.get_num_threads()
        super().start()
        self._is_ready.wait()
        # `set_num_threads` is per thread with OpenMP, but threads started later inherit the last value that any
        # thread has set. Set ours again so that no other thread inherits the lone thread's.
        torch.set_num_threads(num_threads)

    def run(self) -> None:
        """Run the target without OpenMP workers."""
        compute_alone()
        self._is_ready.set()
        super().run()
