"""Bytes that the Triton kernels of a dispatcher load, counted in triton's interpreter."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock


def loaded_bytes(dispatcher: Callable[..., Any], *args: Any, kernels: str) -> dict[str, int]:
    """Run a dispatcher in the interpreter; return the bytes that its kernels load, by dtype of the elements."""
    from triton.runtime.interpreter import InterpreterBuilder

    found, load = Counter[str](), InterpreterBuilder.create_masked_load

    def counted(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        element = pointers.get_element_ty()
        found[str(element)] += int(mask.data.sum()) * element.primitive_bitwidth // 8
        return load(builder, pointers, mask, *others)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counted):
        dispatcher(*args, kernels=kernels)
    return dict(found)
