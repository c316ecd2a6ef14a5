"""Text encoders whose weights are on the device only while they encode (`--offload text`)."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TEXT_ENCODER = "text_encoder"
"""How the names of a pipeline's text encoders begin."""


class TextOffload:
    """Takes the weights of text encoders off the device, and brings each encoder's back for each of its passes.

    Elsewhere they are in host memory; or, where the device is the host, in their files, from which they are read again.
    They are the same weights, so that conditioning is the same to the bit. What owns an encoder may call it as ever,
    one thread at a time.

    Args:
        rereads: whether encoders are read from their files, rather than kept in host memory.
    """

    def __init__(self, *, rereads: bool = False) -> None:
        self.rereads = rereads
        self._num_bytes: dict[str, int] = {}
        self._num_moves, self._moving_s = 0, 0.0

    def add(self, name: str, encoder: nn.Module, read: Callable[[], nn.Module] | None = None) -> None:
        """Take an encoder's weights away.

        Args:
            name: of the component.
            encoder: still on the host.
            read: loads it anew from its files; None keeps the weights in host memory.
        """
        weights = dict(encoder.named_parameters())
        self._num_bytes[name] = sum(weight.nbytes for weight in weights.values())
        kept = {key: weight.data for key, weight in weights.items()} if read is None else {}

        def bring(*_: Any) -> None:
            start = time.perf_counter()
            with torch.inference_mode(False):
                found = kept if read is None else {key: each.data for key, each in read().named_parameters()}
                for key, weight in weights.items():
                    weight.data = found[key].to(weight.device)
            self._num_moves += 1
            self._moving_s += time.perf_counter() - start

        def take_away(*_: Any) -> None:
            with torch.inference_mode(False):
                for weight in weights.values():
                    weight.data = weight.data.new_empty(0)

        encoder.register_forward_pre_hook(bring)
        encoder.register_forward_hook(take_away, always_call=True)
        take_away()

    def keep_on_host(self, pipe: Any) -> None:
        """Take away the encoders of a pipeline that is still on the host, unless they were as they were read."""
        for name, part in pipe.components.items():
            if not self.rereads and name.startswith(TEXT_ENCODER) and part is not None:
                self.add(name, part)

    def to_json(self, pipe: Any) -> dict[str, Any]:
        """For a summary: bytes of weights on the device between passes, during the largest encoder's, and as they would
        be without; how often an encoder was brought back, and what that took.
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
