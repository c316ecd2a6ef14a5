"""A batch of one resolution for the unmodified model: the strongest form of plain diffusers, for every comparison.

The text of all requests is joined once per batch, guidance and sampler take one operation each for all requests, and
the model runs in the faster memory format. Both engines and `psctl bench steps` use it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.adapters import RowAdapters, adapters_of_rows
from ..core.captured import PassBatch
from ..core.controls import NetRows, names_of, net_rows
from ..core.denoise_batch import DenoiseBatch, Predict
from ..core.prepared import PreparedRequest
from ..layout.packing import WholeImages
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler
from .formats import PlainModels


def plain_batch(
    models: PlainModels,
    conditions: dict[str, Any],
    requests: Sequence[PreparedRequest],
    sampler: BatchedSampler | PerRequestSampler,
) -> DenoiseBatch:
    """Batch requests of one shape (`PreparedRequest.shape`); `conditions` are arguments of the model's forward, for all
    their rows.
    """
    if requests[0].references:
        conditions = conditions | {"references": _references_of(requests)}
    if any(each.controls for each in requests):
        conditions = conditions | {"controls": _net_rows(models, requests, conditions)}
    # Recorded passes do the same work whichever row has an adapter.
    rows = RowAdapters.of(adapters_of_rows(requests), models.device, for_all=models.captured is not None)
    passes = PassBatch(is_complete=True)

    def predict(latents: Tensor, timesteps: Tensor) -> Tensor:
        return models.predict(passes, latents, timesteps, conditions, rows)

    return whole_batch(predict, requests, sampler, models.dtype)


def _references_of(requests: Sequence[PreparedRequest]) -> tuple[Tensor, ...]:
    """Return the latents of each reference, for all rows of the requests."""
    rows = [[each.expand(own.num_rows, -1, -1, -1) for each in own.references] for own in requests]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def _net_rows(
    models: PlainModels, requests: Sequence[PreparedRequest], conditions: dict[str, Any]
) -> dict[str, NetRows]:
    """Return the rows of each net that the requests of a batch name; in recorded passes, all of them."""
    whole = WholeImages(sum(each.num_rows for each in requests), models.device)

    def rows_of(name: str) -> NetRows:
        levels = len(models.nets[name].down_blocks)
        return net_rows(
            name,
            requests,
            whole,
            conditions,
            for_all=models.captured is not None,
            part_of=lambda rows: WholeImages(len(rows), models.device),
            entries_of=lambda rows: (rows,) * levels,
        )

    return {name: rows_of(name) for name in names_of(requests)}


def whole_batch(
    predict: Predict,
    requests: Sequence[PreparedRequest],
    sampler: BatchedSampler | PerRequestSampler,
    dtype: torch.dtype,
) -> DenoiseBatch:
    """Batch requests of one resolution for any function that predicts whole images, in `dtype`."""
    device = requests[0].latents.device
    rows = WholeImages(sum(prepared.num_rows for prepared in requests), device)
    return DenoiseBatch(requests, WholeImages(len(requests), device), rows, sampler, predict, dtype=dtype)
