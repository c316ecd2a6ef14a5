"""Generated requests that follow the server's OpenAPI schema, and ones that violate it."""

import json
from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

GENERATIONS = "/v1/images/generations"
_ENDLESS = frozenset({"/v1/state/stream"})


def fuzz(url: str, num_cases: int) -> dict[str, int]:
    """Send `num_cases` requests; returns the number of responses by status.

    Raises AssertionError: a response is a server error, an error is not JSON, or the server no longer draws.
    """
    counts: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found: list[Any] = [_operation_of(result) for result in schema.get_all_operations()]
    operations = [each for each in found if each.path not in _ENDLESS]
    for operation in operations:
        # Half of all requests go to the endpoint where most can be wrong.
        is_main = operation.path == GENERATIONS and operation.method.lower() == "post"
        count = num_cases // 4 if is_main else num_cases // 2 // len(operations)

        @_settings(count)
        @given(case=operation.as_strategy())
        def by_schema(case: Any) -> None:
            _check(case.call(base_url=url, timeout=60), counts)

        by_schema()
    with httpx.Client(base_url=url, timeout=60) as client:
        # Some operations have few possible cases; the remaining ones are spent here.
        @_settings(num_cases - counts.total())
        @given(body=_bodies())
        def by_bytes(body: bytes) -> None:
            answer = client.post(GENERATIONS, content=body, headers={"content-type": "application/json"})
            _check(answer, counts)

        by_bytes()
        drawn = client.post(GENERATIONS, json={"prompt": "a cat", "num_inference_steps": 1})
        assert drawn.status_code == 200, drawn.text
    return {str(status): count for status, count in sorted(counts.items())}


def _operation_of(result: Any) -> Any:
    """Return an operation of the schema, which must be valid."""
    return result.ok()


def _settings(count: int) -> Any:
    every_check: Any = list(HealthCheck)
    return settings(
        max_examples=max(1, count),
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=every_check,
    )


def _bodies() -> st.SearchStrategy[bytes]:
    """Generate bytes, arbitrary JSON, and bodies that are nearly valid."""
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    anything = st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
    names = st.sampled_from(
        ["n", "size", "seed", "slo", "stream", "quality", "partial_images", "guidance_scale", "output_format", "model"]
    )
    nearly = st.dictionaries(names, anything, max_size=3).map(
        lambda fields: {"prompt": "a cat", "num_inference_steps": 1, **fields}
    )
    as_json = (anything | nearly).map(_dumped)
    return st.binary(max_size=300) | as_json


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _check(answer: Any, counts: Counter[int]) -> None:
    counts[answer.status_code] += 1
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        assert sorted(answer.json()["error"]) == ["code", "message", "param", "type"]
