"""Model cards as Markdown: description of a bundled model, its training, and its measured figures."""

from collections.abc import Mapping
from typing import Any

from ... import __version__
from ...data.emoji.art import ART_SOURCE, object_names
from ...profiling.report.table import Table

_ABOUT = {
    "emoji-xl": (
        "StableDiffusionXLPipeline",
        "SDXL's architecture, small: `UNet2DConditionModel` with three down blocks, a middle and three up blocks, text "
        "and time conditions as in SDXL, two CLIP text encoders, and an `AutoencoderKL` that makes pictures 8 times "
        "smaller. It predicts v over the scaled-linear schedule; Euler and DDIM (trailing spacing) sample from it.",
    ),
    "emoji-3": (
        "StableDiffusion3Pipeline",
        "SD3's architecture, small: `SD3Transformer2DModel` of ten joint-attention blocks, two CLIP text encoders, no "
        "T5 (its 256 zero tokens are part of training, so the pipeline's defaults apply), and the autoencoder of "
        "`emoji-xl`. It was trained by flow matching and samples with flow-match Euler.",
    ),
    "emoji-xl-turbo": (
        "StableDiffusionXLPipeline",
        "`emoji-xl`, distilled progressively from 32 steps to 16, 8, 4 and 2 on the trailing Euler grid: each student "
        "learns in one step what its teacher does in two (Salimans and Ho 2022). The first teacher is `emoji-xl` with "
        "guidance 4, which its students have baked in (Meng et al. 2023), so that it draws without guidance. It was "
        "made to be the light model of a cascade with `emoji-xl`.",
    ),
    "emoji-edit": (
        "FluxKontextPipeline",
        "FLUX.1 Kontext's architecture, small: `FluxTransformer2DModel` of ten joint blocks, continued from `emoji-3`, "
        "with a CLIP and a T5 encoder that read instructions, and the autoencoder of `emoji-xl`. It sees a picture of "
        "its world at its own size, and changes the background or the colour of what it shows after an instruction; "
        "it removes an object about half of the time, and has not learnt to replace one or to draw without a picture. "
        "It needs no guidance.",
    ),
    "emoji-clip": (
        "CLIPModel",
        "A CLIP model that judges pictures of the emoji world. It was trained apart from the generators: other data "
        "seeds, other weights, its own text tower.",
    ),
}


def card_text(name: str, figures: Mapping[str, Any], command: str) -> str:
    """Return the card of a bundled model.

    Args:
        name: name of the model.
        figures: figures that `eval.cards.cards` measured; nested mappings become tables.
        command: command that repeats the measurement.
    """
    pipeline, about = _ABOUT[name]
    settings = figures.get("settings", {})
    keys = ("num_inference_steps", "guidance_scale", "max_sequence_length")
    asked = ", ".join(f"{key}={settings[key]}" for key in keys if key in settings)
    head = f"---\nlicense: apache-2.0\nlibrary_name: {'transformers' if name == 'emoji-clip' else 'diffusers'}\n---\n"
    load = f'from diffusers import {pipeline}\n\npipe = {pipeline}.from_pretrained("{name}")\n'
    shown = "128, 192 and 256 pixels, top to bottom"
    if name == "emoji-clip":
        use = (
            f'from transformers import CLIPModel, CLIPProcessor\n\nmodel = CLIPModel.from_pretrained("{name}")\n'
            f'processor = CLIPProcessor.from_pretrained("{name}")'
        )
    elif name == "emoji-edit":
        use = (
            f"from diffusers.utils import load_image\n{load}"
            'seen = load_image("apple.png")  # of 128, 192 or 256 pixels\n'
            'prompt = "make the background yellow"\n'
            "size = dict(width=seen.width, height=seen.height, max_area=seen.width * seen.height, _auto_resize=False)\n"
            f"image = pipe(seen, prompt, **size, {asked}).images[0]"
        )
        shown += ", each row of pictures above their edits"
    else:
        use = (
            f'{load}prompt = "a red apple on a blue background"\n'
            f"image = pipe(prompt, width=192, height=192, {asked}).images[0]"
        )
    picture = "" if name == "emoji-clip" else f"\n![{shown}](samples.png)\n"
    return (
        f"{head}# {name}\n\n{about}\n\nShipped with psctl {__version__}.\n{picture}\n```python\n{use}\n```\n\n"
        f"## Data\n\n{len(object_names())} drawings from the {ART_SOURCE}, one or two at a time on ten background "
        "colours, drawn at 128, 192 and 256 pixels and some sizes that are not square. One in ten combinations of "
        "object and background, and one in ten pairs of objects, were never trained; all figures are measured on "
        "those. It knows nothing but these drawings.\n\n"
        f"## Measured\n\n`{command}`\n\n{_tables(figures)}\n"
        f"## Training\n\n`psctl models train {name}` repeats it; the recipe and its settings are in `training/`.\n"
    )


def _tables(figures: Mapping[str, Any]) -> str:
    """Return a table of all single figures, and one for every group, as Markdown."""
    groups: dict[str, dict[str, Any]] = {"figure": {}}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            groups[name] = dict(value)
        else:
            groups["figure"][name] = value
    parts = []
    for title, group in groups.items():
        rows = {key: value if isinstance(value, Mapping) else {"value": value} for key, value in group.items()}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [[key, *(_cell(row.get(column)) for column in columns)] for key, row in rows.items()]
        if cells:
            parts.append(Table("", [title, *columns], cells).to_markdown())
    return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
