"""Imports of torch and diffusers for child processes, done once in the process that they are forked from on a CPU
(`core.processes`).
"""

from importlib import import_module

from .core.garbage import imports_are_no_garbage
from .models.placement import quiet_libraries

_MODULES = (".models.build", ".models.rank", ".models.stage", ".engine.engine", "..training.cascade.discriminator")

# This also keeps garbage collections from writing to memory that the processes share.
with imports_are_no_garbage():
    quiet_libraries()
    for _module in _MODULES:
        import_module(_module, __package__)
