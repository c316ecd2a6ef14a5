"""Compiled blocks that are only traced into graphs, as generating code for them takes a minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from unittest import mock

from patchedserve.serving.core.compiled import compile_blocks, compile_decoder
from patchedserve.serving.patched.patched_model import PatchedModel


@contextmanager
def traced_only() -> Iterator[None]:
    """Run the traced graphs of compiled blocks as they are inside the block, without generating code."""
    blocks, decoder = (partial(each, backend="eager") for each in (compile_blocks, compile_decoder))
    patched = partialmethod(PatchedModel.compile, backend="eager")
    with (
        mock.patch("patchedserve.serving.plain.formats.compile_blocks", blocks),
        mock.patch("patchedserve.serving.models.decoder.compile_decoder", decoder),
        mock.patch.object(PatchedModel, "compile", patched),
    ):
        yield
