"""What a model would say at a step that a request skips, from what it said at the last two steps that it took.

`training.cache.schedule.share_followed` says how far the line through both is followed.
"""

import numpy as np
import torch
from torch import Tensor

from ...training.cache.schedule import share_followed
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
    share = share_followed(store.reuses, store.gaps).astype(np.float32)
    return output.addcmul(output - previous, _by_token(store, share))


def _by_token(store: BlockStore, values: Floats) -> Tensor:
    """(tokens, 1): what each token's cell has in (cells,)."""
    assert store.tables is not None
    places = store.tables.tokens(0)
    repeated = torch.from_numpy(values).to(places.device)[:, None].expand(places.shape).reshape(-1, 1)
    return torch.empty_like(repeated).index_copy_(0, places.flatten(), repeated)
