"""How much every block of a model changes from step to step, patch by patch (PatchedServe section 3.2, figure 4).

Requests are served as usual, with a cache that keeps everything and reuses nothing. Whenever a block has run, its input
and output are compared with those of the steps before. Every batch of requests becomes a part of its own, so that an
interrupted profile continues with the next part.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.checks import require_counts
from ...data.errors import RunError, UsageError
from ...data.files import write_json
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.block_facts import BlockFacts
from ...data.tables.schemas import BLOCKS
from ...data.tables.streams import TableWriter
from ...serving.cache.patch_cache import PatchCache, Tokens
from ...serving.cache.rules import NeverReuse
from ...serving.cache.store import LEAST_SQUARE, mean_square
from ...serving.models.served import ServedModel
from ..steps.sides import patched_stepper

TABLE_FILE = "blocks.parquet"
_PARTS, _SETTINGS_FILE = "blocks.parts", "settings.json"


@dataclass(frozen=True, slots=True)
class BlockProfileSettings:
    """How many requests are profiled, how many of them at a time, with how many steps before it each step is compared,
    and the seed of the first request; the others count up.
    """

    num_prompts: int = 48
    batch_size: int = 6
    max_lag: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require_counts({"num prompts": self.num_prompts, "batch size": self.batch_size, "max lag": self.max_lag})


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
    """Profile and write the table `BLOCKS`; returns its path.

    Args:
        model: on the patch engine, with a cache (any mode: its rule is replaced here).
        prompts, resolutions: taken by turns.
        tables: folder of the table.
        settings: how much.
        num_inference_steps, guidance_scale: of every request.
        on_step: called after every denoising step, and as often for each that an earlier run has taken.

    Raises:
        UsageError: unfinished parts of another profile lie in the folder, or a resolution does not suit the cache.
        RunError: a request failed.
    """
    cache = patched_stepper(model).model.cache
    assert cache is not None, "a profile is taken with the cache on"
    cache.rule = NeverReuse()
    facts = model.block_facts(cache.options.patch_size)
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
    done: list[Path] = []
    for number, start in enumerate(range(0, len(requests), settings.batch_size)):
        path = parts / f"{number:05}.parquet"
        done.append(path)
        if path.exists():
            for _ in range(num_inference_steps):
                on_step()
            continue
        with TableWriter(path, BLOCKS, facts.to_json()) as writer:
            batch = requests[start : start + settings.batch_size]
            for columns in _changes(model, cache, batch, settings.max_lag, on_step):
                writer.write(columns)
    target = tables / TABLE_FILE
    with TableWriter(target, BLOCKS, facts.to_json()) as writer:
        for path in done:
            writer.append_from(path)
    for path in (*done, parts / _SETTINGS_FILE):
        path.unlink()
    parts.rmdir()
    return target


def _check_settings(
    parts: Path, facts: BlockFacts, settings: BlockProfileSettings, requests: Sequence[Request]
) -> None:
    """Go on with parts of the same profile only."""
    first = requests[0]
    wanted = {
        **facts.to_json(),
        **asdict(settings),
        "resolutions": sorted({str(request.resolution) for request in requests}),
        "num_inference_steps": first.num_inference_steps,
        "guidance_scale": first.guidance_scale,
        "prompts": [request.prompt for request in requests],
    }
    path = parts / _SETTINGS_FILE
    if path.exists():
        if json.loads(path.read_text()) != wanted:
            raise UsageError(
                f"{parts} holds an unfinished profile with other settings; finish it with them, or delete it"
            )
        return
    parts.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def _changes(
    model: ServedModel, cache: PatchCache, requests: Sequence[Request], max_lag: int, on_step: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Serve a batch from first to last step; the columns of its rows, step by step."""
    prepared = [model.prepare(request) for request in requests]
    stepper = patched_stepper(model)
    history: dict[int, deque[tuple[Tokens, Tokens]]] = {}
    found: list[dict[str, Any]] = []
    scheduler, step = type(model.pipe.scheduler).__name__, 0
    # The engine sorts its batch; keys say which request is which.
    by_key = {each.cache_key: each.request for each in prepared}

    def on_computed(block: int, inputs: Tokens, outputs: Tokens) -> None:
        batch, before = cache.batch, history.setdefault(block, deque(maxlen=max_lag))
        outputs = tuple({id(tensor): tensor for tensor in outputs}.values())
        owners = [by_key[key] for key in batch.request_keys]
        of_requests = np.array([(owner.request_id, *owner.resolution) for owner in owners]).T
        for lag, (old_inputs, old_outputs) in enumerate(reversed(before), 1):
            columns: dict[str, Any] = {
                **dict(zip(("request_id", "width", "height"), of_requests[:, batch.request], strict=True)),
                "scheduler": scheduler,
                "num_steps": batch.num_steps,
                "step": step,
                "step_fraction": step / batch.num_steps,
                "block": cache.names[block],
                "block_index": block,
                "patch": batch.patch,
                "lag": lag,
            }
            for name, new, old in (("input", inputs, old_inputs), ("output", outputs, old_outputs)):
                mse, relative = _mean_squares(cache, new, old)
                columns[f"{name}_mse"], columns[f"{name}_mse_normalised"] = mse, relative
            found.append(columns)
        before.append((inputs, outputs))

    cache.on_computed = on_computed
    try:
        while step < requests[0].num_inference_steps:
            failures = stepper.step(prepared)
            if failures:
                raise RunError(f"request {min(failures)}: {failures[min(failures)]}")
            yield from found
            found.clear()
            step += 1
            on_step()
    finally:
        cache.on_computed = None
        cache.forget()


def _mean_squares(cache: PatchCache, new: Tokens, old: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared difference of each patch, and the same relative to the old mean square: of the larger row each."""
    tables, batch = cache.tables, cache.batch
    mse = mean_square(new, tables, minus=old)
    relative = mse / mean_square(old, tables).clamp_(min=LEAST_SQUARE)
    absolute, relative = mse.cpu().numpy(), relative.cpu().numpy()
    first, last = batch.first_cell, batch.last_cell
    return np.maximum(absolute[first], absolute[last]), np.maximum(relative[first], relative[last])
