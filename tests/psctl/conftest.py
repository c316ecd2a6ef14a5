"""Clients of a test module's fixture `server`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ..support.http_server import HttpServer

if TYPE_CHECKING:
    import httpx
    import openai


@pytest.fixture
def http(server: HttpServer) -> "Iterator[httpx.Client]":
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: HttpServer) -> "openai.OpenAI":
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
