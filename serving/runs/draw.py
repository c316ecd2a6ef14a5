"""Drawing of requests that are all submitted at once; an engine draws them and writes the images."""

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
    from ..engine.run_result import RunResult
    from ..models.served import ServedModel
    from ..options import TemplateOptions


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
    """Draw checked requests with a tuned model. If edits have a template that is worth using and not yet recorded, the
    template is recorded first.

    Args:
        model: tuned model.
        requests: checked requests, whose ids index `paths`; edits all have the same image and mask.
        paths: paths of the images.
        place: workspace of the model, with its templates.
        max_batch_size: maximum number of requests in a batch.
        templates: options for reading records; None if no edit has a template.
        start_phase: called with the name and number of parts of a phase; returns the function that counts parts.
        on_note: called with a line about anything that is done differently from what was requested.
    """
    from ..engine.collectors import InMemory
    from ..engine.engine import Engine
    from ..scheduling.policies import get_policy

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
    """Draw new images as `draw_images` does, and record their passes for later edits.

    Returns:
        The result, and the record's name of each drawn image, by request id.

    Raises:
        UsageError: records do not suit the sampler, or the size of an image.
        RunError: a record cannot be made or written.
    """
    from ..editing.templates import TemplateStore

    place.templates.mkdir(parents=True, exist_ok=True)
    names: dict[int, str] = {}
    # The folder is hidden, so that it is not mistaken for a record.
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
