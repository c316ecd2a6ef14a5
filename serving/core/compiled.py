"""`--compile`: runs the transformer blocks of a model, patched or plain, through torch.compile.

A compiled graph serves every batch with as many resolutions as it was made for: sizes and numbers of requests are
symbols in it. What the model fixes must be none, or tracing takes twice as long (`core.attention.constant`). Blocks of
one kind share it. The whole model is not compiled: its convolutions choose by the layout how they run, and torch's own
GroupNorm and convolution kernels have little left to fuse.

Calling a compiled block costs the processor about a millisecond on an EPYC core: 0.3 ms for the guards, 0.5 for
inductor's wrapper, 0.2 around both. So on a CPU it pays where blocks do much: in transformers, not in small U-Nets.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo
import torch.fx.experimental._config
from torch import nn

from ..families import transformer_of
from .attention import FusedLinear

_MOST_GRAPHS = 64
"""Of a class of blocks: kinds of blocks times numbers of resolutions. More run uncompiled; torch says so."""


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What the compiler must know whenever blocks run; each thread has settings of its own.

    The layout is reached through the leaves, and integers there would be constants: a graph for every batch. Sizes that
    are equal in the first batch would have to be equal in all that share its graph. And what the compiler remembers of
    operators that it has traced costs more than it saves where sizes are symbols: without it two kinds of graphs of
    SD3's blocks take 19 CPU seconds, not 29. Floats (a norm's epsilon) are constants: as symbols they are tensors that
    a graph reads back on the host, which cannot be recorded.
    """
    graphs = torch._dynamo.config.patch(
        allow_unspec_int_on_nn_module=True,
        specialize_float=True,
        recompile_limit=_MOST_GRAPHS,
        fake_tensor_cache_enabled=False,
    )
    sizes: Any = torch.fx.experimental._config
    with graphs, sizes.patch(use_duck_shape=False):
        yield


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Let the blocks of a model compile when they first run, within `compiler_settings`; returns how many."""
    transformer = transformer_of(model)
    if transformer is None:
        blocks = [module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock"]
    else:
        # Not those that refine the text alone, which the patch engine runs once for a batch.
        found = (
            (each.kind, module) for each in transformer.lists for module in model.get_submodule(each.name).children()
        )
        blocks = [module for kind, module in found if type(module).__name__ == kind]
    for block in blocks:
        for part in block.modules():
            if isinstance(part, FusedLinear):
                part.fuse()  # at first use is within the graph, which would be made anew after it
        block.compile(dynamic=True, backend=backend)
    return len(blocks)
