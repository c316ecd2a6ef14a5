"""`--compile`: runs the transformer blocks of a model, patched or plain, through torch.compile, and on a GPU the
residual blocks of its autoencoder's decoder.

A compiled graph serves every batch with the number of resolutions that it was compiled for: sizes and numbers of
requests are symbols in it. Values that the model fixes must not be symbols, or tracing takes twice as long
(`core.attention.constant`). Blocks of one kind share a graph. The whole model is not compiled: its convolutions choose
their strategy by the layout, and torch's own GroupNorm and convolution kernels leave little to fuse.

Calling a compiled block costs about a millisecond on an EPYC core: 0.3 ms for the guards, 0.5 for inductor's wrapper,
0.2 around both. On a CPU it therefore pays only for large blocks: in transformers, not in small U-Nets.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch._dynamo
import torch.fx.experimental._config
from torch import nn

from .attention import FusedLinear
from .denoiser import transformer_blocks

_MAX_GRAPHS = 64
"""Largest number of graphs for a class of blocks: kinds of blocks times numbers of resolutions. Beyond it, blocks run
uncompiled, and torch logs a warning.
"""


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Apply the compiler settings that are needed whenever blocks run; each thread has its own settings.

    * The layout is reached through the leaves, where integers would by default be constants: a graph for every batch.
    * By default, sizes that are equal in the first batch would have to be equal in all batches that share its graph.
    * The cache of traced operators costs more than it saves if sizes are symbols: without it, two kinds of graphs of
      SD3's blocks take 19 CPU seconds instead of 29.
    * Floats (a norm's epsilon) are constants: as symbols they are tensors that a graph reads back on the host, which
      cannot be recorded.
    """
    graphs = torch._dynamo.config.patch(
        allow_unspec_int_on_nn_module=True,
        specialize_float=True,
        recompile_limit=_MAX_GRAPHS,
        fake_tensor_cache_enabled=False,
    )
    sizes: Any = torch.fx.experimental._config
    with graphs, sizes.patch(use_duck_shape=False):
        yield


def running_blocks(*, is_compiled: bool, is_adapted: bool) -> AbstractContextManager[None]:
    """Return the context in which the blocks of a model run.

    Blocks whose rows have adapters run uncompiled: which layers do more, and for which entries, differs from batch to
    batch, and so would their graphs.
    """
    if not is_compiled:
        return nullcontext()
    return torch.compiler.set_stance("force_eager") if is_adapted else compiler_settings()


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Let the blocks of a model compile when they first run, within `compiler_settings`; return their number."""
    blocks = list(transformer_blocks(model))
    for block in blocks:
        for part in block.modules():
            if isinstance(part, FusedLinear):
                part.fuse()  # fusing at first use, within the graph, would make it compile again
        block.compile(dynamic=True, backend=backend)
    return len(blocks)


def compile_decoder(decoder: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Let the residual blocks of an autoencoder's decoder compile, as `compile_blocks`; return their number.

    Each is norms, activations and a sum around two convolutions, which the compiler joins into few kernels.
    """
    blocks = [module for module in decoder.modules() if type(module).__name__ == "ResnetBlock2D"]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)
