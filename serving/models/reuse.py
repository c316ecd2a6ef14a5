"""What edits of one model read of records of templates, and how these come about (InstGenIE section 3.1)."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device

from ...data.edits import EditSpec, TemplateSpec
from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.templates import Keep
from ..core.prepared import PreparedRequest
from ..core.stepper import Stepper, Tuning
from ..core.timing import finish_stream
from ..editing.keys import TemplateKey, facts_of, no_generation
from ..editing.planner import LoadPlanner
from ..editing.records import TemplateRecord, in_files
from ..editing.start import noised_steps
from ..editing.templates import TemplateStore
from ..editing.trajectory import Trajectory
from ..families import Family
from ..options import LoadOptions, TemplateOptions
from ..patched.stepper import PatchedStepper
from .identity import ModelIdentity

MASKED_UP_TO = 0.6
"""Share of the cells of an image up to which a masked pass is worth it: above it is as slow as a whole one, or slower
(`tests/benchmarks/bench_edit_steps.py`)."""
PASSES_TOGETHER = 4
"""Of a template, in a batch."""


class TemplateReuse:
    """The records of a model's templates: which one suits an edit, and the passes that make it.

    Args:
        family: of the model.
        stepper: denoises, and records where it is the patch engine's.
        scheduler: of the pipeline.
        identity: of the model.
        device: of the model.
        unbatched: why no sampler of the model is batched; None: one is.
        prepare: begins a request, see `ServedModel.prepare`.

    Attributes:
        store: records that edits may read. Where there is no record for an edit, it is as it were without a template;
            without this store it is the twin of the one that reads, with the template's noise.
        masked_up_to: share of an image's cells up to which they do.
        trajectories: by id, of new images that shall leave a record for edits of them.
    """

    def __init__(
        self,
        family: Family,
        stepper: Stepper,
        scheduler: Any,
        identity: ModelIdentity,
        device: device,
        unbatched: str | None,
        prepare: Callable[[Request], PreparedRequest],
    ) -> None:
        self._family, self._scheduler, self._identity, self._device = family, scheduler, identity, device
        self._unbatched, self._prepare = unbatched, prepare
        self._stepper = stepper if isinstance(stepper, PatchedStepper) else None
        self.store: TemplateStore | None = None
        self.masked_up_to = MASKED_UP_TO
        self.trajectories: dict[int, Trajectory] = {}

    def is_worth_masking(self, edit: EditSpec) -> bool:
        """Whether computing the masked part of an image by itself is faster than all of it."""
        return self._family.geometry.active_share(edit) <= self.masked_up_to

    def use_keep(self, keep: Keep) -> None:
        """Say what records hold that are made and read from now on, see `data.templates`.

        Raises UsageError: the model's blocks are not known so well.
        """
        if self._stepper is not None:
            self._stepper.use_keep(keep)

    def open_store(self, folder: Path, options: TemplateOptions) -> None:
        """Let edits read the records in this folder from now on, as options say how, and how much they may take."""
        loads = options.loads
        self.store = TemplateStore(folder, options.tiers, link_mbps=None if loads is None else loads.link_mbps)

    def plan_loads(self, loads: LoadOptions, target: Tuning) -> None:
        """Let plans decide from now on which parts of passes read records of what `use_keep` says; what parts take is
        measured before. Where edits of these sizes read no record, nothing is planned.
        """
        if self._stepper is None or self._unbatched is not None:
            return
        if measured := self._stepper.part_times(target, partial(in_files, self._device, target.folder)):
            returns = self._stepper.masked.returns
            self._stepper.planner = LoadPlanner(measured, loads.plan, loads.link_mbps, returns=returns)

    def key_of(self, request: Request) -> TemplateKey | None:
        """Which record an edit can read; None: none, as it has no template, its size has parts of cells, or it starts
        at the first step from an image that is noised only in part, which records do not have; or as a scheduler of its
        own counts its steps, which cannot be taken in any order. Records are of the model without adapters.
        """
        edit, geometry = request.edit, self._family.geometry
        if edit is None or edit.template is None or request.adapters:
            return None
        if self._stepper is None or self._unbatched is not None:
            return None
        if any(side % geometry.cell for side in geometry.latent_size(request.resolution)):
            return None
        if edit.strength < 1 and geometry.first_step(request) == 0:
            return None
        scheduler, facts = self._scheduler, facts_of(request, self._stepper.masked.keep)
        if self._family.is_distilled:
            facts["guidance"] = request.guidance_scale
        return TemplateKey({
            "model": self._identity.fingerprint,
            "dtype": self._identity.dtype,
            # Its numbers may be infinite, which JSON does not know.
            "scheduler": [type(scheduler).__name__, hashlib.sha256(scheduler.to_json_string().encode()).hexdigest()],
            "rows": 2 if self._family.uses_guidance(request.guidance_scale) else 1,
            **facts,
        })  # fmt: skip

    def find(self, request: Request) -> TemplateRecord | None:
        """The record that an edit is to read, soon. One that cannot be read is warned of, and as good as none."""
        edit = request.edit
        if self.store is None or edit is None or edit.template is None or not self.is_worth_masking(edit):
            return None
        key = self.key_of(request)
        try:
            found = None if key is None else self.store.find(key, self._device)
            if found is None and key is not None and key.owner:
                found = self.store.find(key.of_everybody, self._device)
        except RunError as error:
            warnings.warn(str(error), stacklevel=4)
            return None
        if found is not None:
            assert self._stepper is not None, "only the patch engine has keys of records"
            found.expect(self._family.geometry.first_step(request) + edit.full_steps, self._stepper.masked.units)
        return found

    def use_template(self, request: Request, folder: Path, on_step: Callable[[int], None]) -> bool:
        """Let edits of a template read its record in this folder, which is made if it is not there.

        Args:
            request: an edit of the template.
            folder: of records.
            on_step: called with how many steps of it are recorded more.

        Returns:
            Whether it was recorded now.

        Raises:
            UsageError: records do not suit the engine, or the size of the image; or there is none of its generation.
            RunError: as `TemplateStore.add`. Where a record cannot be written, there is a warning, and it is used as
                long as it is in memory.
        """
        self._require_recordable(request)
        self.store = self.store or TemplateStore(folder)
        edit, geometry = request.edit, self._family.geometry
        if edit is not None and edit.strength < 1 and geometry.first_step(request) == 0:
            raise UsageError(
                f"strength is {edit.strength:g}, which leaves out none of {request.num_inference_steps} steps: to "
                "reuse what an image's template has shown, it must be 1 or less than that"
            )
        key = self.key_of(request)
        if key is None:
            raise UsageError(
                f"resolution {request.resolution}: to reuse what an image's template has shown, width and height must "
                f"be multiples of {geometry.cell * geometry.latent_factor} pixels for {self._identity.name}, on the "
                "patch engine"
            )
        if self.store.find(key, self._device) is not None:
            return False
        if edit is not None and edit.template is not None and edit.template.kind == "trajectory":
            raise no_generation(request, key.about["keep"])
        try:
            self.store.add(key, self.recorded(request, on_step), self._device)
        except OSError as error:
            warnings.warn(f"the record of the template cannot be written to {folder}: {error}", stacklevel=2)
        return True

    def template_passes(self, request: Request) -> list[PreparedRequest]:
        """The whole passes over the image of an edit that its masked ones will read (InstGenIE section 3.1): at each
        step over the image as it is noised there, with the template's prompt. They are independent of each other.
        """
        edit = request.edit
        assert edit is not None
        assert edit.template is not None
        whole = replace(
            request,
            prompt=edit.template.prompt,
            negative_prompt=None,
            edit=replace(edit, mask=np.ones_like(edit.mask), strength=1.0, template=None),
            seed=edit.template.seed,
            cache=False,
        )
        passes = noised_steps(self._prepare(whole))
        finish_stream(self._device)
        return passes

    def record(self, passes: Sequence[PreparedRequest]) -> list[list[dict[str, Tensor]]]:
        """Run passes of a template in one batch: for each, of each of its rows, what operators have seen, by name, on
        the model's device. To be called where the stepper is.
        """
        assert self._stepper is not None, "only the patch engine records"
        found = self._stepper.record(passes)
        finish_stream(self._device)
        return found

    def recorded(
        self, request: Request, on_step: Callable[[int], None] = lambda count: None
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Run a template's passes: of each step and row what operators have seen, by name, on the model's device.
        Nothing else may run on the model meanwhile.

        Args:
            request: that has a `key_of`.
            on_step: called with how many steps are done more.
        """
        passes = self.template_passes(request)
        for start in range(0, len(passes), PASSES_TOGETHER):
            found = self.record(passes[start : start + PASSES_TOGETHER])
            on_step(len(found))
            yield from found

    def start_trajectory(self, request: Request, folder: Path) -> None:
        """Have the passes of a new image recorded; an empty folder holds them until `end_trajectory`.

        Raises UsageError: records do not suit the sampler, or the size of the image.
        """
        self._require_recordable(request)
        self._family.geometry.check_cells(request.resolution, self._identity.name)
        self.trajectories[request.request_id] = Trajectory(folder)

    def end_trajectory(
        self, request: Request, pixels: NDArray[np.uint8], latents: Tensor, store: TemplateStore
    ) -> TemplateKey:
        """Take over the record of an image that was drawn; returns its key.

        Args:
            request: what was drawn.
            pixels: (height, width, 3), what came of it.
            latents: (1, channels, h, w), what was decoded.
            store: of the workspace.

        Raises:
            RunError, OSError: as `TemplateStore.add`.
        """
        everywhere = np.ones(pixels.shape[:2], dtype=bool)
        edit = EditSpec(pixels, everywhere, template=TemplateSpec(kind="trajectory"))
        key = self.key_of(replace(request, edit=edit))
        assert key is not None, "start_trajectory has refused what has none"
        store.add(key, self.trajectories.pop(request.request_id).steps(latents), self._device)
        return key

    def _require_recordable(self, request: Request) -> None:
        if request.adapters:
            raise UsageError("what an image's template has shown is of the model without adapters: leave them out")
        if self._unbatched is not None:
            raise UsageError(
                f"what an image's template has shown is reused with batched samplers only: {self._unbatched}"
            )
