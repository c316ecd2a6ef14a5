"""Passes on strips that are recorded and replayed, as segments between the exchanges of ranks."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.serving.core.captured import PATIENCE
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.strip_model import flat
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.patched_models import Row, draw_rows, relative_error, run_plain, stack_conditions
from ...support.random_models import MODELS
from ...support.tape import Tape

EXACT = 1e-5
QUICK = ("sdxl", "flux")
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in MODELS]
)


NUM_PASSES = PATIENCE + 4


@contextmanager
def ranks_of(model: Any, options: ParallelOptions, tape: Tape | None = None) -> Iterator[VirtualRanks]:
    """Yield virtual ranks whose passes a tape records; all must have been recorded at the end."""
    with closing(VirtualRanks(model, options, recorder=tape)) as virtual, virtual.end, torch.inference_mode():
        yield virtual
        failures = [each.recording_failure for each in virtual._models]
    assert not any(failures), failures


def names_of(requests: Sequence[int]) -> list[tuple[int, int]]:
    """Return the names of two rows for each request."""
    return [(request, row) for request in requests for row in (0, 1)]


def learn(virtual: VirtualRanks, rows: Sequence[Row], *requests: int) -> None:
    virtual.ranks.learn(names_of(requests), flat(stack_conditions(rows)))


def predict(virtual: VirtualRanks, rows: Sequence[Row], *requests: int) -> list[Tensor]:
    latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    return list(virtual.ranks.predict(names_of(requests), latents, timesteps))


def at_step(rows: Sequence[Row], step: int) -> list[Row]:
    """Return rows whose latents and timesteps differ from step to step."""
    return [replace(row, latents=(1 + step / 8) * row.latents, timestep=row.timestep * (1 - step / 16)) for row in rows]


@each_family
def test_replayed_strips_equal_plain_diffusers(name: str) -> None:
    model, tape = MODELS[name](), Tape()
    rows = draw_rows(model, [(20, 6)], num_each=2)
    with ranks_of(model, ParallelOptions("virtual:2", cfg_split="off"), tape) as virtual:
        learn(virtual, rows, 0)
        for step in range(NUM_PASSES):
            own = at_step(rows, step)
            assert relative_error(predict(virtual, own, 0), run_plain(model, own)) <= EXACT, step
    assert tape.recorded == 2
    assert tape.played >= 2 * (NUM_PASSES - PATIENCE - 1), "a replay after the recording, and those that follow"


@each_family
def test_replayed_displaced_strips_equal_eager_ones(name: str) -> None:
    """Passes after the warm-up read what the other ranks had in the pass before, be it replayed or not."""
    model, tape = MODELS[name](), Tape()
    rows = draw_rows(model, [(20, 6)], num_each=2)
    options = ParallelOptions("virtual:3", mode="displaced", warmup=1, cfg_split="off")
    with ranks_of(model, options) as eager, ranks_of(model, options, tape) as recorded:
        for virtual in (eager, recorded):
            learn(virtual, rows, 0)
        for step in range(NUM_PASSES + 2):
            own = at_step(rows, step)
            assert relative_error(predict(recorded, own, 0), predict(eager, own, 0)) <= EXACT, step
    assert tape.recorded == 3
    assert tape.played > 3 * 2
