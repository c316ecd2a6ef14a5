"""`psctl templates add|list|check|remove`: records of images, from which edits read what they do not compute."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...serving.options import TemplateOptions, TemplateTiers
from ..options.common import GuidanceScale, NumInferenceSteps
from ..options.target import Target
from ..options.templates import TIERS, KeepFlag, TemplatePrompt, TemplateSeed, require_keep
from ..output import Output

_Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Names of records, as printed by psctl templates list.", show_default=False),
]


def templates_add(
    *,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image to record.", show_default=False)],
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    template_prompt: TemplatePrompt = "",
    template_seed: TemplateSeed = 0,
    keep: KeepFlag = "all",
    tiers: Annotated[TemplateTiers, TIERS.only("disk_mb")],
    target: Target,
    out: Output,
) -> None:
    """Record an image in advance. Otherwise its first psctl edit --reuse records it.

    A record has one number of steps, and is for edits with guidance or for edits without; masks, prompts and seeds may
    differ. Edits read it if their --keep is the same.

    Examples:

        psctl templates add room.png
        psctl templates add room.png --num-inference-steps 20 --template-prompt "a living room"
        psctl templates add room.png --keep kv
    """
    import numpy as np

    from ...data.datasets.decode import read_content
    from ...data.edits import EditSpec, TemplateSpec, read_image
    from ...serving.models.loading import model_geometry

    require_keep(target.model, keep)
    pixels = read_image(read_content(image), str(image))
    everywhere = np.ones(pixels.shape[:2], dtype=bool)
    edit = EditSpec(pixels, everywhere, template=TemplateSpec(template_prompt, template_seed))
    defaults = target.defaults()
    request = Request(
        0,
        template_prompt,
        edit.resolution,
        defaults.num_inference_steps if num_inference_steps is None else num_inference_steps,
        defaults.guidance_scale if guidance_scale is None else guidance_scale,
        edit=edit,
    )
    model_geometry(target.model).check_size(edit.resolution, target.model)
    served, place = target.load(out)
    served.check_request(request)
    served.reuse.use_keep(keep)
    served.reuse.open_store(place.templates, TemplateOptions(keep=keep, tiers=tiers))
    with out.phases() as start:
        is_new = served.reuse.use_template(request, place.templates, start("template", request.num_inference_steps))
    key = served.reuse.key_of(request)
    assert key is not None
    served.close()
    if not (place.templates / key.digest).is_dir():
        raise RunError(f"the template was recorded, but it could not be written to {place.templates}")
    result = {"id": key.digest, "is_new": is_new, "folder": str(place.templates / key.digest)}
    out.data(result, table=f"{key.digest}{'' if is_new else ' (was there already)'}")


def templates_list(*, target: Target, out: Output) -> None:
    """List the records of a model's images.

    Records are made by psctl templates add, by the first psctl edit --reuse of an image, and by psctl generate
    --save-template.

    Examples:

        psctl templates list
        psctl templates list --model emoji-3 --json
    """
    found = _store(target).list()

    def line(each: dict[str, Any]) -> str:
        if "error" in each:
            return f"{each['id']}: damaged: {each['error']}"
        about = each["about"]
        shows = "its generation" if about["kind"] == "trajectory" else repr(about["prompt"]) if about["prompt"] else ""
        return (
            f"{each['id']}: {about['size']}, {about['num_inference_steps']} steps, "
            f"{'guided' if about['rows'] == 2 else 'unguided'}, keeps {about['keep']}, "
            f"{each['bytes'] / 1e6:.1f} MB{shows and f', {shows}'}"
        )

    out.data(found, table="\n".join(map(line, found)) or "There are no templates.")


def templates_check(*, ids: _Ids = None, target: Target, out: Output) -> None:
    """Verify the checksums of all records, or of the named ones.

    The exit code is 1 if a record is damaged. Edits quarantine damaged records automatically.

    Examples:

        psctl templates check
    """
    store = _store(target)
    damaged: dict[str, str] = {}
    chosen = ids or [each["id"] for each in store.list()]
    for each in chosen:
        try:
            store.check(each)
        except RunError as error:
            damaged[each] = str(error)
    out.data(
        {"checked": len(chosen), "damaged": damaged},
        table="\n".join(damaged.values()) or f"{len(chosen)} templates are whole.",
    )
    if damaged:
        raise RunError(f"{len(damaged)} of {len(chosen)} templates are damaged; psctl templates remove deletes them")


def templates_remove(*, ids: _Ids = None, target: Target, out: Output) -> None:
    """Delete records.

    The next psctl edit --reuse of such an image records it again.

    Examples:

        psctl templates remove 0f3c9a6d5be21b7741d0a6ee
    """
    if not ids:
        raise UsageError("no template: name those to delete, see psctl templates list")
    store = _store(target)
    for each in ids:
        store.remove(each)
    out.data({"removed": ids}, table=f"{len(ids)} templates are deleted.")


def _store(target: Target) -> Any:
    from ...serving.editing.templates import TemplateStore
    from ...serving.models.placement import resolve_device

    target.defaults()  # refuses what is no model
    return TemplateStore(target.root.for_model(target.model, str(resolve_device(target.device))).templates)
