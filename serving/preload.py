"""What processes beside psctl's own have of torch and diffusers, imported once by the one that they are forked from on
a CPU (`core.processes`).
"""

from importlib import import_module

from .core.garbage import imports_are_no_garbage
from .models.placement import quiet_libraries

_MODULES = (".models.build", ".models.rank", ".models.stage", ".engine.engine", "..training.cascade.discriminator")

# Nor do searches for garbage write to memory that all of them share.
with imports_are_no_garbage():
    quiet_libraries()
    for _module in _MODULES:
        import_module(_module, __package__)
