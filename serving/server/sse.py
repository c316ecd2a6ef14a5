"""Server-sent events of a stream, with a comment whenever there is no event for a while. No torch."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from .errors import ApiError, took_too_long
from .images import base64_of
from .protocol import Generation
from .tickets import FinishedImage, PartialImage, Progress, Ticket, facts_of, metrics_of

COMMENT_EVERY_S = 10.0
_COMMENT = b": waiting\n\n"


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode one event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


async def events_of(ticket: Ticket, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the events of a ticket until it has ended, for at most `timeout_s` seconds."""
    assert ticket.events is not None
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        left_s = end_s - loop.time()
        if left_s <= 0:
            # Without waiting until the engine has released it.
            gone = took_too_long(timeout_s)
            ticket.cancel("it took too long", gone)
            yield event(gone.to_json(), "error")
            return
        try:
            told = await asyncio.wait_for(ticket.events.get(), min(left_s, COMMENT_EVERY_S))
        except TimeoutError:
            yield _COMMENT
            continue
        if told is None:
            return
        if isinstance(told, ApiError):
            yield event(told.to_json(), "error")
            continue
        content = _content_of(told, ticket)
        yield event(content, content["type"])


def usage_of(generation: Generation, num_images: int) -> dict[str, Any]:
    """Return the token counts that OpenAI's clients expect. There are no tokens: pixels count as output tokens."""
    pixels = generation.resolution.pixels * num_images
    return {
        "input_tokens": 0,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
        "output_tokens": pixels,
        "total_tokens": pixels,
    }


def _content_of(told: PartialImage | Progress | FinishedImage, ticket: Ticket) -> dict[str, Any]:
    wanted = ticket.generation
    if isinstance(told, Progress):
        return {
            "type": f"{wanted.kind}.progress",
            "image_index": told.image_index,
            "steps_done": told.steps_done,
            "num_inference_steps": told.num_steps,
        }
    shared = {
        "created_at": int(ticket.created_s),
        "size": str(wanted.resolution),
        "quality": wanted.quality,
        "background": "opaque",
        "output_format": wanted.output_format,
    }
    if isinstance(told, PartialImage):
        return {
            "type": f"{wanted.kind}.partial_image",
            "b64_json": base64_of(told.content),
            "partial_image_index": told.index,
            "image_index": told.image_index,
            **shared,
        }
    index = ticket.numbers.index(told.record.request_id)
    return {
        "type": f"{wanted.kind}.completed",
        "b64_json": base64_of(told.content),
        "image_index": index,
        "seed": wanted.seeds[index],
        "id": ticket.id,
        "usage": usage_of(wanted, 1),
        "metrics": metrics_of([told.record]),
        **facts_of(told.record),
        **shared,
    }
