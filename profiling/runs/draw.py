"""Requests that are all there at once, drawn by an engine and written as files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ...data.edits import read_image
from ...data.errors import RunError
from ...data.requests import Request
from ...data.workspace import ModelWorkspace

if TYPE_CHECKING:
    from ...serving.engine.run_result import RunResult
    from ...serving.models.served import ServedModel
    from ...serving.options import TemplateOptions


def draw_images(
    model: "ServedModel",
    requests: Sequence[Request],
    paths: Sequence[Path],
    place: ModelWorkspace,
    *,
    max_batch_size: int,
    templates: "TemplateOptions | None" = None,
    start_phase: Callable[[str, int], Callable[[int], None]],
    on_note: Callable[[str], None],
) -> "RunResult":
    """Draw requests that were checked, of a model that was tuned. The template of edits is recorded first where it
    is missing and worth it.

    Args:
        model: of the engine.
        requests: whose ids are the places of their paths; edits are all of one image and mask.
        paths: of their images.
        place: of the model, with its templates.
        max_batch_size: requests denoised together.
        templates: how edits read records; None: these have none.
        start_phase: begins a phase of so many parts, and gives what counts them.
        on_note: told in one line what is done in another way than was asked for.
    """
    from ...serving.engine.collectors import InMemory
    from ...serving.engine.engine import Engine
    from ...serving.scheduling.policies import get_policy

    if (edit := requests[0].edit) is not None and edit.template is not None:
        if model.reuse.is_worth_masking(edit):
            assert templates is not None, "edits with templates read records"
            model.reuse.open_store(place.templates, templates)
            advance = start_phase("template", requests[0].num_inference_steps)
            model.reuse.use_template(requests[0], place.templates, advance)
            if templates.loads is not None:
                model.reuse.plan_loads(templates.loads, model.tuning([edit.resolution], place.tables))
        else:
            share = model.family.geometry.active_share(edit)
            on_note(f"The mask touches {share:.0%} of the image's cells: it is faster to compute all of them.")
            requests = [replace(request, edit=replace(edit, template=None)) for request in requests]
    advance = start_phase("denoising steps", sum(request.num_steps for request in requests))
    engine = Engine(
        model,
        get_policy("continuous"),
        max_batch_size=max_batch_size,
        collector=InMemory(keep_latents=bool(model.reuse.trajectories)),
        image_path=lambda request: paths[request.request_id],
        on_step=lambda row: advance(row.active),
    )
    for request in requests:
        engine.submit(request)
    engine.close()
    return engine.run()


def draw_with_records(
    model: "ServedModel",
    requests: Sequence[Request],
    paths: Sequence[Path],
    place: ModelWorkspace,
    *,
    max_batch_size: int,
    start_phase: Callable[[str, int], Callable[[int], None]],
) -> "tuple[RunResult, dict[int, str]]":
    """Draw new images whose passes are recorded, for edits of them; as `draw_images`.

    Returns:
        The result, and the name of the record of each image that was drawn, by its request's id.

    Raises:
        UsageError: records do not suit the sampler, or the size of an image.
        RunError: a record cannot be made or written.
    """
    from ...serving.editing.templates import TemplateStore

    place.templates.mkdir(parents=True, exist_ok=True)
    names: dict[int, str] = {}
    # Hidden, so that nobody takes it for a record.
    with TemporaryDirectory(prefix=".", dir=place.templates) as spools:
        for request in requests:
            spool = Path(spools, str(request.request_id))
            spool.mkdir()
            model.reuse.start_trajectory(request, spool)
        result = draw_images(
            model,
            requests,
            paths,
            place,
            max_batch_size=max_batch_size,
            start_phase=start_phase,
            on_note=lambda text: None,
        )
        drawn = [record for record in result.records if record.status == "completed"]
        advance, store = start_phase("templates", len(drawn)), TemplateStore(place.templates)
        by_id = {request.request_id: request for request in requests}
        for record in drawn:
            path = paths[record.request_id]
            pixels, latents = read_image(path.read_bytes(), str(path)), result.latents[record.request_id]
            try:
                key = model.reuse.end_trajectory(by_id[record.request_id], pixels, latents, store)
            except OSError as error:
                raise RunError(f"the record of {path} cannot be written to {place.templates}: {error}") from error
            names[record.request_id] = key.digest
            advance(1)
    return result, names
