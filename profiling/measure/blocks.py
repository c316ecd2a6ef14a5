"""Change of every block of a model from step to step, patch by patch (PatchedServe section 3.2, figure 4).

Requests are served as usual, with a cache that reuses nothing. After a block has run, its input and output are compared
with those of earlier steps, using the same samples of their values that serving compares. The output of the whole model
is compared with what serving would forecast from earlier steps (`share_followed`). A long profile compares a random
share of the patches, drawn anew at every step. Every batch of requests is written as a separate part, so that an
interrupted profile continues with the next part.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.checks import require_counts
from ...data.errors import RunError, UsageError
from ...data.files import write_json
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.block_facts import WHOLE_MODEL, BlockFacts
from ...data.tables.schemas import BLOCKS
from ...data.tables.streams import TableWriter
from ...serving.cache.cells import Floats, Integers
from ...serving.cache.patch_cache import PatchCache, Tokens
from ...serving.cache.rules import NeverReuse
from ...serving.cache.store import MIN_SQUARE, sampled
from ...serving.models.served import ServedModel
from ...training.cache.schedule import share_followed
from ..steps.sides import patched_stepper

TABLE_FILE = "blocks.parquet"
_PARTS, _SETTINGS_FILE = "blocks.parts", "settings.json"


@dataclass(frozen=True, slots=True)
class BlockProfileSettings:
    """Extent of a block profile.

    Attributes:
        num_prompts, batch_size: number of requests, and number of requests served together.
        max_lag: number of earlier steps with which each step is compared.
        max_rows: approximate maximum number of rows in the table; determines the probability with which a patch is
            compared at a step. A row takes about 23 bytes.
        seed: seed of the first request, from which the others count up, and of the choice of patches.
    """

    num_prompts: int = 48
    batch_size: int = 6
    max_lag: int = 8
    max_rows: int = 4_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        require_counts(
            {
                "num prompts": self.num_prompts,
                "batch size": self.batch_size,
                "max lag": self.max_lag,
                "max rows": self.max_rows,
            }
        )


def run_block_profile(
    model: ServedModel,
    prompts: Sequence[str],
    resolutions: Sequence[Resolution],
    tables: Path,
    settings: BlockProfileSettings,
    *,
    num_inference_steps: int,
    guidance_scale: float,
    on_step: Callable[[], None] = lambda: None,
) -> Path:
    """Profile the blocks, write the table `BLOCKS`, and return its path.

    Args:
        model: model on the patch engine, with a cache of any mode; its rule is replaced.
        prompts, resolutions: assigned to requests in turn.
        tables: folder of the table.
        settings: extent of the profile.
        num_inference_steps, guidance_scale: parameters of every request.
        on_step: called after every denoising step, and once for every step that an earlier run has taken.

    Raises:
        UsageError: the folder holds unfinished parts of another profile, or a resolution does not suit the cache.
        RunError: a request failed.
    """
    cache = patched_stepper(model).model.cache
    assert cache is not None, "a profile is taken with the cache on"
    cache.rule = NeverReuse()
    for store in cache.stores:
        store.compares = False
    facts = model.block_facts(cache.patch_size)
    requests = [
        Request(
            number,
            prompts[number % len(prompts)],
            resolutions[number % len(resolutions)],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=settings.seed + number,
        )
        for number in range(settings.num_prompts)
    ]
    for request in requests:
        model.check_request(request)
    parts = tables / _PARTS
    _check_settings(parts, facts, settings, requests)
    share = min(1.0, settings.max_rows / _num_rows(model, facts, requests, settings.max_lag))
    done: list[Path] = []
    for number, start in enumerate(range(0, len(requests), settings.batch_size)):
        path = parts / f"{number:05}.parquet"
        done.append(path)
        if path.exists():
            for _ in range(num_inference_steps):
                on_step()
            continue
        generator = np.random.default_rng((settings.seed, number))

        def choose(num_patches: int, generator: np.random.Generator = generator) -> Integers:
            return np.flatnonzero(generator.random(num_patches) < share)

        with TableWriter(path, BLOCKS, facts.to_json()) as writer:
            batch = requests[start : start + settings.batch_size]
            for columns in _changes(model, cache, batch, settings.max_lag, choose, on_step):
                writer.write(columns)
    target = tables / TABLE_FILE
    with TableWriter(target, BLOCKS, facts.to_json()) as writer:
        for path in done:
            writer.append_from(path)
    for path in (*done, parts / _SETTINGS_FILE):
        path.unlink()
    parts.rmdir()
    return target


def _num_rows(model: ServedModel, facts: BlockFacts, requests: Sequence[Request], max_lag: int) -> int:
    """Return the number of rows of the table if all patches were compared."""
    sizes = [model.family.geometry.latent_size(request.resolution) for request in requests]
    steps = requests[0].num_inference_steps
    pairs = sum(max(steps - lag, 0) for lag in range(1, max_lag + 1))
    return pairs * (len(facts.blocks) + 1) * sum(height * width // facts.patch_size**2 for height, width in sizes)


def _check_settings(
    parts: Path, facts: BlockFacts, settings: BlockProfileSettings, requests: Sequence[Request]
) -> None:
    """Raise UsageError if the folder holds parts of a profile with other settings; otherwise record the settings."""
    first = requests[0]
    wanted = {
        **facts.to_json(),
        "blocks": list(facts.blocks),
        **asdict(settings),
        "resolutions": sorted({str(request.resolution) for request in requests}),
        "num_inference_steps": first.num_inference_steps,
        "guidance_scale": first.guidance_scale,
        "prompts": [request.prompt for request in requests],
    }
    path = parts / _SETTINGS_FILE
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != wanted:
            raise UsageError(
                f"{parts} holds an unfinished profile with other settings; finish it with them, or delete it"
            )
        return
    parts.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def _changes(
    model: ServedModel,
    cache: PatchCache,
    requests: Sequence[Request],
    max_lag: int,
    choose: Callable[[int], Integers],
    on_step: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Serve a batch from the first to the last step and yield the columns of its rows, step by step.

    `choose` returns, for a number of patches, the indices of those that are compared at a step.
    """
    prepared = [model.prepare(request) for request in requests]
    stepper = patched_stepper(model)
    history: dict[tuple[str, int], deque[tuple[Tensor, Tensor]]] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    found: list[dict[str, Any]] = []
    scheduler, step = type(model.pipe.scheduler).__name__, 0
    chosen = np.empty(0, np.int64)
    first_changes: tuple[Floats, Floats] | None = None
    # The engine sorts its batch; keys identify the requests.
    by_key = {each.key: each.request for each in prepared}

    def sample(tensors: Tokens) -> Tensor:
        """Return (cells, sampled values); a tensor that several blocks share is sampled once in a step."""
        for tensor in tensors:
            if tensor.data_ptr() not in seen:
                seen[tensor.data_ptr()] = tensor, sampled(tensor, cache.tables)
        return torch.cat([seen[tensor.data_ptr()][1] for tensor in tensors], 1)

    def changes(kind: str, block: int, tensors: Tokens, *, is_forecast: bool = False) -> tuple[Floats, Floats]:
        """Return the mean squared change of the chosen patches by lag, absolute and relative to the old mean square.

        A guided request counts with the larger of its two rows. With `is_forecast`, the comparison is not with the old
        values but with a forecast from them and the values the same lag before them, where these exist.
        """
        before, new = history.setdefault((kind, block), deque(maxlen=(1 + is_forecast) * max_lag)), sample(tensors)
        batch = cache.batch
        cells = np.stack([batch.first_cell[chosen], batch.last_cell[chosen]])
        places = torch.from_numpy(cells.flatten()).to(new.device)
        own, pairs = new.index_select(0, places), []
        kept = list(reversed(before))
        for place, (old, square) in enumerate(kept[:max_lag]):
            told = old.index_select(0, places)
            if is_forecast and (older := 2 * place + 1) < len(kept):
                share = float(share_followed(place + 1, place + 1))
                told.add_(told - kept[older][0].index_select(0, places), alpha=share)
            mse = _mean_square(told.sub_(own))
            pairs.append(torch.stack([mse, mse / square.index_select(0, places)]))
        before.append((new, _mean_square(new).clamp_(min=MIN_SQUARE)))
        if not pairs:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        larger = torch.stack(pairs, 1).view(2, len(pairs), *cells.shape).amax(2)
        absolute, relative = larger.flatten(1).cpu().numpy()
        return absolute, relative

    def on_computed(block: int, inputs: Tokens, outputs: Tokens) -> None:
        nonlocal chosen, first_changes
        batch = cache.batch
        if block == 0:
            chosen = choose(batch.num_patches)
        input_changes = changes("input", block, inputs)
        # A tensor that occurs twice in the output counts once.
        outputs = tuple({id(each): each for each in outputs}.values())
        output_changes = changes("output", block, outputs)
        owners = [by_key[key] for key in batch.request_keys]
        of_requests = np.array([(owner.request_id, *owner.resolution) for owner in owners]).T
        lags = len(input_changes[0]) // max(len(chosen), 1)
        changes_of = {block: (cache.names[block], *input_changes, *output_changes)}
        if block == 0:
            first_changes = input_changes
        if block == len(cache.names) - 1 and first_changes is not None:
            left = changes("model", block, outputs, is_forecast=True)
            changes_of[block + 1] = (WHOLE_MODEL, *first_changes, *left)
        of_patches = {
            **dict(zip(("request_id", "width", "height"), of_requests[:, batch.request[chosen]], strict=True)),
            "num_steps": batch.num_steps[chosen],
            "step_fraction": step / batch.num_steps[chosen],
            "patch": batch.patch[chosen],
        }
        for index, (name, input_mse, input_relative, output_mse, output_relative) in changes_of.items():
            found.append(
                {column: np.tile(values, lags) for column, values in of_patches.items()}
                | {
                    "scheduler": scheduler,
                    "step": step,
                    "block": name,
                    "block_index": index,
                    "lag": np.repeat(np.arange(1, lags + 1), len(chosen)),
                    "input_mse": input_mse,
                    "output_mse": output_mse,
                    "input_mse_normalised": input_relative,
                    "output_mse_normalised": output_relative,
                }
            )

    cache.on_computed = on_computed
    try:
        while step < requests[0].num_inference_steps:
            failures = stepper.step(prepared)
            if failures:
                raise RunError(f"request {min(failures)}: {failures[min(failures)]}")
            yield from found
            found.clear()
            seen.clear()
            step += 1
            on_step()
    finally:
        cache.on_computed = None
        cache.clear()


def _mean_square(values: Tensor) -> Tensor:
    """(cells, values) -> (cells,) float32."""
    return (values * values).sum(1, dtype=torch.float32).div_(values.shape[1])
