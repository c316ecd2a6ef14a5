"""Batch server over a cascade: a light and a heavy model in worker processes answer the requests of clients."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ....data.requests import Request
from ....data.resolution import Resolution
from ...cascade.legs import LEGS, Leg, cascade_name
from ...models.defaults import ModelDefaults
from ..cascade.deployment import CascadeDeployment
from ..cascade.serve import CascadeFiles
from .server import HttpSettings, ServerParts, assemble, require_http


def make_cascade_server(
    deployment: CascadeDeployment,
    files: CascadeFiles,
    defaults: ModelDefaults,
    settings: HttpSettings,
    sizes: Sequence[Resolution],
    *,
    on_note: Callable[[str], None],
) -> ServerParts:
    """Assemble a server, whose workers start when it begins to serve.

    Args:
        deployment: configuration of the cascade, whose workers are processes.
        files: files that workers load.
        defaults: defaults of requests, those of the heavy model.
        settings: settings of the server.
        sizes: served sizes, which are all profiled.
        on_note: called with a line about each event of a worker.

    Raises:
        MissingExtraError: a package of the extra `http` is missing.
        UsageError: as `CascadeDeployment.parts_for_clients`.
    """
    require_http()
    from ...cascade.backend import CascadeBackend
    from ...server.protocol import ModelFacts

    parts = deployment.parts_for_clients(list(map(str, sizes)))
    usual = defaults.default_resolution
    if usual not in sizes:
        usual = max(sizes, key=lambda size: size.pixels)
    heavy = parts.models["heavy"]
    own = replace(
        defaults,
        resolutions=tuple(sizes),
        default_resolution=usual,
        num_inference_steps=heavy.num_steps,
        guidance_scale=heavy.guidance_scale,
    )
    names: dict[Leg, str] = {leg: str(files.specs[leg]) for leg in LEGS}
    backend = CascadeBackend(
        files.worker(parts, Path()),
        deployment.num_workers,
        names,
        lambda on_end, result: parts.dispatcher(deployment, on_end=on_end, result=result),
        on_note=on_note,
    )
    model = ModelFacts(cascade_name(files.specs), own, dtype=files.dtype, cascade=tuple(names.values()))

    def standalone_s(request: Request) -> float:
        return deployment.profile.standalone_s(request.resolution)

    return assemble(model, standalone_s, backend, settings)
