"""What a rehearsal leaves out of the real work, as it takes minutes on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn

from patchedserve.profiling.steps import matrix_peak
from patchedserve.serving.patched.patched_model import PatchedModel


@contextmanager
def uncompiled() -> Iterator[None]:
    """Blocks that are to be compiled run as they are."""

    def compile_blocks(model: nn.Module) -> int:
        return 0

    with (
        mock.patch("patchedserve.serving.plain.formats.compile_blocks", compile_blocks),
        mock.patch.object(PatchedModel, "compile", compile_blocks),
    ):
        yield


def use_small_products() -> None:
    """Let the peak of a processor be that of small products, for the life of the process."""
    matrix_peak._SIDE["cpu"] = 256
