"""Records of templates for edits with one model: their lookup and their recording (InstGenIE section 3.1)."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device

from ...data.edits import EditSpec, TemplateSpec
from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.templates import Keep
from ..conflicts import refuse_conflicts
from ..core.prepared import PreparedRequest
from ..core.record_key import RecordKey
from ..core.stepper import Stepper, Tuning
from ..core.timing import finish_stream
from ..editing.planner import LoadPlanner
from ..editing.records import TemplateRecord, in_files
from ..editing.start import noised_steps
from ..editing.templates import TemplateStore, no_generation
from ..editing.trajectory import Trajectory
from ..families import Family
from ..options import LoadOptions, TemplateOptions
from ..patched.stepper import PatchedStepper
from .identity import ModelIdentity

MASKED_UP_TO = 0.6
"""Largest active share at which a masked pass pays off; above, it is as slow as a whole pass, or slower
(`tests/benchmarks/bench_edit_steps.py`)."""
PASSES_TOGETHER = 4
"""Number of a template's passes in one batch."""


class TemplateReuse:
    """The records of a model's templates: lookup for edits, and the passes that make them.

    Args:
        family: family of the model.
        stepper: the denoise stage, which records if it is the patch engine's.
        scheduler: scheduler of the pipeline.
        identity: identity of the model.
        device: device of the model.
        unbatched: reason why the sampler is not batched; None if it is.
        prepare: prepares a request, see `ServedModel.prepare`.

    Attributes:
        store: records that edits may read. An edit without a record runs as if it had no template. Without a store, an
            edit runs as the exact twin of one that reads a record, with the template's noise.
        masked_up_to: largest active share at which edits read records.
        trajectories: recorded generations of new images, by request id, for later edits of these images.
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
        """Return whether computing only the masked part of an image is faster than computing all of it."""
        return self._family.geometry.active_share(edit) <= self.masked_up_to

    def use_keep(self, keep: Keep) -> None:
        """Set which tensors records hold from now on, for recording and reading, see `data.templates`.

        Raises UsageError: the model's blocks do not support it.
        """
        if self._stepper is not None:
            self._stepper.use_keep(keep)

    def open_store(self, folder: Path, options: TemplateOptions) -> None:
        """Read the records in this folder for edits from now on, with the loads and bounds of these options."""
        loads = options.loads
        self.store = TemplateStore(folder, options.tiers, link_mbps=None if loads is None else loads.link_mbps)

    def plan_loads(self, loads: LoadOptions, target: Tuning) -> None:
        """Measure the parts of passes for the present `keep`, and plan from now on which of them read records.

        Nothing is planned if edits of these sizes read no records.
        """
        if self._stepper is None or self._unbatched is not None:
            return
        if measured := self._stepper.part_times(target, partial(in_files, self._device, target.folder)):
            returns = self._stepper.masked.returns
            self._stepper.planner = LoadPlanner(measured, loads.plan, loads.link_mbps, returns=returns)

    def key_of(self, request: Request) -> RecordKey | None:
        """Return the key of the record of an edit's template; None if there can be none (`Geometry.has_record`).

        There are records on the patch engine only, and only for batched schedulers, because others count their own
        steps and cannot take them in any order.
        """
        if self._stepper is None or self._unbatched is not None or not self._family.geometry.has_record(request):
            return None
        key, scheduler, scale = RecordKey.of(request), self._scheduler, request.guidance_scale
        assert key is not None, "it has a record"
        return replace(
            key,
            is_guided=self._family.uses_guidance(scale),
            guidance_scale=scale if self._family.is_distilled else key.guidance_scale,
            of_model=(
                ("model", self._identity.fingerprint),
                ("dtype", self._identity.dtype),
                # Hashed, because its numbers may be infinite, which JSON cannot represent.
                ("scheduler", (type(scheduler).__name__, sha256(scheduler.to_json_string().encode()).hexdigest())),
                ("keep", self._stepper.masked.keep),
            ),
        )

    def masked_key_of(self, request: Request) -> RecordKey | None:
        """Return `key_of` an edit that reads the record; None if computing all of its image is as fast."""
        edit = request.edit
        is_masked = edit is not None and edit.template is not None and self.is_worth_masking(edit)
        return self.key_of(request) if is_masked else None

    def find(self, request: Request) -> TemplateRecord | None:
        """Return the record for an edit, and start to read it ahead; None, with a warning, if it cannot be read."""
        store, edit = self.store, request.edit
        if store is None or edit is None or (key := self.masked_key_of(request)) is None:
            return None
        try:
            found = store.find(key, self._device)
            if found is None and key.owner:
                found = store.find(replace(key, owner=""), self._device)
        except RunError as error:
            warnings.warn(str(error), stacklevel=4)
            return None
        if found is not None:
            assert self._stepper is not None, "only the patch engine has keys of records"
            found.expect(self._family.geometry.first_step(request) + edit.full_steps, self._stepper.masked.units)
        return found

    def use_template(self, request: Request, folder: Path, on_step: Callable[[int], None]) -> bool:
        """Use the record of an edit's template in this folder, and make it first if necessary.

        If a record cannot be written, there is a warning, and it is used as long as it is in memory.

        Args:
            request: an edit of the template.
            folder: folder of records.
            on_step: called with the number of newly recorded steps.

        Returns:
            Whether it was recorded now.

        Raises:
            UsageError: the engine or the size of the image does not support records, or the image's generation was not
                recorded.
            RunError: as `TemplateStore.add`.
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
        if key.kind == "trajectory":
            raise no_generation(key)
        try:
            self.store.add(key, self.recorded(request, on_step), self._device)
        except OSError as error:
            warnings.warn(f"the record of the template cannot be written to {folder}: {error}", stacklevel=2)
        return True

    def template_passes(self, request: Request) -> list[PreparedRequest]:
        """Return the whole passes over the image of an edit whose record its masked passes read (InstGenIE 3.1).

        There is one for each step, over the image noised to that step, with the template's prompt. They are independent
        of each other.
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
        """Run passes of a template in one batch; return the recorded tensors of each row of each pass.

        Tensors are on the model's device, by operator name. Must be called from the thread of the stepper.
        """
        assert self._stepper is not None, "only the patch engine records"
        found = self._stepper.record(passes)
        finish_stream(self._device)
        return found

    def recorded(
        self, request: Request, on_step: Callable[[int], None] = lambda count: None
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Run a template's passes; yield the recorded tensors of each row of each step.

        Tensors are on the model's device, by operator name. Nothing else may run on the model at the same time.

        Args:
            request: an edit that has a `key_of`.
            on_step: called with the number of newly recorded steps.
        """
        passes = self.template_passes(request)
        for start in range(0, len(passes), PASSES_TOGETHER):
            found = self.record(passes[start : start + PASSES_TOGETHER])
            on_step(len(found))
            yield from found

    def start_trajectory(self, request: Request, folder: Path) -> None:
        """Record the passes of a new image in an empty folder, until `end_trajectory`.

        Raises UsageError: the sampler or the size of the image does not support records.
        """
        self._require_recordable(request)
        self._family.geometry.check_cells(request.resolution, self._identity.name)
        self.trajectories[request.request_id] = Trajectory(folder)

    def end_trajectory(
        self, request: Request, pixels: NDArray[np.uint8], latents: Tensor, store: TemplateStore
    ) -> RecordKey:
        """Add the record of a drawn image to a store; return its key.

        Args:
            request: the request of the image.
            pixels: (height, width, 3), the image.
            latents: (1, channels, h, w), its final latents.
            store: store of the workspace.

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
            refuse_conflicts({"--reuse": "a record of an image", "--use-adapter": "an adapter"})
        if self._unbatched is not None:
            raise UsageError(
                f"what an image's template has shown is reused with batched samplers only: {self._unbatched}"
            )
