"""Compiled blocks that are traced into graphs which run as they are: code for them takes a minute to generate."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from unittest import mock

from patchedserve.serving.core.compiled import compile_blocks
from patchedserve.serving.patched.patched_model import PatchedModel


@contextmanager
def traced_only() -> Iterator[None]:
    """Meanwhile no code is generated for blocks that are to be compiled."""
    blocks = partial(compile_blocks, backend="eager")
    patched = partialmethod(PatchedModel.compile, backend="eager")
    with (
        mock.patch("patchedserve.serving.plain.formats.compile_blocks", blocks),
        mock.patch.object(PatchedModel, "compile", patched),
    ):
        yield
