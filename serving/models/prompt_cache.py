"""Cache for the conditioning of recent prompts, which saves encoding repeated text."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ...data.requests import Request

Conditioning = dict[str, torch.Tensor]


class PromptCache:
    """LRU cache for the outputs of text encoders, bounded by their size in bytes.

    Conditioning depends on prompts, adapters, size and guidance, never on seed or steps, and is never written to, so
    images are the same with and without the cache. One thread at a time may call it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[Any, Conditioning] = OrderedDict()
        self._hits = self._misses = 0

    def get(self, request: Request, is_guided: bool, encode: Callable[[Request, bool], Conditioning]) -> Conditioning:
        """Return the conditioning of a request, from the cache or newly encoded."""
        texts = request.prompt, request.negative_prompt, request.adapters
        key = *texts, request.resolution, request.guidance_scale, is_guided
        found = self._entries.get(key)
        if found is not None:
            self._hits += 1
            self._entries.move_to_end(key)
            return dict(found)
        self._misses += 1
        found = encode(request, is_guided)
        self._entries[key] = dict(found)
        self._num_bytes += _num_bytes(found)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(self._entries.popitem(last=False)[1])
        return found

    def to_json(self) -> dict[str, Any]:
        """Return hits, misses and the size of the cache, for a summary."""
        num_lookups = self._hits + self._misses
        return {
            "hits": self._hits,
            "misses": self._misses,
            "hit_rate": self._hits / num_lookups if num_lookups else None,
            "num_kept": len(self._entries),
            "kept_bytes": self._num_bytes,
        }


def _num_bytes(conditioning: Conditioning) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in conditioning.values())
