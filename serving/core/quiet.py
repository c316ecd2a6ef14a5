"""Notices that libraries print when they are imported. No torch."""

import logging
import os

_LOGGERS = ("torchao", "torch.utils._pytree")
"""The second one logs torchao's registration of its enumerations."""
_VERBOSITY = ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY")


def quiet_imports() -> None:
    """Suppress notices that imports print, unless the environment enables them; errors are still shown."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _VERBOSITY:
        os.environ.setdefault(name, "error")
