"""Training samples of the cache predictor, read from a block profile."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ...data.errors import UsageError
from ...data.parsing import parse
from ...data.tables.block_facts import WHOLE_MODEL, BlockFacts
from ...data.tables.schemas import BLOCKS
from ...data.tables.streams import count_rows, read_batches, read_facts
from .predictor import FEATURES, features_of

_COLUMNS = (
    *("request_id", "width", "height", "scheduler", "block", "block_index", "step_fraction", "lag"),
    *("input_mse_normalised", "output_mse_normalised"),
)


@dataclass(frozen=True, slots=True)
class BlockSamples:
    """Rows of a profile, in its order.

    Attributes:
        features: (rows, 5) float32, from `features_of`; a row of lag k describes a patch that has used the cached
            output k - 1 times in a row, since the cached tensors stay those of the step that was computed last.
        input_mse: (rows,) float32, normalised.
        output_mse: (rows,) float32, normalised.
        request: (rows,) int64, the request of a row.
        lag: (rows,) int64, steps since the cached tensors were computed.
        num_profiled: number of rows of the profile that these are a sample of.
    """

    features: np.ndarray
    input_mse: np.ndarray
    output_mse: np.ndarray
    request: np.ndarray
    lag: np.ndarray
    num_profiled: int

    def __len__(self) -> int:
        return len(self.request)

    def is_whole(self, facts: BlockFacts) -> np.ndarray:
        """Return which rows describe the whole model as one block, (rows,) bool."""
        return self.features[:, FEATURES.index("block_index")] == len(facts.blocks)

    def where(self, chosen: np.ndarray) -> "BlockSamples":
        """Return the rows that a mask or an index selects."""
        arrays = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        return replace(self, **arrays)


_ARRAYS = ("features", "input_mse", "output_mse", "request", "lag")


def load_samples(
    path: str | Path, *, max_rows: int, seed: int, max_lag: int | None = None
) -> tuple[BlockFacts, BlockSamples]:
    """Read a profile batch by batch; of a large one, a random sample of its rows.

    Half of the sample are rows of the whole model as one block, as most decisions are about it.

    Args:
        path: the table `BLOCKS` that `psctl profile blocks` has written.
        max_rows: expected number of rows of the sample.
        seed: seed of the sample.
        max_lag: rows with larger lags are left out; None keeps all.

    Raises:
        UsageError: there is no row of lag `max_lag`; the table is missing, damaged, of another kind or empty; a number
            in it is NaN, infinite or out of range; or its rows have another scheduler or other blocks than its head.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no block profile {path}; make one with: psctl profile blocks")
    facts = parse(BlockFacts, read_facts(path, BLOCKS), str(path))
    num_profiled = count_rows(path, BLOCKS)
    generator = np.random.default_rng(seed)
    num_whole = num_profiled / (len(facts.blocks) + 1)
    whole_share = min(1.0, max_rows / 2 / max(num_whole, 1))
    share = min(1.0, (max_rows - whole_share * num_whole) / max(num_profiled - num_whole, 1))
    parts: list[BlockSamples] = []
    for batch in read_batches(path, BLOCKS, _COLUMNS):
        _check(batch, facts, path)
        is_whole = batch.column("block_index").to_numpy() == len(facts.blocks)
        chosen = np.flatnonzero(generator.random(batch.num_rows) < np.where(is_whole, whole_share, share))
        part = _samples(batch.take(pa.array(chosen)), num_profiled)
        parts.append(part if max_lag is None else part.where(part.lag <= max_lag))
    if not sum(map(len, parts)):
        raise UsageError(f"{path}: the block profile has no rows; run psctl profile blocks again")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    if max_lag is not None and joined["lag"].max() < max_lag:
        raise UsageError(
            f"{path}: has lags up to {joined['lag'].max()}, but {max_lag} reuses in a row are to be learnt; "
            f"run psctl profile blocks --max-lag {max_lag}"
        )
    samples = BlockSamples(**joined, num_profiled=num_profiled)
    if not samples.is_whole(facts).any():
        raise UsageError(f"{path} has no rows of the whole model; run psctl profile blocks again")
    return facts, samples


def _samples(batch: pa.RecordBatch, num_profiled: int) -> BlockSamples:
    column = {name: batch.column(name).to_numpy() for name in _COLUMNS if name not in ("scheduler", "block")}
    of_tensors = {name: torch.from_numpy(values.copy()) for name, values in column.items()}
    features = features_of(
        of_tensors["input_mse_normalised"],
        of_tensors["block_index"],
        of_tensors["step_fraction"],
        of_tensors["lag"] - 1,
        of_tensors["width"] * of_tensors["height"],
    )
    return BlockSamples(
        features=features.numpy(),
        input_mse=column["input_mse_normalised"],
        output_mse=column["output_mse_normalised"],
        request=column["request_id"],
        lag=column["lag"].astype(np.int64),
        num_profiled=num_profiled,
    )


def _check(batch: pa.RecordBatch, facts: BlockFacts, path: Path) -> None:
    for name, least, most in (
        ("lag", 1, math.inf),
        ("input_mse_normalised", 0, math.inf),
        ("output_mse_normalised", 0, math.inf),
        ("step_fraction", 0, 1),
        ("width", 1, math.inf),
        ("height", 1, math.inf),
    ):
        values = batch.column(name).to_numpy()
        if len(values) and (values.min() < least or values.max() > most):
            worst = values.min() if values.min() < least else values.max()
            allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise UsageError(f"{path}: column {name} holds {worst}, but it must be {allowed}")
    schedulers = set(batch.column("scheduler").unique().to_pylist()) - {facts.scheduler}
    if schedulers:
        raise UsageError(
            f"{path}: has rows of the scheduler {', '.join(sorted(schedulers))}, but its head says {facts.scheduler}; "
            "a predictor is trained for one scheduler"
        )
    index = batch.column("block_index").to_numpy()
    if not len(index):
        return
    blocks = *facts.blocks, WHOLE_MODEL
    if index.min() < 0 or index.max() >= len(blocks):
        worst = index.min() if index.min() < 0 else index.max()
        raise UsageError(f"{path}: column block_index holds {worst}, but there are {len(facts.blocks)} blocks")
    names = np.array(blocks)[index]
    wrong = np.flatnonzero(names != batch.column("block").cast(pa.string()).to_numpy(zero_copy_only=False))
    if len(wrong):
        found = batch.column("block")[int(wrong[0])].as_py()
        raise UsageError(f"{path}: block {index[wrong[0]]} is called {found}, but its head says {names[wrong[0]]}")
