"""A cascade that serves a trace on the wall clock, in worker processes: files of the workers, and the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....data.errors import RunError, UsageError
from ....data.files import sha256_of
from ....data.requests import Request
from ....data.workspace import Workspace
from ...cascade.fleet import cascade_fleet
from ...cascade.legs import LEGS, Leg, LegSpec
from ...cascade.profile import CascadeProfile
from ...cascade.worker import WorkerSettings, image_file
from ..machine import cpu_name
from .deployment import CascadeDeployment, CascadeParts, CascadeRun


@dataclass(frozen=True, slots=True)
class CascadeServed:
    """Outcome of a served trace: the run, whether Ctrl-C ended it, and the error that ended it, if any."""

    run: CascadeRun
    was_interrupted: bool
    error: RunError | None = None


@dataclass(frozen=True, slots=True)
class CascadeFiles:
    """Files and settings that workers load.

    Attributes:
        specs: specifications of both models.
        workspace: workspace for the measurements of engines at their start.
        device, dtype: device and number format of both models.
        discriminator: file of the discriminator that scores light images.
    """

    specs: Mapping[Leg, LegSpec]
    workspace: Workspace
    device: str
    dtype: str
    discriminator: Path

    def require_profiled(self, profile: CascadeProfile) -> None:
        """Raise UsageError unless a profile is of these models' files, this processor and this discriminator. Plans
        based on the times of others would be wrong.
        """
        from ...models.loading import fingerprint_of
        from ...models.placement import resolve_device

        is_cpu = resolve_device(self.device).type == "cpu"
        for leg in LEGS:
            known = profile.legs[leg].facts
            here = replace(known, fingerprint=fingerprint_of(self.specs[leg].model))
            if is_cpu:
                here = replace(here, device_name=cpu_name())
            if (difference := known.difference(here)) is not None:
                raise UsageError(f"the profile of the {leg} model {difference}: psctl profile cascade measures it anew")
        if sha256_of(self.discriminator) != profile.discriminator:
            raise UsageError(f"{self.discriminator} is another discriminator than the profile was measured with")

    def worker(self, parts: CascadeParts, image_dir: Path) -> WorkerSettings:
        """Return the settings of a worker that writes images to `image_dir`."""
        from ...models.placement import resolve_device

        resolved = str(resolve_device(self.device))
        return WorkerSettings(
            {leg: self.specs[leg].model for leg in LEGS},
            {leg: each.for_workers() for leg, each in parts.models.items()},
            self.device,
            self.dtype,
            self.discriminator,
            {leg: self.workspace.for_model(self.specs[leg].model, resolved).tables for leg in LEGS},
            image_dir,
        )


def serve_cascade(
    deployment: CascadeDeployment,
    requests: Sequence[Request],
    files: CascadeFiles,
    *,
    image_dir: Path,
    on_note: Callable[[str], None],
    on_start: Callable[[], Callable[[], None]],
) -> CascadeServed:
    """Serve a trace whose requests have their SLOs. Light images that a heavy image replaces are deleted.

    Args:
        deployment: configuration of the cascade, whose workers are processes.
        requests: requests in order of arrival.
        files: files that workers load.
        image_dir: folder for the images.
        on_note: called with a line about each event of a worker.
        on_start: called when the workers are ready; returns the function to call for each ended request.

    Raises:
        UsageError: as `CascadeDeployment.run`.
        RunError: workers cannot load.
        KeyboardInterrupt: on Ctrl-C before the first request.
    """
    parts = deployment.parts(requests)
    template = files.worker(parts, image_dir)
    ended: list[Callable[[], None]] = []
    dispatcher = parts.dispatcher(deployment, on_end=lambda record: ended[0]() if ended else None)
    fleet = cascade_fleet(template, deployment.num_workers, dispatcher, on_note=on_note)
    error: RunError | None = None
    try:
        fleet.run(requests, lambda: ended.append(on_start()))
    except RunError as failure:
        if not dispatcher.result.records:
            raise
        error = failure
    result = dispatcher.result
    result.records = sorted(result.records, key=lambda record: record.request_id)
    if not result.records:
        # Ctrl-C came before the first request.
        raise KeyboardInterrupt
    served_by = result.served_by()
    for row in result.legs:
        if row.is_deferred and served_by.get(row.request_id) == "heavy":
            image_file(template, row.request_id, "light").unlink(missing_ok=True)
    return CascadeServed(CascadeRun(result, parts.allocator, parts.peak), fleet.was_interrupted, error)
