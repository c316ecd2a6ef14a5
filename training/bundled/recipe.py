"""The order in which the bundled models are trained, and the folder of each part.

    text -> autoencoder -> emoji-clip          (the judge: needs only the tokenizer)
                        -> emoji-xl, emoji-3   (need text and autoencoder)
                           emoji-xl -> emoji-xl-turbo
                           emoji-3 -> emoji-edit    (with text encoders of its own)

Every part has a folder of its own with its checkpoints and its finished model, and resumes where it stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from ...data.emoji.dataset import EmojiDataset
from ...data.emoji.edits import EditDataset
from ...data.errors import UsageError
from ...data.files import sha256_of
from ...data.resolution import Resolution
from .autoencoder import train_autoencoder
from .continuation import WEIGHT_FILES, adopt_parts, save_part
from .distill import distill
from .edit_model import EDIT_SIZES, EditText, continue_from_emoji_3, load_or_encode_edits, train_edit_model
from .edit_text import train_edit_encoder, train_edit_tokenizers
from .export import export_emoji_3, export_emoji_clip, export_emoji_edit, export_emoji_xl, export_emoji_xl_turbo
from .generators import TextTower, TransformerObjective, UNetObjective, train_generator
from .judge import SOURCES, draw_judge_pool, train_judge
from .latents import TRAINING_SIZES, draw_pool, load_or_encode
from .loop import OnStep, Task, ignore_step
from .text import new_text_encoder, train_text_encoder, train_tokenizer

Part = Literal["text", "autoencoder", "emoji-clip", "emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-edit"]
PARTS: tuple[Part, ...] = get_args(Part)
DEFAULT_STEPS: dict[Part, int] = {
    "text": 1200,
    "autoencoder": 2200,
    "emoji-clip": 3360,
    "emoji-xl": 8900,
    "emoji-3": 11500,
    "emoji-xl-turbo": 900,
    "emoji-edit": 1700,
}
"""Training steps of the shipped weights. The three models were trained in several runs: 560, 3300 and 3300 steps, then
the rest with `--from-models --seed 1`; the last 1800 steps of the judge and the last 7000 of emoji-3 with `--seed 2`.
The number for emoji-xl-turbo is that of each of its stages."""

EDIT_TEXT_STEPS = 600
TEXT_ENCODERS = {"small": (64, 2, 1), "large": (96, 3, 2)}
"""Width, number of layers and seed of the two text encoders."""

AUTOENCODER_POOLS: dict[Resolution, int] = {
    Resolution(128, 128): 600,
    Resolution(192, 192): 600,
    Resolution(256, 256): 1200,
    Resolution(192, 128): 300,
    Resolution(128, 192): 300,
}
# The three served sizes get most batches. The larger two learn more slowly and together get more than the small one.
SIZE_WEIGHTS = {Resolution(128, 128): 0.34, Resolution(192, 192): 0.25, Resolution(256, 256): 0.25}
OTHER_SIZES_WEIGHT = 0.16


@dataclass(frozen=True, slots=True)
class Reporter:
    """Callbacks that report the progress of a training.

    Attributes:
        on_stage: called with the name of each new stage and its length in units (steps or pictures).
        on_step: called after each training step with its number and figures.
        on_image: called for each picture that is drawn or encoded.
    """

    on_stage: Callable[[str, int], None] = lambda name, total: None
    on_step: OnStep = ignore_step
    on_image: Callable[[], None] = lambda: None


def train_part(
    part: Part,
    root: Path,
    models_dir: Path,
    device: torch.device,
    *,
    steps: int | None,
    seed: int,
    report: Reporter,
    from_models: Path | None = None,
) -> Path:
    """Train one part in `root`/part and return the finished folder. Models are also exported to `models_dir`, with
    checksums.

    Args:
        from_models: folder of finished models, from whose weights the training starts; parts that it needs are copied
            from them if `root` has none.

    Raises:
        UsageError: if a part that this one needs has not been trained, or a checkpoint has another configuration or
            more steps than requested.
        RunError: if the loss diverges or a checkpoint is damaged.
    """
    length = steps or DEFAULT_STEPS[part]
    initial_weights = None
    teacher = (from_models or models_dir) / "emoji-xl" / WEIGHT_FILES["emoji-xl"]
    # A new emoji-edit starts from emoji-3.
    has_edit_model = from_models is not None and (from_models / "emoji-edit").is_dir()
    if from_models is not None and (part == "emoji-xl-turbo" or (part == "emoji-edit" and not has_edit_model)):
        adopt_parts(from_models, root)
    elif from_models is not None:
        if part not in WEIGHT_FILES:
            raise UsageError(f"--from-models continues {', '.join(WEIGHT_FILES)}; {part} is trained from the start")
        adopt_parts(from_models, root)
        initial_weights = from_models / part / WEIGHT_FILES[part]
    if part == "text":
        return _train_text(root / part, device, length, seed, report)
    if part == "autoencoder":
        return _train_autoencoder(root / part, device, length, seed, report)
    if part == "emoji-clip":
        tokenizer = _load_tokenizer(root)
        # Seeds that the generators do not use.
        task = Task(root / part, length, 1000 + seed, initial_weights)
        report.on_stage("pictures for emoji-clip", sum(SOURCES.values()))
        pool = draw_judge_pool(task.seed, report.on_image)
        report.on_stage(part, length)
        model = train_judge(pool, tokenizer, task, device, report.on_step)
        export_emoji_clip(models_dir / part, model.cpu(), tokenizer)
        return models_dir / part
    task = Task(root / part, length, seed, initial_weights)
    if part == "emoji-edit":
        return _train_edit(root, models_dir, device, task, report, from_models or models_dir)
    return _train_generator(part, root, models_dir, device, task, report, teacher)


def _train_text(folder: Path, device: torch.device, steps: int, seed: int, report: Reporter) -> Path:
    tokenizer = train_tokenizer(seed)
    for name, (width, num_layers, offset) in TEXT_ENCODERS.items():
        torch.manual_seed(seed + offset)
        encoder = new_text_encoder(width, num_layers, tokenizer)
        report.on_stage(f"text encoder {name}", steps)
        train_text_encoder(encoder, tokenizer, Task(folder / name, steps, seed + offset), device, report.on_step)
        save_part(encoder.cpu(), folder / f"{name}-model")
    # Saved last, so that a run which is refused (another seed) or unfinished leaves no tokenizer without its encoders.
    save_part(tokenizer, folder / "tokenizer")
    return folder


def _train_autoencoder(folder: Path, device: torch.device, steps: int, seed: int, report: Reporter) -> Path:
    report.on_stage("pictures for the autoencoder", sum(AUTOENCODER_POOLS.values()))
    datasets = [EmojiDataset(resolution, size, seed=seed) for resolution, size in AUTOENCODER_POOLS.items()]
    pools = [draw_pool(dataset, report.on_image)[0] for dataset in datasets]
    report.on_stage("autoencoder", steps)
    model = train_autoencoder(pools, Task(folder, steps, seed), device, report.on_step)
    save_part(model.cpu(), folder / "model")
    return folder / "model"


def _train_generator(
    part: Part,
    root: Path,
    models_dir: Path,
    device: torch.device,
    task: Task,
    report: Reporter,
    teacher: Path,
) -> Path:
    tokenizer = _load_tokenizer(root)
    encoders = [_load(CLIPTextModelWithProjection, root / "text" / f"{name}-model") for name in TEXT_ENCODERS]
    vae_folder = root / "autoencoder" / "model"
    vae = _load(AutoencoderKL, vae_folder)
    digest = sha256_of(vae_folder / "diffusion_pytorch_model.safetensors")

    report.on_stage("latents", sum(TRAINING_SIZES.values()))
    datasets = [EmojiDataset(resolution, size, seed=task.seed) for resolution, size in TRAINING_SIZES.items()]
    vae.to(device)
    sets = [load_or_encode(vae, digest, dataset, root / "latents", device, report.on_image) for dataset in datasets]
    weights = _size_weights(TRAINING_SIZES)
    torch.manual_seed(task.seed)
    tower = TextTower(tokenizer, [encoder.to(device) for encoder in encoders])
    if part == "emoji-xl-turbo":
        model: Any = distill(teacher, tower, sets, weights, task, device, report.on_stage, report.on_step)
    else:
        report.on_stage(part, task.steps)
        objective = UNetObjective(tower) if part == "emoji-xl" else TransformerObjective(tower)
        model = train_generator(objective, sets, weights, task, device, report.on_step).cpu()
    export = {"emoji-xl": export_emoji_xl, "emoji-3": export_emoji_3, "emoji-xl-turbo": export_emoji_xl_turbo}[part]
    export(models_dir / part, model, vae.cpu(), tokenizer, [encoder.cpu() for encoder in encoders])
    return models_dir / part


def _train_edit(
    root: Path, models_dir: Path, device: torch.device, task: Task, report: Reporter, finished: Path
) -> Path:
    """Train emoji-edit from the weights of a finished one, or else its text encoders and then its transformer, from
    that of emoji-3 in `finished`.
    """
    text_folder = finished / "emoji-edit"
    if task.initial_weights is None:
        text_folder = task.folder
        _train_edit_text(task, device, report)
        initial = task.folder / "initial.safetensors"
        continue_from_emoji_3(finished / "emoji-3" / WEIGHT_FILES["emoji-3"], initial, task.seed)
        task = replace(task, initial_weights=initial)
    clip = (
        CLIPTokenizer.from_pretrained(text_folder / "tokenizer"),
        CLIPTextModel.from_pretrained(text_folder / "text_encoder", dtype=torch.float32),
    )
    t5 = (
        T5Tokenizer.from_pretrained(text_folder / "tokenizer_2"),
        T5EncoderModel.from_pretrained(text_folder / "text_encoder_2", dtype=torch.float32),
    )
    vae_folder = root / "autoencoder" / "model"
    vae = _load(AutoencoderKL, vae_folder)
    digest = sha256_of(vae_folder / "diffusion_pytorch_model.safetensors")
    report.on_stage("latents", sum(EDIT_SIZES.values()))
    datasets = [EditDataset(resolution, size, seed=task.seed) for resolution, size in EDIT_SIZES.items()]
    vae.to(device)
    folder = root / "latents"
    sets = [load_or_encode_edits(vae, digest, dataset, folder, device, report.on_image) for dataset in datasets]
    torch.manual_seed(task.seed)
    report.on_stage("emoji-edit", task.steps)
    weights = _size_weights(EDIT_SIZES)
    model = train_edit_model(EditText(clip, t5, device), sets, weights, task, device, report.on_step)
    export_emoji_edit(models_dir / "emoji-edit", model.cpu(), vae.cpu(), clip, t5)
    return models_dir / "emoji-edit"


def _train_edit_text(task: Task, device: torch.device, report: Reporter) -> None:
    """Train the tokenizers and text encoders of emoji-edit in the task's folder, unless they are there."""
    if all((task.folder / name).is_dir() for name in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")):
        return
    for number, tokenizer in enumerate(train_edit_tokenizers(task.seed)):
        suffix = ("", "_2")[number]
        steps = min(task.steps, EDIT_TEXT_STEPS)
        report.on_stage(f"text encoder{suffix}", steps)
        settings = Task(task.folder / f"text_training{suffix}", steps, task.seed + 1 + number)
        encoder = train_edit_encoder(tokenizer, settings, device, report.on_step)
        save_part(encoder.cpu(), task.folder / f"text_encoder{suffix}")
        save_part(tokenizer, task.folder / f"tokenizer{suffix}")


def _size_weights(sizes: Mapping[Resolution, int]) -> tuple[float, ...]:
    num_others = len(sizes) - len(SIZE_WEIGHTS)
    return tuple(SIZE_WEIGHTS.get(size, OTHER_SIZES_WEIGHT / num_others) for size in sizes)


def _load_tokenizer(root: Path) -> CLIPTokenizer:
    folder = root / "text" / "tokenizer"
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; train the part it comes from first: psctl models train text")
    return CLIPTokenizer.from_pretrained(folder)


def _load(model_class: Any, folder: Path) -> Any:
    if not folder.is_dir():
        part = folder.parent.name
        raise UsageError(f"{folder} does not exist; train the part it comes from first: psctl models train {part}")
    return model_class.from_pretrained(folder)
