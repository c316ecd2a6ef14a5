"""Notices that libraries print when they are imported. No torch."""

import logging
import os

_LOGGERS = ("torchao", "torch.utils._pytree")
"""The second is told of torchao's own enumerations."""
_VERBOSITY = ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY")


def quiet_imports() -> None:
    """Keep notices of imports out of our own output, unless the environment asks for them; errors are still told."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _VERBOSITY:
        os.environ.setdefault(name, "error")
