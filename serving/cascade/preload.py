"""What every worker has of torch and diffusers, imported once by the process that workers on a CPU are forked from."""

from importlib import import_module

from ..core.garbage import imports_are_no_garbage
from ..models.placement import quiet_libraries

_MODULES = ("..models.build", "..engine.engine", "...training.cascade.discriminator")

# Nor do searches for garbage write to memory that all workers share.
with imports_are_no_garbage():
    quiet_libraries()
    for _module in _MODULES:
        import_module(_module, __package__)
