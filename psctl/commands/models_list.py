"""`psctl models list`: the bundled models."""

from ..output import Output


def models_list(*, out: Output) -> None:
    """List the bundled models: sizes, steps and guidance that they take by default.

    emoji-xl and emoji-3 draw; emoji-clip judges how well images fit their prompts.

    Examples:

        psctl models list
        psctl models list --json
    """
    from ...data.models.bundled import BUNDLED, GENERATORS, bundled_model_path
    from ...serving.models.defaults import read_defaults

    models = {}
    for name in BUNDLED:
        path = bundled_model_path(name)
        defaults = read_defaults(path) if name in GENERATORS else None
        models[name] = {
            "path": path,
            "megabytes": round(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6, 1),
            "resolutions": None if defaults is None else [str(size) for size in defaults.resolutions],
            "num_inference_steps": None if defaults is None else defaults.num_inference_steps,
            "guidance_scale": None if defaults is None else defaults.guidance_scale,
        }

    def line(name: str) -> str:
        about = models[name]
        if about["resolutions"] is None:
            return f"{name}: judge of the CLIP score, {about['megabytes']} MB"
        sizes, steps = ", ".join(about["resolutions"]), about["num_inference_steps"]
        return f"{name}: draws {sizes} in {steps} steps, guidance {about['guidance_scale']:g}, {about['megabytes']} MB"

    out.data(models, table="\n".join(map(line, models)))
