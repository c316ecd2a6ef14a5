"""Small requests, and an engine that serves them until they end."""

from collections.abc import Sequence
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.policies import get_policy

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)


def requests_of(count: int, steps: int = 3) -> list[Request]:
    return [Request(i, f"prompt {i}", (SMALL, LARGE)[i % 2], steps, seed=i) for i in range(count)]


def serve(model: ServedModel, requests: Sequence[Request], policy: Any = None, **options: Any) -> RunResult:
    return _run(Engine(model, policy or get_policy("continuous"), **options), requests)


def serve_in_memory(model: ServedModel, requests: Sequence[Request]) -> InMemory:
    """Serve requests together; returns the collector with their records and images."""
    collector = InMemory(keep_images=True)
    engine = Engine(model, get_policy("continuous"), collector=collector)
    _run(engine, requests)
    assert not engine.callback_failures.count
    return collector


def _run(engine: Engine, requests: Sequence[Request]) -> RunResult:
    for request in requests:
        engine.submit(request)
    engine.close()
    return engine.run()
