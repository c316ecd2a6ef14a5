"""`psctl edit`: redraw an image, or the masked part of it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...data.adapters import read_adapters
from ...data.checks import require_prompt
from ...data.errors import UsageError
from ...data.requests import Request
from ...data.resolution import parse
from ...serving.conflicts import conflict_in, refuse_conflicts
from ...serving.options import TemplateOptions, TemplateTiers
from ..flags import flag
from ..options.common import GuidanceScale, MaxBatchSize, NumInferenceSteps, Seed, require_seeds
from ..options.controls import ControlNets, Controls, read_controls
from ..options.groups import ParallelEngineFlags
from ..options.target import Target
from ..options.templates import (
    TIERS,
    EditLinkMbps,
    KeepFlag,
    PlanFlag,
    TemplateKindFlag,
    TemplatePrompt,
    TemplateSeed,
    loads_of,
    require_keep,
    require_masked,
)
from ..output import Output
from .generate import check_adapters_used, draw, image_paths


def edit(
    *,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image to edit.", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt for what is redrawn.", show_default=False)],
    mask: Annotated[
        Path | None,
        flag(
            "--mask",
            "Mask of the same size. White pixels are redrawn; in an image with transparency, transparent ones. Without "
            "a mask, the transparent part of the image is redrawn or, if it has none, the whole image.",
            metavar="IMAGE",
        ),
    ] = None,
    strength: Annotated[
        float | None,
        flag(
            "--strength",
            "Share of the steps that are taken, which determines how much noise is added to the image first: by "
            "default all, or 0.6 without a mask.",
        ),
    ] = None,
    feather: Annotated[
        int,
        flag(
            "--feather",
            "Width in pixels, inside the edge of the mask, over which the old image fades into the new one.",
        ),
    ] = 0,
    paste: Annotated[
        bool,
        flag("--paste/--no-paste", "Copy pixels outside the mask from the image instead of decoding their latents."),
    ] = True,
    reference: Annotated[
        list[Path] | None,
        flag(
            "--reference",
            "Further image that the model sees beside IMAGE, for models that take several; may be repeated.",
            metavar="IMAGE",
        ),
    ] = None,
    resolution: Annotated[
        str | None,
        flag(
            "--resolution -r",
            "Size of an image that is drawn from references, in pixels. Default: that of IMAGE.",
            metavar="SIDE|WIDTHxHEIGHT",
        ),
    ] = None,
    reuse: Annotated[
        bool, flag("--reuse", "Compute only the masked part, and read the rest from a record of the image.")
    ] = False,
    template_prompt: TemplatePrompt = "",
    template_seed: TemplateSeed = 0,
    template_kind: TemplateKindFlag = "noised",
    keep: KeepFlag = "all",
    edit_link_mbps: EditLinkMbps = None,
    plan: PlanFlag = "optimal",
    tiers: Annotated[TemplateTiers, TIERS],
    edit_full_steps: Annotated[
        int, flag("--edit-full-steps", "With --reuse: number of first steps that compute the whole image.", min=0)
    ] = 0,
    edit_dilate: Annotated[
        int, flag("--edit-dilate", "With --reuse: number of cells around the mask that are computed, too.", min=0)
    ] = 0,
    num_images: Annotated[int, flag("--num-images -n", "Number of images, with consecutive seeds.", min=1)] = 1,
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    negative_prompt: Annotated[str | None, flag("--negative-prompt", "Negative prompt.")] = None,
    use_adapter: Annotated[
        str, flag("--use-adapter", "Adapters that the images use.", metavar="NAME[:SCALE][+NAME...]")
    ] = "",
    controlnet: ControlNets = None,
    control: Controls = None,
    seed: Seed = 0,
    output: Annotated[
        Path,
        flag(
            "--output -o",
            "Output file, or with several images the folder for 000.png, 001.png and so on.",
            metavar="FILE|DIR",
        ),
    ] = Path("edited.png"),
    overwrite: Annotated[bool, flag("--overwrite", "Overwrite existing images.")] = False,
    max_batch_size: MaxBatchSize = 16,
    engine: ParallelEngineFlags,
    target: Target,
    out: Output,
) -> None:
    """Redraw an image, or the masked part of it, or draw a new one that follows it.

    The image is edited at its own size. The result equals that of diffusers' inpainting with the same seed, and pixels
    outside the mask are unchanged; without a mask, it equals that of diffusers' image-to-image. With --reuse only the
    masked part is computed, which is faster and slightly different; the image is recorded first, once for all its
    edits.

    FLUX.1 Kontext and FLUX.2 take references: without --mask and --strength, they draw a new image by the instruction
    in PROMPT, and see IMAGE and every --reference. With --mask they redraw this part of IMAGE, and see the same.

    Examples:

        psctl edit room.png "a green armchair" --mask chair.png -o armchair.png
        psctl edit room.png "a cat" --mask floor.png --strength 0.8 --feather 6 -n 4 -o cats
        psctl edit sketch.png "a lighthouse in a storm" --strength 0.7
        psctl edit room.png "put the cat on the sofa" --reference cat.png --model black-forest-labs/FLUX.2-dev
        psctl edit room.png "a cat" --mask floor.png --reuse -n 8 -o cats
        psctl edit room.png "a cat" --mask floor.png --reuse --edit-full-steps 3 --edit-dilate 1
        psctl edit drawn.png "a cat" --mask floor.png --reuse --template-kind trajectory
    """
    from ...data.datasets.decode import read_content
    from ...data.edits import EditSpec, Reference, TemplateSpec, own_mask, read_image, read_mask
    from ...serving.models.loading import model_geometry
    from ...serving.models.placement import resolve_device

    require_prompt("prompt", prompt)
    templates = None
    if reuse:
        require_masked(engine)
        require_keep(target.model, keep)
        templates = TemplateOptions(keep=keep, loads=loads_of(edit_link_mbps, plan, engine), tiers=tiers)
    elif template_prompt or template_seed:
        raise UsageError("--template-prompt and --template-seed are of the record, which only --reuse reads")
    elif edit_full_steps or edit_dilate or keep != "all" or template_kind != "noised":
        raise UsageError(
            "--template-kind, --keep, --edit-full-steps and --edit-dilate are of edits with a record: add --reuse"
        )
    elif edit_link_mbps is not None or plan != "optimal":
        raise UsageError("--edit-link-mbps and --plan are of reading records: add --reuse")
    elif tiers != TemplateTiers():
        raise UsageError(f"{', '.join(sorted(TIERS.names()))} are of records: add --reuse")
    others, features = reference or [], engine.features | ({"--reuse": "--reuse"} if reuse else {})
    if others:
        refuse_conflicts(features | {"--reference": "--reference"})
    engine, controls = read_controls(engine, controlnet, control)
    if controls and reuse:
        refuse_conflicts({"--control": "--control", "--reuse": "--reuse"})
    adapters = read_adapters(use_adapter)
    check_adapters_used(engine, [adapters])
    if reuse and adapters:
        refuse_conflicts({"--reuse": "--reuse", "--use-adapter": "--use-adapter"})
    geometry, defaults = model_geometry(target.model), target.defaults()
    require_seeds(seed, num_images, "images")
    content = read_content(image)
    pixels = read_image(content, str(image))
    # Transparent parts of references mean nothing.
    own = None if mask is not None or others else own_mask(content, str(image))
    may_change = own if mask is None else read_mask(read_content(mask), str(mask))
    needing = [name for name, is_given in (("--reuse", reuse), ("--feather", feather)) if is_given]
    if may_change is None and needing:
        raise UsageError(f"a mask is missing for {' and '.join(needing)}: give --mask")
    rule, spec, references = geometry.references, None, tuple[Reference, ...]()
    is_redrawn = may_change is None and strength is not None
    if others and (rule is None or is_redrawn):
        reason = f"{target.model} takes no references" if rule is None else "give a --mask, or no --strength"
        raise UsageError(f"--reference is of images that follow others: {reason}")
    conflict = conflict_in(features | {"--reference": f"an edit by {target.model}, which sees its image,"})
    if rule is not None and conflict is not None and not is_redrawn:
        if may_change is None:
            raise UsageError(conflict)
        out.note(f"The model sees its text alone: {conflict}.")
    elif rule is not None and not is_redrawn:
        seen = [read_image(read_content(path), str(path)) for path in others]
        references = rule.seen(pixels, seen, geometry.size_multiple, is_masked=may_change is not None)
    if rule is not None and may_change is None and not is_redrawn:
        size = references[0].resolution if resolution is None else parse(resolution)
    else:
        if resolution is not None:
            reason = f"{target.model} takes no references" if rule is None else "give no --mask and no --strength"
            raise UsageError(f"--resolution is for images that are drawn from references: {reason}")
        spec = EditSpec.with_defaults(
            pixels,
            may_change,
            strength,
            paste=paste,
            feather_px=feather,
            template=TemplateSpec(template_prompt, template_seed, template_kind) if reuse else None,
            full_steps=edit_full_steps,
            dilate=edit_dilate,
        )
        size = spec.resolution
    first = Request(
        0,
        prompt,
        size,
        defaults.num_inference_steps if num_inference_steps is None else num_inference_steps,
        defaults.guidance_scale if guidance_scale is None else guidance_scale,
        seed,
        negative_prompt,
        edit=spec,
        adapters=adapters,
        references=references,
        controls=tuple(each.fitted(size) for each in controls),
    )
    geometry.check_size(size, target.model)
    geometry.check_edit(first)
    geometry.check_references(first, target.model)
    if template_kind == "trajectory":
        from ...serving.editing.templates import TemplateStore

        place = target.root.for_model(target.model, str(resolve_device(target.device)))
        TemplateStore(place.templates).require_generation(first, keep)
    paths = image_paths(output, num_images, overwrite=overwrite)
    facts: dict[str, Any] = {"references": [str(each.resolution) for each in references]} if references else {}
    facts |= {"mask_ratio": None, "active_share": None}  # as of an image that is drawn from references
    if spec is not None:
        facts |= {"mask_ratio": spec.mask_ratio, "active_share": geometry.active_share(spec)}
        if spec.mask.all() and mask is not None:
            out.note("The mask covers the whole image: nothing of it is kept.")
    draw(
        [replace(first, request_id=index, seed=seed + index) for index in range(num_images)],
        paths,
        target,
        engine,
        out,
        max_batch_size=max_batch_size,
        templates=templates,
        facts=facts,
    )
