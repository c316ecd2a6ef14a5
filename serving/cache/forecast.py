"""What a model would say at a step that a request skips, from what it said at the last two steps that it took.

The line through both is followed the less far the longer it is, and never further than both are apart: after k skipped
steps k * g / (k + g) steps, where g lay between the two. Source: TaylorSeer (arXiv 2503.06923), its first order, on the
output of the model in place of those of its layers. Undamped, as there, forecasts of long gaps are worse than none with
`emoji-3`; fading like this, they are better than none and than plain reuse with both bundled models.
"""

import numpy as np
import torch
from torch import Tensor

from .active import Active
from .cells import Floats
from .store import BlockStore


def with_previous(store: BlockStore, output: Tensor, active: Active) -> tuple[Tensor, Tensor]:
    """A new output and the one before it, for `BlockStore.put`.

    Args:
        store: what is kept of the model as a whole.
        output: tokens [tokens, channels] of the finest level.
        active: whose tokens these are.

    Returns:
        Both [tokens, channels]; they are equal where there was none before.
    """
    if not store.outputs:
        return output, output.clone()
    before, is_known = store.outputs[0], _by_token(store, store.is_known.astype(np.float32))
    if active is not None:
        before, is_known = (each.index_select(0, active.tokens(0)) for each in (before, is_known))
    return output, torch.where(is_known > 0, before, output)


def forecast(store: BlockStore) -> Tensor:
    """[tokens, channels]: the outputs that `store` keeps, those of reused cells carried on to this step."""
    output, previous = store.outputs
    share = store.reuses / (store.reuses + store.gaps)
    return output.addcmul(output - previous, _by_token(store, share.astype(np.float32)))


def _by_token(store: BlockStore, values: Floats) -> Tensor:
    """(tokens, 1): what each token's cell has in (cells,)."""
    assert store.tables is not None
    places = store.tables.tokens(0)
    repeated = torch.from_numpy(values).to(places.device)[:, None].expand(places.shape).reshape(-1, 1)
    return torch.empty_like(repeated).index_copy_(0, places.flatten(), repeated)
