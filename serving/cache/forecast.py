"""Forecast of a model's output at a skipped step, from its outputs at the request's last two computed steps.

`training.cache.schedule.share_followed` determines how far the line through both is followed.
"""

import numpy as np
import torch
from torch import Tensor

from ...training.cache.schedule import share_followed
from .active import Active
from .cells import Floats
from .store import BlockStore


def with_previous(store: BlockStore, output: Tensor, active: Active) -> tuple[Tensor, Tensor]:
    """Return a new output and the previous one, for `BlockStore.put`.

    Args:
        store: store of the model as one block.
        output: tokens [tokens, channels] of the finest level.
        active: cells of these tokens.

    Returns:
        Both outputs, [tokens, channels]; they are equal where there is no previous one.
    """
    if not store.outputs:
        return output, output.clone()
    before, is_known = store.outputs[0], _by_token(store, store.is_known.astype(np.float32))
    if active is not None:
        before, is_known = (each.index_select(0, active.tokens(0)) for each in (before, is_known))
    return output, torch.where(is_known > 0, before, output)


def forecast(store: BlockStore) -> Tensor:
    """Return the outputs in `store`, [tokens, channels], with those of reused cells extrapolated to this step."""
    output, previous = store.outputs
    share = share_followed(store.reuses, store.gaps).astype(np.float32)
    return output.addcmul(output - previous, _by_token(store, share))


def _by_token(store: BlockStore, values: Floats) -> Tensor:
    """Expand values (cells,) to (tokens, 1), by the cell of each token."""
    assert store.tables is not None
    places = store.tables.tokens(0)
    repeated = torch.from_numpy(values).to(places.device)[:, None].expand(places.shape).reshape(-1, 1)
    return torch.empty_like(repeated).index_copy_(0, places.flatten(), repeated)
