"""What takes the place of CUDA graphs on a CPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_REFUSED = (
    (torch, "from_numpy"),
    *((Tensor, name) for name in ("item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__int__", "__float__")),
)
"""What would copy from the processor, or have it wait for the device: neither can be recorded."""


class Rerun:
    """A recorder for any device: playing back runs the work again, into the memory of the first result. Work that could
    not be recorded on a GPU fails.
    """

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.recorded += 1
        with _on_the_device_alone():
            result = work()
        result = torch.full_like(result, float("nan"))

        def play() -> None:
            self.played += 1
            with _on_the_device_alone():
                found = work()
            result.copy_(found)

        return play, result


@contextmanager
def _on_the_device_alone() -> Iterator[None]:
    own = threading.get_ident()

    def refusal(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: object, **named: object) -> Any:
            # Other threads encode and decode meanwhile.
            assert threading.get_ident() != own, f"{name} cannot be recorded"
            return usual(*args, **named)

        return refuse

    with ExitStack() as refused:
        for where, name in _REFUSED:
            refused.enter_context(mock.patch.object(where, name, refusal(name, getattr(where, name))))
        yield
