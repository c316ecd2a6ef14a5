"""Cache of what text encoders returned for recent texts, which saves encoding repeated ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.adapters import Adapters
from ..core.bounded_cache import BoundedCache

_READ = ("text_embeds", "last_hidden_state", "pooler_output", "hidden_states")
"""What pipelines read of the outputs of text encoders; logits and a language model's keys and values are not kept."""


class PromptCache:
    """LRU cache of the outputs of a pipeline's text encoders, bounded by their size in bytes.

    An encoder sees token ids, masks and adapters, never sizes, seeds or guidance, and its outputs are never written to,
    so images are the same with and without the cache. Most requests with guidance share their negative prompt. Of the
    hidden states of all layers, those that the pipeline reads are kept. One thread at a time may use it.

    Args:
        encoders: encoders by name.
        max_bytes: bytes of outputs that are kept.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], max_bytes: int) -> None:
        self._encoders, self._entries = encoders, BoundedCache[Any](max_bytes, _num_bytes)
        self.clear()

    def clear(self) -> None:
        """Forget all texts, and count from 0."""
        self._entries.clear()
        self._new: dict[Any, Any] = {}
        self._hits = self._misses = 0

    @contextmanager
    def answering(self, adapters: Adapters) -> Iterator[None]:
        """Answer calls of the encoders, to which these adapters are applied, until the context ends."""
        given = {name: vars(encoder).get("forward") for name, encoder in self._encoders.items()}
        assert not any(isinstance(forward, partial) for forward in given.values()), "two caches answer at once"
        for name, encoder in self._encoders.items():
            encoder.forward = partial(self._call, encoder.forward, name, adapters)
        self._new.clear()
        try:
            yield
        finally:
            for name, encoder in self._encoders.items():
                if (before := given[name]) is None:
                    del encoder.forward
                else:
                    encoder.forward = before
        # After an error, states may not have been read.
        for key, output in self._new.items():
            self._keep(key, output)
        self._new.clear()

    def _call(self, forward: Callable[..., Any], name: str, adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
        values = [*enumerate(args), *sorted(kwargs.items())]
        if any(isinstance(value, Tensor) and value.is_floating_point() for _, value in values):
            return forward(*args, **kwargs)  # embeddings, of which nothing is known
        key = name, adapters, *((place, _identity(value)) for place, value in values)
        found = self._entries.find(key)
        if found is None:
            found = self._new.get(key)
        if found is not None:
            self._hits += 1
            return found
        self._misses += 1
        found = forward(*args, **kwargs)
        if isinstance(found, dict):
            read = {field: found[field] for field in _READ if field in found}
            if "hidden_states" in read:
                read["hidden_states"] = _States(read["hidden_states"])
            self._new[key] = found = type(found)(**read)
        return found

    def _keep(self, key: Any, output: Any) -> None:
        if isinstance(states := output.get("hidden_states"), _States):
            output = type(output)(**dict(output) | {"hidden_states": states.of_read()})
        self._entries.keep(key, output)

    def to_json(self) -> dict[str, Any]:
        """Return hits and misses, by text and encoder, and the size of the cache, for a summary."""
        num_lookups = self._hits + self._misses
        return {
            "hits": self._hits,
            "misses": self._misses,
            "hit_rate": self._hits / num_lookups if num_lookups else None,
            "num_kept": len(self._entries),
            "kept_bytes": self._entries.num_bytes,
        }


class _States(tuple[Tensor, ...]):
    """Hidden states of all layers, which note those that are read."""

    def __init__(self, _: Any) -> None:
        self._read: set[int] = set()

    def __getitem__(self, place: Any) -> Any:
        places = range(len(self))[place]
        self._read.update([places] if isinstance(places, int) else places)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Tensor]:
        self._read.update(range(len(self)))
        return super().__iter__()

    def of_read(self) -> tuple[Tensor | None, ...]:
        """Return the states that have been read, at their places."""
        return tuple(super(_States, self).__getitem__(at) if at in self._read else None for at in range(len(self)))


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.cpu().numpy().tobytes()
    return repr(value)


def _num_bytes(output: Any) -> int:
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tree_leaves(dict(output))
        if isinstance(each, torch.Tensor)
    }
    return sum(storages.values())
