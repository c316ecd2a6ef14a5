"""PatchedServe: profile, train, serve and evaluate text-to-image diffusion models whose requests mix resolutions.

The repository root is this package. Its sub-packages are floors, from top to bottom `psctl`, `eval`, `profiling`,
`serving`, `training`, `data`, `kernels`; each imports only from the floors below its own.

The names in `__all__` are the public Python API. Each is imported at its first use, so that `import patchedserve` is
fast and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.requests import Request
    from .data.resolution import Resolution
    from .serving.engine.collectors import InMemory
    from .serving.engine.engine import Engine
    from .serving.models.loading import load_model
    from .serving.scheduling.policies import get_policy

__version__ = "0.1.0"
__all__ = ["Engine", "InMemory", "Request", "Resolution", "get_policy", "load_model"]

_HOMES = {
    "Engine": "serving.engine.engine",
    "InMemory": "serving.engine.collectors",
    "Request": "data.requests",
    "Resolution": "data.resolution",
    "get_policy": "serving.scheduling.policies",
    "load_model": "serving.models.loading",
}


def __getattr__(name: str) -> Any:
    """Import a name of the public API. Raises AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
