"""Text encoders whose weights are on the device only while they encode (`--offload text`)."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TEXT_ENCODER = "text_encoder"
"""Prefix of the names of a pipeline's text encoders."""


def text_encoders(pipe: Any) -> dict[str, nn.Module]:
    """Return the text encoders of a pipeline by the names of its components."""
    return {name: part for name, part in pipe.components.items() if name.startswith(TEXT_ENCODER) and part is not None}


class TextOffload:
    """Keeps the weights of text encoders off the device, and moves those of an encoder there for each of its passes.

    Between passes they are in host memory or, on a CPU, only in their files, from which they are read again. The
    weights are the same, so conditioning is identical to the bit. Callers use an encoder as usual, one thread at a
    time.

    Args:
        rereads: whether encoders are read from their files rather than kept in host memory.
    """

    def __init__(self, *, rereads: bool = False) -> None:
        self.rereads = rereads
        self._num_bytes: dict[str, int] = {}
        self._num_moves, self._moving_s = 0, 0.0

    def add(self, name: str, encoder: nn.Module, read: Callable[[], nn.Module] | None = None) -> None:
        """Offload the weights of an encoder.

        Args:
            name: name of the component.
            encoder: the encoder, still on the host.
            read: loads the encoder again from its files; None keeps the weights in host memory.
        """
        weights = dict(encoder.named_parameters())
        self._num_bytes[name] = sum(weight.nbytes for weight in weights.values())
        kept = {key: weight.data for key, weight in weights.items()} if read is None else {}

        def load_weights() -> None:
            start = time.perf_counter()
            with torch.inference_mode(False):
                found = kept if read is None else {key: each.data for key, each in read().named_parameters()}
                for key, weight in weights.items():
                    weight.data = found[key].to(weight.device)
            self._num_moves += 1
            self._moving_s += time.perf_counter() - start

        def release_weights() -> None:
            with torch.inference_mode(False):
                for weight in weights.values():
                    weight.data = weight.data.new_empty(0)

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            try:
                load_weights()
                return forward(*args, **kwargs)
            finally:
                release_weights()

        forward = encoder.forward
        encoder.forward = offloaded
        release_weights()

    def offload_encoders(self, pipe: Any) -> None:
        """Offload the encoders of a pipeline that is still on the host, unless they are read from their files."""
        if not self.rereads:
            for name, encoder in text_encoders(pipe).items():
                self.add(name, encoder)

    def to_json(self, pipe: Any) -> dict[str, Any]:
        """Return the effect of offloading, for a summary.

        It holds the bytes of weights on the device between passes, during the pass of the largest encoder, and without
        offloading; the number of moves to the device; and the time that they took.
        """
        modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
        resident = sum(weight.nbytes for module in modules for weight in module.parameters())
        return {
            "weight_bytes": resident,
            "weight_bytes_while_encoding": resident + max(self._num_bytes.values()),
            "weight_bytes_without_offload": resident + sum(self._num_bytes.values()),
            "num_moves": self._num_moves,
            "moving_s": self._moving_s,
        }
