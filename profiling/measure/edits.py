"""Latency profile of edits over records, for routers and the simulator: steps and loads, with a line fitted to each.

Batches of edits with random sizes, and masks over a random share of the cells, take real steps in turn with the same
edits computed whole. Records are read from the workspace's disk after they have been dropped from the page cache.
"""

import hashlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.edits import EditSpec, TemplateSpec, active_share
from ...data.errors import UsageError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.statistics import ratios_of
from ...data.templates import Keep
from ...data.traces.edits import drawn_mask
from ...data.work import Work
from ...data.workspace import ModelWorkspace
from ...serving.core.prepared import PreparedRequest
from ...serving.editing.profile import PATTERN, EditProfile, Fit
from ...serving.editing.records import TemplateRecord, read_step
from ...serving.editing.step_latency import terms_of
from ...serving.families.geometry import Geometry
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ..experiment.turns import shuffled
from ..steps.lanes import Lane
from ..steps.sides import StepperSide

RECORDED_STEPS = 8
"""Number of steps in the records; edits take steps from the middle on."""
TIMINGS_PER_VISIT = 2
HELD_OUT_SHARE = 0.2
_SMALL, _LARGE = 0.1, 1.0
"""Active shares of the corners of every size, relative to the share up to which edits are computed in part."""

EditBatch = tuple[tuple[Resolution, float], ...]
"""Size of every edit, and the share of the cells that it should compute."""


@dataclass(frozen=True, slots=True)
class EditProfileSettings:
    """Settings of an edit profile.

    Attributes:
        resolutions: resolutions of the images, each of whole cells.
        combinations: number of batches, including `corners`.
        max_batch_size: number of edits in the largest batch.
        repeats: visits of each batch, with two timings each; also the number of timings of each load.
        seed: seed of all random choices.
        keep: content of the records.

    Raises:
        UsageError: there are too few batches to hold any out.
    """

    resolutions: tuple[Resolution, ...]
    combinations: int = 60
    max_batch_size: int = 8
    repeats: int = 3
    seed: int = 0
    keep: Keep = "all"

    def __post_init__(self) -> None:
        corners = 2 * len(self.resolutions) * min(2, self.max_batch_size)
        least = math.ceil((corners + 2) / (1 - HELD_OUT_SHARE))
        if self.combinations < least:
            raise UsageError(
                f"{self.combinations} batches were asked for, but for {len(self.resolutions)} resolutions at least "
                f"{least} are needed: {corners} are the least and the largest of each, and a fifth is held out"
            )

    def corners(self, up_to: float) -> list[EditBatch]:
        """Return one edit and the largest batch of each size, with small and with large masks."""
        return [
            ((size, share * up_to),) * count
            for size in self.resolutions
            for count in sorted({1, self.max_batch_size})
            for share in (_SMALL, _LARGE)
        ]

    def drawn(self, up_to: float) -> list[EditBatch]:
        """Return the batches, starting with the corners.

        In the others each number of edits occurs about equally often. Masks within a batch are more alike than those of
        different batches; otherwise all large batches would have the same mean.
        """
        rng, batches = random.Random(self.seed), self.corners(up_to)
        num_inner = self.combinations - len(batches)
        middles = [up_to * (place + rng.random()) / num_inner for place in range(num_inner)]
        rng.shuffle(middles)
        for place, middle in enumerate(middles):
            count = 1 + place % self.max_batch_size
            batches.append(
                tuple((rng.choice(self.resolutions), min(up_to, middle * rng.uniform(0.5, 1.5))) for _ in range(count))
            )
        return batches

    def held_out(self, num_all: int, num_corners: int) -> list[int]:
        """Return the places of the fifth of the measurements that is held out; corners, which come first, never are."""
        inner = range(num_corners, num_all)
        return sorted(random.Random(self.seed).sample(inner, math.ceil(HELD_OUT_SHARE * num_all)))


def file_for(model: ServedModel, workspace: ModelWorkspace, keep: Keep) -> Path:
    """Return the path of the profile of a model, an engine and a machine."""
    key = json.dumps([run_facts(model).key(), keep], sort_keys=True)
    return workspace.tables / PATTERN.replace("*", hashlib.sha256(key.encode()).hexdigest()[:8])


def profile_edits(
    model: ServedModel,
    settings: EditProfileSettings,
    workspace: ModelWorkspace,
    *,
    on_start: Callable[[str, int], Callable[[], None]],
) -> EditProfile:
    """Measure steps and loads, and fit lines to them.

    Args:
        model: model on the patch engine without a cache; its strategies are measured first if the workspace has none.
        settings: batches and repeats to measure.
        workspace: workspace of the model; a temporary folder on its disk holds the records.
        on_start: called with the name and number of visits of each part; the function it returns is called after each
            visit.

    Raises:
        UsageError: a resolution, or `settings.keep`, does not suit the model; nothing has run then.
        RunError: a request fails.
        OSError: records cannot be written.
    """
    geometry, up_to = model.family.geometry, model.reuse.masked_up_to
    for size in settings.resolutions:
        geometry.check_cells(size, model.name)
        model.check_resolution(size)
    model.reuse.use_keep(settings.keep)
    batches = settings.drawn(up_to)
    drawn = _Edits(model, settings.seed)
    requests = [[drawn.next(*each) for each in batch] for batch in batches]
    model.tune(settings.resolutions, workspace.tables)
    with tempfile.TemporaryDirectory(dir=workspace.tables.parent, prefix=".edits-") as folder:
        advance = on_start("records", len(settings.resolutions))
        records = {}
        for size in settings.resolutions:
            template = drawn.next(size, up_to)
            model.reuse.use_template(template, Path(folder), lambda count: None)
            key = model.reuse.key_of(template)
            assert key is not None, "use_template refuses what has no record"
            records[size] = Path(folder) / key.digest
            advance()
        steps = _measured_steps(model, requests, settings, on_start)
        loads = _measured_loads(records, settings, on_start)
        largest = max(settings.resolutions, key=lambda size: size.pixels)
        num_bytes = sum(path.stat().st_size for path in _files_of(records[largest]))
        model.reuse.store = None
    held_out = settings.held_out(len(steps), len(settings.corners(up_to)))
    for place, row in enumerate(steps):
        row["is_held_out"] = place in held_out
    held_out_loads = settings.held_out(len(loads), len(settings.resolutions))
    for place, row in enumerate(loads):
        row["is_held_out"] = place in held_out_loads
    terms = [terms_of([Work(*each) for each in row["edits"]]) for row in steps]
    return EditProfile(
        facts=run_facts(model),
        keep=settings.keep,
        up_to=up_to,
        compute=Fit.of(terms, [row["masked_s"] for row in steps], held_out),
        first=Fit.of(terms, [row["first_s"] for row in steps], held_out),
        load=Fit.of([(1.0, row["bytes"]) for row in loads], [row["load_s"] for row in loads], held_out_loads),
        bytes_per_pixel_step=num_bytes / (largest.pixels * RECORDED_STEPS),
        settings=asdict(settings) | {"resolutions": list(map(str, settings.resolutions))},
        steps=tuple(steps),
        loads=tuple(loads),
    )


class _Edits:
    """Creates edits of one picture for each size, with boxes as masks."""

    def __init__(self, model: ServedModel, seed: int) -> None:
        self._model, self._seed, self._count = model, seed, 0
        self._prompts = load_prompts()
        self._images: dict[Resolution, NDArray[np.uint8]] = {}

    def next(self, size: Resolution, share: float) -> Request:
        """Return an edit that computes about this share of the cells. Raises UsageError if even one cell is more than
        the share up to which edits are computed in part.
        """
        number, model, self._count = self._count, self._model, self._count + 1
        rng = np.random.default_rng([self._seed, *size])
        if size not in self._images:
            self._images[size] = rng.integers(0, 256, (size.height, size.width, 3), np.uint8)
        mask = _mask(model.family.geometry, size, share, model.reuse.masked_up_to, self._seed + number)
        return Request(
            number,
            self._prompts[number % len(self._prompts)],
            size,
            RECORDED_STEPS,
            model.defaults.guidance_scale,
            self._seed + number,
            edit=EditSpec(self._images[size], mask, template=TemplateSpec()),
        )


def _mask(geometry: Geometry, size: Resolution, share: float, up_to: float, seed: int) -> NDArray[np.bool_]:
    """Return a box as mask. A box touches more cells than it covers; it shrinks until it does not touch too many."""
    ratio = share
    while ratio * size.pixels >= 1:
        mask = drawn_mask("box", seed, ratio, size)
        if active_share(geometry.mask_weights(mask), geometry.cell) <= up_to:
            return mask
        ratio *= 0.8
    raise UsageError(f"resolution {size} has so few cells that each is more than {up_to:.0%} of the image")


def _measured_steps(
    model: ServedModel,
    requests: Sequence[Sequence[Request]],
    settings: EditProfileSettings,
    on_start: Callable[[str, int], Callable[[], None]],
) -> list[dict[str, Any]]:
    """Return the edits (width, height, active share) of each batch, and median seconds of its steps."""
    lanes = []
    for batch in requests:
        masked = [_with_own_record(model.prepare(request)) for request in batch]
        whole = [replace(each, template=None) for each in masked]
        lanes.append([Lane(StepperSide(model.stepper, side), model.device) for side in (masked, whole)])
    advance = on_start("visits of batches", len(lanes) * settings.repeats)
    # The largest batch warms up the machine, untimed.
    lanes[max(range(len(lanes)), key=lambda place: len(requests[place]))][1].warm_up()
    for number in range(settings.repeats):
        for pair in shuffled(lanes, settings.seed, number):
            for lane in pair:
                lane.warm_up()
            for _ in range(TIMINGS_PER_VISIT):
                for lane in pair:
                    lane.measure()
            advance()
    geometry = model.family.geometry
    found = []
    for batch, (masked, whole) in zip(requests, lanes, strict=True):
        edits = [(*each.resolution, geometry.active_share(each.edit)) for each in batch if each.edit is not None]
        seconds = {
            "masked_s": statistics.median(masked.samples_ms) / 1e3,
            "first_s": statistics.median(masked.first_ms) / 1e3,
            "whole_s": statistics.median(whole.samples_ms) / 1e3,
        }
        ratio = statistics.median(ratios_of(whole.samples_ms, masked.samples_ms))
        found.append({"edits": edits, **seconds, "ratio": ratio})
    return found


def _with_own_record(prepared: PreparedRequest) -> PreparedRequest:
    """Return the request with its own copy of the record object, as for edits of different images."""
    assert isinstance(prepared.template, TemplateRecord), "the template was recorded, and the mask touches few cells"
    return replace(prepared, template=copy(prepared.template))


def _measured_loads(
    records: dict[Resolution, Path], settings: EditProfileSettings, on_start: Callable[[str, int], Callable[[], None]]
) -> list[dict[str, Any]]:
    """Return the bytes and the median load time in seconds of the first n steps of each record, for every n, whole
    records first.
    """
    files = {size: _files_of(record) for size, record in records.items()}
    points = [(size, count) for count in range(RECORDED_STEPS, 0, -1) for size in files]
    samples: dict[tuple[Resolution, int], list[float]] = {point: [] for point in points}
    advance = on_start("loads", len(points) * settings.repeats)
    for number in range(settings.repeats):
        for size, count in shuffled(points, settings.seed, number):
            _drop_from_page_cache(files[size][:count])
            start_s = time.perf_counter()
            for path in files[size][:count]:
                read_step(path)
            samples[size, count].append(time.perf_counter() - start_s)
            advance()
    return [
        {
            "resolution": str(size),
            "steps": count,
            "bytes": sum(path.stat().st_size for path in files[size][:count]),
            "load_s": statistics.median(samples[size, count]),
        }
        for size, count in points
    ]


def _files_of(record: Path) -> list[Path]:
    return sorted(record.glob("step-*.safetensors"))


def _drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Drop files from the operating system's page cache, where it supports that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
