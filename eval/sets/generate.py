"""Sets of generated images, which are drawn by the serving engine, saved one by one, and can be continued.

A set is a folder of `000.png`, `001.png`, ... and `manifest.json`, which contains the prompt, seed and size of each
image and the settings of the whole set. Only missing images are drawn. Other settings need another folder, because a
set that was drawn with two settings would measure neither.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...data.errors import RunError, UsageError
from ...data.files import require_folder, write_json
from ...data.parsing import parse
from ...data.records import read_json
from ...data.requests import MAX_SEED, Request, steps_taken
from ...data.resolution import Resolution
from ...serving.models.identity import ModelIdentity
from .drawers import Drawer

MANIFEST_FILE = "manifest.json"
MANIFEST_KIND = "psctl-images"
VERSION = 1


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image of a set.

    Attributes:
        id: name of the text-image pair in its data set.
        file: name of the image file, such as `007.png`.
        prompt: prompt of the image.
        seed: seed of its noise.
        width, height: size in pixels.
    """

    id: str
    file: str
    prompt: str
    seed: int
    width: int
    height: int


@dataclass(frozen=True)
class Manifest:
    """Images of a set and the settings that they are drawn with.

    Attributes:
        items: the images.
        settings: everything that affects the images, as JSON: model, engine options, policy, steps, data set.
    """

    items: tuple[ImageItem, ...]
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of items and settings, which names the set."""
        return _digest({"items": [asdict(item) for item in self.items], "settings": self.settings})

    @property
    def prompts_digest(self) -> str:
        """SHA-256 of ids, prompts, seeds and sizes: two sets with the same one can be compared pair by pair."""
        return _digest([asdict(item) for item in self.items])

    def to_json(self) -> dict[str, Any]:
        """Return the content of `manifest.json`."""
        return {
            "kind": MANIFEST_KIND,
            "version": VERSION,
            "digest": self.digest,
            "settings": dict(self.settings),
            "images": [asdict(item) for item in self.items],
        }


def make_items(
    pairs: Sequence[tuple[str, str]], resolutions: Sequence[Resolution], seed: int = 0
) -> tuple[ImageItem, ...]:
    """Create items for (id, prompt) pairs, with consecutive seeds from `seed` and resolutions in turn.

    Raises:
        UsageError: there is no pair or resolution, an id occurs twice, or the seeds become too large.
    """
    if not pairs or not resolutions:
        raise UsageError(f"{len(pairs)} prompts and {len(resolutions)} resolutions given, but at least 1 is needed")
    if seed + len(pairs) - 1 > MAX_SEED:
        raise UsageError(f"seed is {seed}, but with {len(pairs)} prompts it may be at most {MAX_SEED - len(pairs) + 1}")
    if len({name for name, _ in pairs}) != len(pairs):
        raise UsageError("the ids of the text-image pairs must differ")
    digits = max(3, len(str(len(pairs) - 1)))
    return tuple(
        ImageItem(name, f"{i:0{digits}}.png", prompt, seed + i, *resolutions[i % len(resolutions)])
        for i, (name, prompt) in enumerate(pairs)
    )


def generation_settings(
    model: ModelIdentity,
    *,
    policy: str,
    num_inference_steps: int,
    guidance_scale: float,
    **more: Any,
) -> dict[str, Any]:
    """Return the settings that affect the images of a set. All engine options are included by name, even future ones.

    The versions of psctl, torch and diffusers are included, too: one set is drawn by one version of the code.

    The cache is identified by its rules and the content of its predictor. With a cache, patches depend slightly on the
    other requests of the batch, so `more` must then also contain the settings that determine the batches.

    Args:
        model: identity of the model.
        policy: policy that decides which requests join the batch, and when.
        num_inference_steps, guidance_scale: settings of every request.
        more: further settings that affect the images, such as the data set.

    Raises:
        OSError: the file of the cache's predictor cannot be read.
    """
    import diffusers
    import torch

    options = asdict(model.options) | {"cache": model.options.cache.identity()}
    # How long text embeddings are cached, where the encoders are kept and which process runs them affects no image.
    del options["prompt_cache_mb"], options["offload"], options["stages"], options["decode_batch"]
    if options["decoder_dtype"] == "auto":
        del options["decoder_dtype"]
    # Unchanged model options are left out, so that sets from before such an option existed can be continued.
    changes = {name: value for name, value in options.pop("model").items() if value is not None}
    del options["parallel"]
    if model.options.parallel.is_on:
        options["parallel"] = model.options.parallel.identity()
    return {
        "psctl_version": __version__,
        "torch_version": str(torch.__version__),
        "diffusers_version": diffusers.__version__,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": model.dtype,
        "device": model.device,
        "policy": policy,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        **options,
        **changes,
        **more,
    }


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a set.

    Raises:
        UsageError: the folder has none, or it is damaged.
    """
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise UsageError(f"{folder}: holds no {MANIFEST_FILE}, so its prompts are not known")
    content = read_json(file, "a manifest")
    if content.get("kind") != MANIFEST_KIND or content.get("version") != VERSION:
        raise UsageError(f"{file}: is not a manifest of psctl, version {VERSION}")
    images = parse(tuple[ImageItem, ...], content.get("images"), f"{file}: is damaged: images")
    manifest = Manifest(images, parse(dict[str, Any], content.get("settings"), f"{file}: is damaged: settings"))
    if not manifest.items or manifest.digest != content.get("digest"):
        raise UsageError(f"{file}: was changed after it was written (its digest does not fit)")
    return manifest


def open_set(folder: Path, manifest: Manifest) -> list[ImageItem]:
    """Make the folder ready for a set, or continue it; returns the items whose images are missing.

    Raises:
        UsageError: the folder contains another set (the message names the difference), or other images.
        OSError: it cannot be written.
    """
    require_folder(folder)
    if (folder / MANIFEST_FILE).exists():
        _require_same(folder, read_manifest(folder), manifest)
    elif any(folder.glob("*.png")):
        raise UsageError(f"{folder}: holds images but no {MANIFEST_FILE}; give an empty folder")
    else:
        write_json(folder / MANIFEST_FILE, manifest.to_json())
    return [item for item in manifest.items if not (folder / item.file).exists()]


def generate_set(
    drawer: Drawer,
    folder: Path,
    manifest: Manifest,
    *,
    max_batch_size: int = 16,
    max_bad: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> tuple[str, ...]:
    """Draw the missing images of a set; each is saved atomically as soon as it is drawn.

    The savings of a cache are added to `cache-use.json` in the folder.

    Args:
        drawer: prepared drawer; the manifest's settings were made for its model.
        folder: folder of the set.
        manifest: images to draw; its settings contain the policy, the steps and the guidance scale.
        max_batch_size: largest batch of the engine.
        max_bad: number of images that may fail.
        on_step: called with the number of denoising steps that have just been taken.

    Returns:
        Reasons why images failed, one line each.

    Raises:
        UsageError: the folder contains another set, or the model cannot draw an item; nothing is drawn then.
        RunError: more images failed than allowed; the others are kept.
        KeyboardInterrupt: on Ctrl-C; finished images are kept.
    """
    requests = {item.file: _request(i, item, manifest.settings) for i, item in enumerate(manifest.items)}
    for request in requests.values():
        drawer.check(request)
    missing = {folder / item.file: requests[item.file] for item in open_set(folder, manifest)}
    failed: list[str] = []
    meter = drawer.meter(folder)
    for drawing in drawer.draw(missing, manifest.settings["policy"], max_batch_size, on_step):
        meter.note(sum(record.status == "completed" for record in drawing.records))
        if drawing.was_interrupted:
            raise KeyboardInterrupt
        bad = [record for record in drawing.records if record.status != "completed"]
        failed += [f"{manifest.items[record.request_id].file}: {record.reason}" for record in bad]
        if len(failed) > max_bad:
            raise RunError(
                f"{len(failed)} of {len(missing)} images failed, but at most {max_bad} may (--max-bad); "
                f"the first: {failed[0]}; the others are in {folder}"
            )
    return tuple(failed)


def num_steps_missing(folder: Path, manifest: Manifest) -> int:
    """Return the number of denoising steps that `generate_set` would take."""
    missing = sum(not (folder / item.file).exists() for item in manifest.items)
    return missing * steps_taken(manifest.settings["num_inference_steps"], manifest.settings.get("strength", 1.0))


def _request(index: int, item: ImageItem, settings: Mapping[str, Any]) -> Request:
    return Request(
        index,
        item.prompt,
        Resolution(item.width, item.height),
        settings["num_inference_steps"],
        settings["guidance_scale"],
        seed=item.seed,
    )


def _require_same(folder: Path, found: Manifest, wanted: Manifest) -> None:
    if found.digest == wanted.digest:
        return
    if differing := differing_settings(wanted.settings, found.settings):
        name, (asked, drawn) = next(iter(differing.items()))
        what = f"{name} is {asked!r}, but its images were drawn with {drawn!r}"
    elif len(found.items) != len(wanted.items):
        what = f"{len(wanted.items)} images were asked for, but it is a set of {len(found.items)}"
    else:
        what = "its prompts, seeds or sizes are others"
    raise UsageError(
        f"{folder}: holds another set of images: {what}; to draw anew, give another folder or delete this one"
    )


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name, with both values; None for a missing one.

    Nested settings have names such as `cache.threshold`.
    """
    one, other = flat_settings(first), flat_settings(second)
    names = sorted({*one, *other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without nested mappings: {"cache": {"mode": "off"}} becomes {"cache.mode": "off"}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": each for key, each in flat_settings(value).items()}
        else:
            found[name] = value
    return found


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
