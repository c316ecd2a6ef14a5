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
            aborted = took_too_long(timeout_s)
            ticket.cancel("it took too long", aborted)
            yield event(aborted.to_json(), "error")
            return
        try:
            item = await asyncio.wait_for(ticket.events.get(), min(left_s, COMMENT_EVERY_S))
        except TimeoutError:
            yield _COMMENT
            continue
        if item is None:
            return
        if isinstance(item, ApiError):
            yield event(item.to_json(), "error")
            continue
        content = _content_of(item, ticket)
        yield event(content, content["type"])


def usage_of(generation: Generation, num_images: int) -> dict[str, Any]:
    """Return the token counts that OpenAI's clients expect. There are no tokens: pixels of images count as output, and
    those of the references that the model sees as input.
    """
    pixels = generation.resolution.pixels * num_images
    seen = generation.pixels_seen - generation.resolution.pixels
    return {
        "input_tokens": seen,
        "input_tokens_details": {"image_tokens": seen, "text_tokens": 0},
        "output_tokens": pixels,
        "total_tokens": seen + pixels,
    }


def _content_of(item: PartialImage | Progress | FinishedImage, ticket: Ticket) -> dict[str, Any]:
    generation = ticket.generation
    if isinstance(item, Progress):
        return {
            "type": f"{generation.kind}.progress",
            "image_index": item.image_index,
            "steps_done": item.steps_done,
            "num_inference_steps": item.num_steps,
        }
    shared = {
        "created_at": int(ticket.created_s),
        "size": str(generation.resolution),
        "quality": generation.quality,
        "background": "opaque",
        "output_format": generation.output_format,
    }
    if isinstance(item, PartialImage):
        return {
            "type": f"{generation.kind}.partial_image",
            "b64_json": base64_of(item.content),
            "partial_image_index": item.index,
            "image_index": item.image_index,
            **shared,
        }
    index = ticket.numbers.index(item.record.request_id)
    return {
        "type": f"{generation.kind}.completed",
        "b64_json": base64_of(item.content),
        "image_index": index,
        "seed": generation.seeds[index],
        "id": ticket.id,
        "usage": usage_of(generation, 1),
        "metrics": metrics_of([item.record]),
        **facts_of(item.record),
        **shared,
    }
