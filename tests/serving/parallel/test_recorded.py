"""Passes on strips that are recorded and replayed, as segments between the exchanges of ranks."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.serving.core.captured import PATIENCE
from patchedserve.serving.parallel.group import GroupError
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["flux", *(name for name in MODELS if name != "flux")])
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


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl", "sd3", "z-image"])
def test_requests_of_equal_size_share_a_recording(name: str) -> None:
    """Text that is the same in all calls of a request is copied when other requests take its place."""
    model, tape = MODELS[name](), Tape()
    first = draw_rows(model, [(20, 6)], num_each=2)
    # Texts of other values and of the same length.
    second = [replace(row, conditions=_changed(row.conditions)) for row in first]
    with ranks_of(model, ParallelOptions("virtual:2", cfg_split="off"), tape) as virtual:
        for request, rows in enumerate((first, second, first)):
            learn(virtual, rows, request)
            for step in range(NUM_PASSES if request == 0 else 2):
                own = at_step(rows, step)
                assert relative_error(predict(virtual, own, request), run_plain(model, own)) <= EXACT, (request, step)
    assert tape.recorded == 2
    assert tape.played >= 2 * (NUM_PASSES - PATIENCE - 1 + 2), "the second pass of each later request is replayed"


def _changed(conditions: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _changed(value) if isinstance(value, dict) else 0.5 * value if value.is_floating_point() else value
        for name, value in conditions.items()
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_displaced_requests_are_joined_by_others() -> None:
    """Passes with rows that wait beside displaced ones are recorded apart from those without."""
    model, tape = MODELS["sdxl"](), Tape()
    rows = draw_rows(model, [(20, 6)] * 2, num_each=2)
    options = ParallelOptions("virtual:2", mode="displaced", warmup=6, cfg_split="off")
    with ranks_of(model, options) as eager, ranks_of(model, options, tape) as recorded:
        for virtual in (eager, recorded):
            learn(virtual, rows[:2], 0)
        for step in range(18):
            if step == 9:
                for virtual in (eager, recorded):
                    learn(virtual, rows[2:], 1)
            active, requests = (rows[:2], (0,)) if step < 9 else (rows, (0, 1))
            own = at_step(active, step % 8)
            assert relative_error(predict(recorded, own, *requests), predict(eager, own, *requests)) <= EXACT, step
    assert tape.recorded == 2 * 2, "the first request while it warms up, and both while the second does"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_have_recovered_replay_their_passes() -> None:
    model, tape = MODELS["sdxl"](), Tape()
    rows = draw_rows(model, [(20, 6)], num_each=2)
    with ranks_of(model, ParallelOptions("virtual:2", cfg_split="off"), tape) as virtual:
        for request in range(2):
            learn(virtual, rows, request)
            for step in range(NUM_PASSES):
                own = at_step(rows, step)
                assert relative_error(predict(virtual, own, request), run_plain(model, own)) <= EXACT, step
            virtual.recover(GroupError("a test"))
    assert tape.recorded == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_whole_images_of_ranks_are_replayed() -> None:
    model, tape = MODELS["sdxl"](), Tape()
    rows = draw_rows(model, [(8, 8), (16, 8)], num_each=2)
    with ranks_of(model, ParallelOptions("virtual:2", from_pixels="4096"), tape) as virtual:
        learn(virtual, rows, 0, 1)
        for step in range(NUM_PASSES):
            own = at_step(rows, step)
            timesteps = torch.tensor([row.timestep for row in own])
            found = virtual.ranks.draw(names_of((0, 1)), [row.latents for row in own], timesteps)
            assert relative_error(found, run_plain(model, own)) <= EXACT, step
    assert tape.recorded == 2
    assert tape.played >= 2 * (NUM_PASSES - PATIENCE - 1)
