"""The command that measures what a report lacks."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ...serving.options import PATCH_OPTIONS
from .sides import ReportedSide, Subject


def measuring_command(subject: Subject, ours: ReportedSide | None) -> str:
    """The command that measures everything of the original and one of ours; what is drawn is not drawn again."""
    original = subject.original
    is_captions = subject.dataset.startswith("captions:")
    reference = ["--reference", "DIR"] if is_captions else []
    if original is not None and ours is not None and original.images is not None and ours.images is not None:
        words = [str(original.images), str(ours.images), "--metrics", "all", *reference]
    else:
        words = [*_drawing_words((ours or original or subject.sides[0]).settings), *reference]
    return shlex.join(["psctl", "eval", "compare", *words])


def _drawing_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Options that draw the same prompts again, where images are already there with them."""
    for name in ("model", "dataset", "num_prompts", "seed", "num_inference_steps", "guidance_scale", "policy", "dtype"):
        if settings.get(name) is not None:
            yield from (f"--{name.replace('_', '-')}", str(settings[name]))
    if settings.get("resolutions"):
        yield from ("--resolutions", ",".join(settings["resolutions"]))
    for name in PATCH_OPTIONS:
        if settings.get(name) is True:
            yield f"--{name.replace('_', '-')}"
        elif settings.get(name) not in (None, False, "auto"):
            yield from (f"--{name.replace('_', '-')}", str(settings[name]))
    cache = settings.get("cache")
    if not isinstance(cache, Mapping) or cache.get("mode", "off") == "off":
        return
    yield from ("--cache", cache["mode"])
    names = {"patch_size": "--cache-patch-size", "interval": "--cache-interval", "max_reuse": "--max-reuse"}
    for name, flag in (names | {"warmup_steps": "--warmup-steps", "memory_mb": "--cache-memory"}).items():
        yield from (flag, str(cache[name]))
    yield from ("--max-batch-size", str(settings.get("max_batch_size", 16)))
    if cache.get("threshold") is not None:
        yield from ("--cache-threshold", str(cache["threshold"]))
    elif cache.get("predictor") is not None:
        yield from ("--cache-predictor", "FILE")
