"""`psctl generate`: draws images of mixed resolutions on the serving engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...data.adapters import Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt
from ...data.errors import RunError, UsageError
from ...data.files import require_folder
from ...data.requests import Request
from ...data.resolution import parse
from ...serving.conflicts import refuse_conflicts
from ...serving.options import TemplateOptions
from ..flags import flag
from ..options.common import GuidanceScale, MaxBatchSize, NumInferenceSteps, Seed, require_seeds
from ..options.controls import ControlNets, Controls, read_controls
from ..options.groups import ParallelEngineFlags
from ..options.target import Target
from ..options.templates import KeepFlag, require_cells, require_keep, require_masked
from ..output import Output

if TYPE_CHECKING:
    from rich.table import Table

    from ...serving.options import EngineOptions

Value = TypeVar("Value")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def generate(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompts, with one image each.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None, flag("--prompts", "File of prompts (.txt, .csv, .tsv, .jsonl), instead of arguments.")
    ] = None,
    resolution: Annotated[
        list[str] | None,
        flag(
            "--resolution -r",
            "Size in pixels; given once for all prompts, or once per prompt. Default: the model's.",
            metavar="SIDE|WIDTHxHEIGHT",
        ),
    ] = None,
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    negative_prompt: Annotated[str | None, flag("--negative-prompt", "Negative prompt of all images.")] = None,
    use_adapter: Annotated[
        list[str] | None,
        flag(
            "--use-adapter",
            'Adapters that an image uses; given once for all prompts, or once per prompt, where "" means none.',
            metavar="NAME[:SCALE][+NAME...]",
        ),
    ] = None,
    controlnet: ControlNets = None,
    control: Controls = None,
    seed: Seed = 0,
    output: Annotated[
        Path,
        flag(
            "--output -o",
            "Folder for 000.png, 001.png and so on; with a single prompt also a file name.",
            metavar="FILE|DIR",
        ),
    ] = Path("images"),
    overwrite: Annotated[bool, flag("--overwrite", "Overwrite existing images.")] = False,
    save_template: Annotated[
        bool,
        flag("--save-template", "Record the passes of the images, for psctl edit --reuse --template-kind trajectory."),
    ] = False,
    keep: KeepFlag = "all",
    max_batch_size: MaxBatchSize = 16,
    engine: ParallelEngineFlags,
    target: Target,
    out: Output,
) -> None:
    """Draw one image per prompt; prompt number i uses seed + i.

    Each prompt may have a resolution of its own. Images equal those of plain diffusers with the same seeds.

    Examples:

        psctl generate "a red apple on a blue background" -o apple.png
        psctl generate "a taco" "a hat" -r 128x192 -r 256 --seed 7
        psctl generate --prompts prompts.txt -r 192 -o images --json
        psctl generate "a cat" "a dog" --adapter ink=ink.safetensors --use-adapter ink --use-adapter ink:0.5
        psctl generate "a red car" --controlnet canny=controlnet-canny --control canny:0.7=edges.png
        psctl generate "a living room" --save-template -o room.png
    """
    texts = _read_prompts(prompt, prompts)
    sizes = _each("--resolution", [parse(text) for text in resolution or ()], len(texts))
    adapters = _each("--use-adapter", [read_adapters(text) for text in use_adapter or ()], len(texts))
    check_adapters_used(engine, adapters)
    engine, controls = read_controls(engine, controlnet, control)
    if controls and save_template:
        refuse_conflicts({"--control": "--control", "--reuse": "--save-template"})
    require_seeds(seed, len(texts), "prompts")
    defaults = target.defaults()
    requests = [
        Request(
            request_id=index,
            prompt=text,
            resolution=size,
            num_inference_steps=defaults.num_inference_steps if num_inference_steps is None else num_inference_steps,
            guidance_scale=defaults.guidance_scale if guidance_scale is None else guidance_scale,
            seed=seed + index,
            negative_prompt=negative_prompt,
            adapters=own,
            controls=tuple(each.fitted(size) for each in controls),
        )
        for index, (text, size, own) in enumerate(
            zip(
                texts,
                sizes or [defaults.default_resolution] * len(texts),
                adapters or [()] * len(texts),
                strict=True,
            )
        )
    ]
    paths = image_paths(output, len(texts), overwrite=overwrite)
    if save_template:
        require_masked(engine, "--save-template")
        require_keep(target.model, keep)
        if paths[0].suffix.lower() != ".png":
            raise UsageError(f"--save-template: {paths[0]} must end in .png, as an edit knows the image by its pixels")
        require_cells(target.model, sizes or [defaults.default_resolution])
    elif keep != "all":
        raise UsageError(f"--keep {keep} is of records: add --save-template, or leave it out")
    draw(
        requests,
        paths,
        target,
        engine,
        out,
        max_batch_size=max_batch_size,
        templates=TemplateOptions(keep=keep) if save_template else None,
        save_templates=save_template,
    )


def draw(
    requests: list[Request],
    paths: list[Path],
    target: Target,
    engine: Any,
    out: Output,
    *,
    max_batch_size: int,
    templates: "TemplateOptions | None" = None,
    save_templates: bool = False,
    facts: dict[str, Any] | None = None,
) -> None:
    """Draw requests in one batch, write their images and print the results.

    Edits read records as set by `templates`; with `save_templates`, images leave records. `facts` are added to the
    JSON.
    """
    from ...serving.runs.draw import draw_images, draw_with_records

    served, place = target.load(out, engine)
    if templates is not None:
        served.reuse.use_keep(templates.keep)
    for request in requests:
        served.check_request(request)
    with out.status("Measuring which way of convolving is faster ..."):
        served.tune([request.resolution for request in requests], place.tables)
    saved: dict[int, str] = {}
    with out.phases() as start:
        if save_templates:
            result, saved = draw_with_records(
                served, requests, paths, place, max_batch_size=max_batch_size, start_phase=start
            )
        else:
            result = draw_images(
                served,
                requests,
                paths,
                place,
                max_batch_size=max_batch_size,
                templates=templates,
                start_phase=start,
                on_note=out.note,
            )

    images = [_describe(record) for record in result.records]
    if save_templates:
        for image in images:
            image["template"] = saved.get(image["id"])
    served.close()
    payload = {"model": target.model, "device": str(served.device), "duration_s": result.duration_s, "images": images}
    if served.offload is not None:
        payload["offload"] = served.offload.to_json(served.pipe)
    out.data(payload | (facts or {}), table=lambda: _table(images))
    if result.was_interrupted:
        raise KeyboardInterrupt
    failed = [image for image in images if image["status"] != "completed"]
    if failed:
        raise RunError(f"{len(failed)} of {len(images)} images failed; number {failed[0]['id']}: {failed[0]['reason']}")


def _read_prompts(arguments: list[str] | None, file: Path | None) -> list[str]:
    if arguments and file is not None:
        raise UsageError("give prompts either as arguments or with --prompts FILE, not both")
    if file is not None:
        from ...data.prompts.captions import load_prompts

        return load_prompts(file)
    if not arguments:
        raise UsageError("no prompt: give one or more, or --prompts FILE")
    for number, text in enumerate(arguments):
        require_prompt(f"prompt number {number}", text)
    return arguments


def _each(option: str, values: list[Value], num_prompts: int) -> list[Value]:
    """Return one value of an option per prompt, or none at all if it is not given."""
    if len(values) == 1:
        return values * num_prompts
    if values and len(values) != num_prompts:
        raise UsageError(f"{option} is given {len(values)} times for {num_prompts} prompts: give it once or for each")
    return values


def check_adapters_used(engine: "EngineOptions", adapters: Sequence[Adapters]) -> None:
    """Raise UsageError if images name adapters that are not loaded, or some are loaded that none names."""
    loaded = [each.name for each in engine.model.adapters]
    for own in adapters:
        require_adapters(own, loaded)
    unused = [name for name in loaded if all(name not in dict(own) for own in adapters)]
    if unused:
        raise UsageError(f"--adapter {unused[0]} is used by no image: add --use-adapter {unused[0]}, or leave it out")


def image_paths(output: Path, count: int, *, overwrite: bool) -> list[Path]:
    """Return where each image goes, after checking that it can be written there."""
    is_file = output.suffix.lower() in _IMAGE_SUFFIXES and not output.is_dir()
    if is_file and count > 1:
        raise UsageError(f"output {output} is a file name, but there are {count} images: give a folder")
    digits = max(3, len(str(count - 1)))
    paths = [output] if is_file else [output / f"{i:0{digits}}.png" for i in range(count)]
    folder = paths[0].parent
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output folder {folder} is a file; image file names end in {', '.join(_IMAGE_SUFFIXES)}")
    existing = [path for path in paths if path.exists()]
    if existing and not overwrite:
        raise UsageError(f"{existing[0]} exists already: use --overwrite or another --output")
    require_folder(folder)
    return paths


def _describe(record: Any) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "prompt": record.prompt,
        "resolution": str(record.resolution),
        "num_inference_steps": record.num_inference_steps,
        "guidance_scale": record.guidance_scale,
        "seed": record.seed,
        "lora": record.lora,
        "steps_reused": record.steps_reused,
        "status": record.status,
        "reason": record.reason,
        "path": record.image_path,
        "latency_s": record.latency_s,
    }


def _table(images: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table()
    for name, justify in (("image", "left"), ("size", "right"), ("seed", "right"), ("seconds", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("prompt", overflow="ellipsis", no_wrap=True)
    for image in images:
        latency = "" if image["latency_s"] is None else f"{image['latency_s']:.2f}"
        # Text from users is not markup.
        prompt = image["prompt"].replace("[", "\\[")
        table.add_row(image["path"] or image["status"], image["resolution"], str(image["seed"]), latency, prompt)
    return table
