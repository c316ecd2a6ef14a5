"""Python's search for garbage, kept away from what packages make when they are imported."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_are_no_garbage() -> Iterator[None]:
    """Let Python look for no garbage while packages are imported, and never again among what is there then.

    torch, diffusers and transformers make a million objects that stay. Searches among them took 0.9 of the 5 CPU
    seconds of `psctl generate` with a tiny model, and hold up a server for a quarter of a second each. If all packages
    have been imported before, no object is left out of later searches.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
            # At the end Triton's library takes for leaks what is not searched.
            atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
