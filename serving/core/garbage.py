"""Exclusion of the objects that imports create from Python's garbage collection."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_are_no_garbage() -> Iterator[None]:
    """Disable garbage collection while packages are imported, and exclude all objects present then from later ones.

    torch, diffusers and transformers create a million permanent objects. Collections that traverse them took 0.9 of the
    5 CPU seconds of `psctl generate` with a tiny model, and each stalls a server for a quarter of a second. If all
    packages were imported before, no object is excluded.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
            # At exit, Triton's library reports objects that are excluded as leaks.
            atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
