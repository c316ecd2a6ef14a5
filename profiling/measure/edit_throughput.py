"""Throughput of edits in edits a minute: over records of templates, exactly, and by other methods, interleaved.

Every way draws the same edits end to end: texts and images are encoded, latents denoised, images decoded and pasted, as
in serving. All edits arrive at once.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.edits import EditSpec, TemplateSpec
from ...data.errors import RunError, UsageError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request, TracedEdit
from ...data.resolution import Resolution
from ...data.statistics import Estimate, ratios_of
from ...data.traces.edits import SHAPES, with_pixels
from ...data.workspace import ModelWorkspace
from ...serving.cache.options import CacheOptions
from ...serving.engine.collectors import InMemory
from ...serving.engine.engine import Engine
from ...serving.families.geometry import Geometry
from ...serving.models.build import as_plain, with_engine
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ...serving.scheduling.policies import get_policy
from ..experiment.experiment import Experiment
from ..experiment.rows import Row, row_of
from ..experiment.turns import turns
from ..report.table import Table
from ..report.words import DASH
from ..steps.sides import patched_stepper

RUN_KIND = "bench-edit"
WAYS = {
    "diffusers": "one by one with diffusers' model, the whole image",
    "exact": "batches of the patch engine, the whole image",
    "accumulated": "the same with the accumulated cache (TeaCache)",
    "crop": "batches of the patch engine, each a crop around its mask, stitched into the image",
    "frozen": "one by one over records of the images, with their statistics of GroupNorm (SIGE)",
    "reuse": "batches of the patch engine over records of the images, the masked cells only",
}
"""Ways that are compared, `reuse` with each of the others."""
CROP_CONTEXT = 0.2
"""Margin on each side of the mask's bounding box, as a share of its length, as crop-and-stitch tools add it."""

Images = dict[int, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class EditBenchSettings:
    """Edits of the benchmark.

    Attributes:
        resolutions: resolutions of the images, assigned in turn; each consists of whole cells.
        mask_ratios: shares of the pixels that the masks cover; each share is measured separately.
        num_inference_steps, guidance_scale: parameters of all edits.
        num_edits: number of edits of each ratio.
        num_templates: number of edited pictures, each in all resolutions; all have a record.
        max_batch_size: maximum number of edits in a batch, for ways that batch.
        repeats: number of rounds; in each round, every way draws all edits.
        threshold: threshold of the accumulated cache.
        seed: seed of all random choices.
    """

    resolutions: tuple[Resolution, ...]
    mask_ratios: tuple[float, ...]
    num_inference_steps: int
    guidance_scale: float
    num_edits: int = 16
    num_templates: int = 4
    max_batch_size: int = 8
    repeats: int = 6
    threshold: float = 0.2
    seed: int = 0

    def requests(self, ratio: float) -> list[Request]:
        """Return the edits of one ratio; their masks are boxes, ellipses and blobs. Raises as `with_pixels`."""
        prompts = load_prompts()
        rng = random.Random(f"{self.seed} {ratio}")
        return [
            with_pixels(
                Request(
                    number,
                    prompts[(self.seed + number) % len(prompts)],
                    self.resolutions[number // self.num_templates % len(self.resolutions)],
                    self.num_inference_steps,
                    self.guidance_scale,
                    self.seed + number,
                    traced=TracedEdit(
                        f"emoji:{number % self.num_templates}",
                        f"{SHAPES[number % len(SHAPES)]}:{rng.randrange(2**32)}",
                        ratio,
                    ),
                )
            )
            for number in range(self.num_edits)
        ]


@dataclass(slots=True)
class _EditMethod:
    """One way of drawing edits, with the seconds of its rounds and the images of the last round."""

    model: ServedModel
    max_batch_size: int
    requests: list[Request]
    seconds: list[float] = field(default_factory=list)
    images: Images = field(default_factory=dict)

    def draw(self) -> None:
        """Draw all edits, timed from the first text to the last image. Raises RunError if one fails."""
        collector = InMemory(keep_images=True)
        engine = Engine(self.model, get_policy("continuous"), max_batch_size=self.max_batch_size, collector=collector)
        for request in self.requests:
            engine.submit(request)
        engine.close()
        start_s = time.perf_counter()
        engine.run()
        self.seconds.append(time.perf_counter() - start_s)
        for record in collector.records:
            if record.status != "completed":
                raise RunError(f"edit {record.request_id} has {record.status}: {record.reason}")
        self.images = {number: np.asarray(image) for number, image in collector.images.items()}


def crop_of(geometry: Geometry, request: Request) -> tuple[Request, tuple[slice, slice]]:
    """Return the edit cropped around its mask, and the crop's place in the image: the mask's bounding box with
    `CROP_CONTEXT`, rounded outwards to whole cells.
    """
    edit = _edit_of(request)
    grain, slices = geometry.cell * geometry.latent_factor, []
    for axis, side in enumerate(edit.mask.shape):
        inside = np.flatnonzero(edit.mask.any(axis=1 - axis))
        context = CROP_CONTEXT * (inside[-1] + 1 - inside[0])
        first = max(0, int(inside[0] - context) // grain * grain)
        last = min(side, -(-int(inside[-1] + 1 + context) // grain) * grain)
        slices.append(slice(first, last))
    place = slices[0], slices[1]
    cropped = EditSpec(np.ascontiguousarray(edit.image[place]), np.ascontiguousarray(edit.mask[place]))
    return replace(request, resolution=cropped.resolution, edit=cropped, traced=None), place


class EditBench:
    """Draws edits in all ways.

    Args:
        model: model on the patch engine without a cache.
        settings: edits of the benchmark.
        workspace: workspace of the model; a temporary folder on its disk holds the records.

    Raises:
        UsageError: a resolution, or the accumulated cache, does not suit the model.
    """

    def __init__(self, model: ServedModel, settings: EditBenchSettings, workspace: ModelWorkspace) -> None:
        geometry = model.family.geometry
        for size in settings.resolutions:
            geometry.check_cells(size, model.name, several=True)
            model.check_resolution(size)
        self.model, self.settings, self._workspace = model, settings, workspace
        cached = CacheOptions("accumulated", threshold=settings.threshold)
        self._models = {
            "diffusers": as_plain(model),
            "accumulated": with_engine(model, replace(model.options, cache=cached)),
            "frozen": with_engine(model, model.options),
        }
        patched_stepper(self._models["frozen"]).masked.freezes_norms = True

    def measure(self, ratio: float, records: Path) -> Row:
        """Measure all ways at one mask ratio and return the row. Missing records are created in `records`.

        Raises:
            UsageError: every mask of this ratio touches so many cells that no record is read.
            RunError: an edit fails.
        """
        settings, geometry = self.settings, self.model.family.geometry
        plain = settings.requests(ratio)
        shares = [geometry.active_share(_edit_of(request)) for request in plain]
        if min(shares) > self.model.reuse.masked_up_to:
            raise UsageError(
                f"masks over {ratio:.0%} of an image touch at least {min(shares):.0%} of its cells, and records are "
                f"read up to {self.model.reuse.masked_up_to:.0%}: give smaller mask ratios or larger resolutions"
            )
        over_records = [_with_template(request) for request in plain]
        cropped, places = zip(*(crop_of(geometry, request) for request in plain), strict=True)
        for model in (self.model, *self._models.values()):
            model.tune(settings.resolutions, self._workspace.tables)
        for request in over_records:
            if self.model.reuse.is_worth_masking(_edit_of(request)):
                for model in (self.model, self._models["frozen"]):
                    model.reuse.use_template(request, records, lambda count: None)
        of_each = {"crop": list(cropped), "frozen": over_records, "reuse": over_records}
        ways = {
            name: _EditMethod(
                self._models.get(name, self.model),
                1 if name in ("diffusers", "frozen") else settings.max_batch_size,
                of_each.get(name, plain),
            )
            for name in WAYS
        }
        # The first round is not timed.
        for number, way in turns(list(ways.values()), settings.repeats):
            way.draw()
            if number < 0:
                way.seconds.clear()
        for number, place in enumerate(places):
            whole = _edit_of(plain[number]).image.copy()
            whole[place] = ways["crop"].images[number]
            ways["crop"].images[number] = whole
        base, ours, twin = ways["diffusers"], ways["reuse"], self._twin(over_records)
        sides = {
            name: {
                "edits_per_minute": 60 * len(plain) / statistics.median(way.seconds),
                "seconds": way.seconds,
                **row_of(
                    {
                        "speedup": Estimate.of_median(ratios_of(base.seconds, way.seconds)),
                        "reuse_gain": Estimate.of_median(ratios_of(way.seconds, ours.seconds)),
                    }
                ),
                "difference": _difference(plain, way.images, twin if name in ("frozen", "reuse") else base.images),
            }
            for name, way in ways.items()
        }
        return {
            "label": f"mask {ratio:g}",
            "mask_ratio": ratio,
            "active_share": statistics.fmean(shares),
            "edits": len(plain),
            "read_a_record": sum(share <= self.model.reuse.masked_up_to for share in shares),
            "sides": sides,
        }

    def _twin(self, requests: list[Request]) -> Images:
        """Return the images of edits with templates when they are computed whole, with the same noise."""
        reuse = self.model.reuse
        store, reuse.store = reuse.store, None
        try:
            way = _EditMethod(self.model, self.settings.max_batch_size, requests)
            way.draw()
        finally:
            reuse.store = store
        return way.images


def _edit_of(request: Request) -> EditSpec:
    assert request.edit is not None, "every request of this benchmark is an edit"
    return request.edit


def _with_template(request: Request) -> Request:
    return replace(request, edit=replace(_edit_of(request), template=TemplateSpec()))


def _difference(requests: Sequence[Request], images: Images, reference: Images) -> float:
    """Return the mean absolute difference of pixels inside the masks, on a scale of 0 to 255."""
    found = []
    for number, request in enumerate(requests):
        one, other = (each[number][_edit_of(request).mask].astype(int) for each in (images, reference))
        found.append(np.abs(one - other).mean())
    return float(np.mean(found))


@contextmanager
def edit_experiment(
    model: ServedModel, settings: EditBenchSettings, workspace: ModelWorkspace
) -> Iterator[Experiment[float]]:
    """Yield the experiment whose cells are mask ratios; its records are deleted with the context.

    Raises:
        UsageError, RunError: as `EditBench` and its `measure`.
        OSError: records cannot be written.
    """
    bench = EditBench(model, settings, workspace)
    facts = run_facts(model).to_json() | {
        "kind": RUN_KIND,
        "settings": asdict(settings) | {"resolutions": list(map(str, settings.resolutions))},
    }
    with tempfile.TemporaryDirectory(dir=workspace.tables.parent, prefix=".edits-") as records:
        yield Experiment(
            RUN_KIND,
            "edit",
            settings.mask_ratios,
            lambda ratio: bench.measure(ratio, Path(records)),
            facts,
            lambda result: [edit_table(result)],
            label="{:.0%}".format,
            unit="mask ratios",
        )
    model.reuse.store = None


def edit_table(result: Mapping[str, Any]) -> Table:
    """Return the ways of every row as a table for display."""
    rows = [
        (
            f"{row['mask_ratio']:.0%}, {row['active_share']:.0%}",
            name,
            f"{side['edits_per_minute']:.1f}",
            _ratio_text(side, "speedup"),
            _ratio_text(side, "reuse_gain"),
            f"{side['difference']:.2f}",
        )
        for row in result["rows"]
        for name, side in row["sides"].items()
    ]
    columns = ("mask, cells", "way", "edits a minute", "vs diffusers", "reuse is as fast", "difference")
    ways = "; ".join(f"{name}: {text}" for name, text in WAYS.items())
    note = (
        f"{ways}. Difference: of pixels inside the masks, of 255, from diffusers' images; of frozen and reuse from the "
        "same edits computed whole with the same noise."
    )
    return Table("", columns, rows, num_words=2, note=note)


def _ratio_text(side: Mapping[str, Any], name: str) -> str:
    low, high = side["intervals"][name] or (None, None)
    interval = DASH if low is None or high is None else f"{low:.2f} to {high:.2f}"
    return f"{side[name]:.2f}x ({interval})"
