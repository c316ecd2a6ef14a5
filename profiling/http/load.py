"""Load over HTTP: a trace sent in an open loop to a server of OpenAI's images API, and its results. No torch.

Latency counts from the scheduled time of a request, so that a slow server cannot hide behind a sender that waits for
it. The sender's own delay is reported, and a run in which it was too long is not valid (`is_valid`).
"""

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ...data.errors import RunError, UsageError
from ...data.files import atomic_write
from ...data.requests import Request
from ...serving.core.metrics import summarize
from ...serving.core.request_state import RequestRecord, Status
from .servers import ServerProfile

MAX_SEND_LAG_S = 0.05
ENDPOINT = "/images/generations"
_LEAVE_AFTER_S = (0.05, 2.0)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of a load.

    Attributes:
        base_url: base URL of the API, with `/v1`.
        endpoint: path of the endpoint below the base URL.
        key: API key sent with every request; None for none.
        model: name of the requested model; None leaves it to the server.
        stream: whether images are streamed.
        max_concurrency: maximum number of open requests; None for no limit. The latency of a request that waits for
            this limit still counts from its scheduled time.
        disconnect_rate: share of the requests whose client disconnects before it has an answer.
        timeout_s: seconds after which the client gives up on an answer.
        save_dir: folder for the images; None discards them.
        seed: seed that decides which clients disconnect, and when.
        profile: what the server calls the parameters of a request.
    """

    base_url: str
    endpoint: str = ENDPOINT
    key: str | None = None
    model: str | None = None
    stream: bool = False
    max_concurrency: int | None = None
    disconnect_rate: float = 0.0
    timeout_s: float = 600.0
    save_dir: Path | None = None
    seed: int = 0
    profile: ServerProfile = field(default_factory=ServerProfile)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url is {self.base_url!r}, but it must begin with http:// or https://")
        if not 0 <= self.disconnect_rate <= 1:
            raise UsageError(f"--disconnect-rate is {self.disconnect_rate:g}, but it must be from 0 to 1")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency is {self.max_concurrency}, but it must be 1 or more")

    @property
    def url(self) -> str:
        """URL to which requests are sent."""
        return self.base_url.rstrip("/") + "/" + self.endpoint.lstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        """Headers that carry the API key."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def discover(self, requests: Sequence[Request], on_note: Callable[[str], None]) -> "LoadSettings":
        """Return the settings with what the server says of its parameters (`ServerProfile.discover`). A server that
        cannot stream is asked for whole images.
        """
        sent = {name for request in requests for name in our_body(request, self)}
        profile = self.profile.discover(self.url, sent, self.key, on_note)
        return replace(self, profile=profile, stream=self.stream and not profile.lacks("stream"))


@dataclass(slots=True)
class LoadResult:
    """Result of a load.

    Attributes:
        records: records of the requests, in their order; a rejected request has failed.
        codes: number of answers by HTTP status; 0 for no answer.
        errors: number of errors by error code.
        send_lag_s: delay of the sender for each request, in seconds after its scheduled time.
        first_image_s: seconds from the scheduled time of a request to its first image, partial images included.
        duration_s: seconds from the start of the load to the last answer.
    """

    records: list[RequestRecord] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    send_lag_s: list[float] = field(default_factory=list)
    first_image_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def send_lag_p99(self) -> float:
        """The 99th percentile of the sender's own delay, in seconds."""
        return float(np.percentile(self.send_lag_s, 99)) if self.send_lag_s else 0.0

    @property
    def is_valid(self) -> bool:
        """Whether the sender kept up with the schedule."""
        return self.send_lag_p99 <= MAX_SEND_LAG_S

    def summary(self, *, slo_scale: float | None, model: str, dataset: str) -> dict[str, Any]:
        """Return the figures, under the names that other benchmark clients use."""
        found = summarize(self.records, self.duration_s, slo_scale=slo_scale, model=model, dataset=dataset)
        return found | {
            "rejected_requests": self.codes[429],
            "by_code": {str(code): count for code, count in sorted(self.codes.items())},
            "by_error": dict(self.errors.most_common()),
            "time_to_first_image_mean": float(np.mean(self.first_image_s)) if self.first_image_s else None,
            "send_lag_p99": self.send_lag_p99,
            "is_valid": self.is_valid,
        }


def send_load(
    requests: Sequence[Request], settings: LoadSettings, *, on_finish: Callable[[RequestRecord], None] | None = None
) -> LoadResult:
    """Send a trace, in order of arrival, and wait for all answers.

    Raises:
        RunError: no request receives an answer.
        KeyboardInterrupt: on Ctrl-C.
    """
    result = asyncio.run(_send_all(requests, settings, on_finish))
    if requests and set(result.codes) == {0}:
        reason = next((record.reason for record in result.records if record.reason), "no answer")
        raise RunError(f"{settings.url} does not answer: {reason}")
    return result


async def _send_all(
    requests: Sequence[Request], settings: LoadSettings, on_finish: Callable[[RequestRecord], None] | None
) -> LoadResult:
    result, draws = LoadResult(), random.Random(settings.seed)
    places = asyncio.Semaphore(settings.max_concurrency or len(requests) or 1)
    leaves = [draws.uniform(*_LEAVE_AFTER_S) if draws.random() < settings.disconnect_rate else None for _ in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=settings.timeout_s) as client:
        start_s = time.perf_counter()

        async def one(request: Request, leave_after_s: float | None) -> RequestRecord:
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start_s)))
            result.send_lag_s.append(time.perf_counter() - start_s - request.arrival_s)
            record = RequestRecord.of(request)
            async with places:
                sender = _Sender(client, settings, result, record, start_s)
                try:
                    async with asyncio.timeout(leave_after_s):
                        status, reason = await sender.send(request)
                except TimeoutError:
                    status, reason = "cancelled", "the client has left"
            record.close(status, time.perf_counter() - start_s, reason)
            if on_finish is not None:
                on_finish(record)
            return record

        sent = [one(request, leave) for request, leave in zip(requests, leaves, strict=True)]
        result.records = list(await asyncio.gather(*sent))
        result.duration_s = time.perf_counter() - start_s
    return result


@dataclass(slots=True)
class _Sender:
    """Sender of one request."""

    client: httpx.AsyncClient
    settings: LoadSettings
    result: LoadResult
    record: RequestRecord
    start_s: float

    async def send(self, request: Request) -> tuple[Status, str | None]:
        """Send the request. Returns its status and the reason of a failure."""
        body = body_of(request, self.settings)
        try:
            if self.settings.stream:
                return await self._stream(body)
            answer = await self.client.post(self.settings.url, json=body, headers=self.settings.headers)
        except httpx.HTTPError as error:
            self.result.codes[0] += 1
            return "failed", f"{type(error).__name__}: {error}"
        self.result.codes[answer.status_code] += 1
        if answer.status_code != 200:
            return self._refused(answer.content)
        try:
            image = answer.json()["data"][0]
            b64_json, url = image.get("b64_json"), image.get("url")
        except (ValueError, LookupError, TypeError, AttributeError):
            return "failed", f"the answer is not that of an images API: {answer.text[:80]!r}"
        content = None if b64_json is None else base64.b64decode(b64_json)
        if content is None and url is not None:
            try:
                content = await self._fetched(url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return "failed", f"the image at {url[:80]} cannot be read: {error}"
        self._shown()
        return self._completed(content)

    async def _fetched(self, url: str) -> bytes:
        own = httpx.URL(self.settings.url)
        place = own.join(url)
        # Another host does not get the key.
        headers = self.settings.headers if place.netloc == own.netloc else {}
        return (await self.client.get(place, headers=headers)).raise_for_status().content

    async def _stream(self, body: dict[str, Any]) -> tuple[Status, str | None]:
        headers = self.settings.headers
        async with self.client.stream("POST", self.settings.url, json=body, headers=headers) as answer:
            self.result.codes[answer.status_code] += 1
            if answer.status_code != 200:
                return self._refused(await answer.aread())
            is_first = True
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):  # a comment, a name, or [DONE]
                    continue
                try:
                    told = json.loads(line[6:])
                except ValueError:
                    return "failed", f"an event is not JSON: {line[:80]!r}"
                if "error" in told:
                    return self._refused(line[6:].encode())
                if is_first and "b64_json" in told:
                    is_first = False
                    self._shown()
                if told.get("type") == "image_generation.completed":
                    return self._completed(base64.b64decode(told["b64_json"]))
        return "failed", "the stream ended without an image"

    def _shown(self) -> None:
        self.result.first_image_s.append(time.perf_counter() - self.start_s - self.record.arrival_s)

    def _refused(self, content: bytes) -> tuple[Status, str | None]:
        try:
            error = json.loads(content)["error"]
            code, message = str(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            code, message = "unknown", content[:200].decode("utf-8", "replace")
        self.result.errors[code] += 1
        return "discarded" if code == "deadline_unreachable" else "failed", f"{code}: {message}"

    def _completed(self, content: bytes | None) -> tuple[Status, str | None]:
        if content is not None and self.settings.save_dir is not None:
            path = self.settings.save_dir / f"{self.record.request_id:05}.png"
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
            self.record.image_path = str(path)
        return "completed", None


def body_of(request: Request, settings: LoadSettings) -> dict[str, Any]:
    """Return the body of a request, in the server's words."""
    return settings.profile.translated(our_body(request, settings))


def our_body(request: Request, settings: LoadSettings) -> dict[str, Any]:
    """Return the body of a request to our own API."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "size": str(request.resolution),
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "seed": request.seed,
        "response_format": "b64_json",
    }
    if request.negative_prompt is not None:
        body["negative_prompt"] = request.negative_prompt
    if request.slo_s is not None:
        body["slo"] = request.slo_s
    if request.priority:
        body["priority"] = request.priority
    if settings.model is not None:
        body["model"] = settings.model
    if settings.stream:
        body |= {"stream": True, "partial_images": 3}
    return body
