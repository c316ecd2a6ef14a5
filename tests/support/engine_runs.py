"""Small requests, and an engine that serves them to their end."""

from collections.abc import Sequence
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.policies import get_policy

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)


def requests_of(count: int, steps: int = 3) -> list[Request]:
    return [Request(i, f"prompt {i}", (SMALL, LARGE)[i % 2], steps, seed=i) for i in range(count)]


def serve(model: ServedModel, requests: Sequence[Request], policy: Any = None, **options: Any) -> RunResult:
    engine = Engine(model, policy or get_policy("continuous"), **options)
    for request in requests:
        engine.submit(request)
    engine.close()
    return engine.run()
