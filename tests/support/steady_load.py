"""A steady load on an engine: requests of mixed sizes, with a constant number of them open, of any duration."""

import gc
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.engine.collectors import Collector
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.build import build_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.step_latency import MemoisedLatency, TableLatency
from patchedserve.training.latency.online_correction import OnlineCorrection

from .tiny_models import smallest_sd

SIZES = tuple(Resolution(*size) for size in ((16, 16), (32, 16), (16, 32), (32, 32), (48, 16), (16, 48)))
NUM_IDS = 500
"""Number of requests after which ids are reused."""
NUM_PROMPTS = 100
"""Number of different texts, so that the prompt cache soon stops growing."""
NUM_OPEN = 48


class SteadyLoad:
    """An engine that runs in a thread of its own until the `with` block ends, and the feeder of its requests.

    Most requests are completed; one in 50 is late from the start and dropped, one in 100 cannot be saved and fails.

    Args:
        collector: collector of the engine.
        with_cache: whether a patch cache is on. Requests then have up to four steps, so that two may be reused.
        sizes: sizes of the requests, chosen at random.
        max_batch_size: largest batch of the engine.
        on_finish: called with each record before it is discarded.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        with_cache: bool,
        sizes: Sequence[Resolution] = SIZES,
        max_batch_size: int = 16,
        on_finish: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        cache = CacheOptions("patch", threshold=0.5, patch_size=2, warmup_steps=1) if with_cache else CacheOptions()
        self.model = build_model(smallest_sd(), name="tiny", options=EngineOptions(cache=cache))
        self._sizes = sizes
        self._most_steps = 4 if with_cache else 2
        self._random = random.Random(0)
        self._count = 0
        self._places = threading.Semaphore(NUM_OPEN)
        self._on_finish = on_finish
        table = TableLatency({(size,) * count: 0.01 * count for size in SIZES for count in (1, 16)})
        self.engine = Engine(
            self.model,
            get_policy("slack"),
            predictor=OnlineCorrection(MemoisedLatency(table)),
            max_batch_size=max_batch_size,
            collector=collector,
            # The folder is a file, so the image cannot be saved.
            image_path=lambda request: Path(__file__) / "image.png" if request.prompt.endswith("00") else None,
            on_finish=self._ended,
        )
        self._thread = threading.Thread(target=self.engine.run)

    def __enter__(self) -> "SteadyLoad":
        self.engine.start()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.engine.close()
        self._thread.join()

    def feed(self, count: int) -> None:
        """Submit `count` requests, and return when they have ended."""
        for number in range(self._count, self._count + count):
            self._wait_for_places(1)
            late = number % 50 == 1
            self.engine.submit(
                Request(
                    number % NUM_IDS,
                    f"prompt {number % NUM_PROMPTS:02}",
                    self._random.choice(self._sizes),
                    self._random.randint(1, self._most_steps),
                    guidance_scale=self._random.choice((1.0, 4.0)),
                    seed=number,
                    arrival_s=self.engine.now_s(),
                    slo_s=1e-6 if late else 600.0,
                )
            )
        self._count += count
        self._wait_for_places(NUM_OPEN)
        for _ in range(NUM_OPEN):
            self._places.release()

    def _wait_for_places(self, count: int) -> None:
        for _ in range(count):
            while not self._places.acquire(timeout=1.0):
                assert self._thread.is_alive(), "the engine has ended"

    def _ended(self, record: RequestRecord) -> None:
        if self._on_finish is not None:
            self._on_finish(record)
        self._places.release()


def num_blocks() -> int:
    """Return the number of memory blocks that Python objects occupy; even a small leak per request shows in it."""
    gc.collect()
    # This cache keeps up to 4,096 names of attributes that were looked up, including those that C code has created.
    sys._clear_type_cache()
    return sys.getallocatedblocks()
