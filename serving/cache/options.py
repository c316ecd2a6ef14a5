"""How the cache is to work. Imports no torch, so that options are checked before anything heavy is loaded."""

from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Literal, get_args

from ...data.errors import UsageError
from ...data.files import sha256_of

CACHE_PREDICTOR_FILE, CACHE_SCHEDULE_FILE = "cache.safetensors", "cache-schedule.json"
CacheMode = Literal["off", "schedule", "patch", "image", "interval", "accumulated"]
CACHE_MODES: tuple[str, ...] = get_args(CacheMode)
CacheGrain = Literal["auto", "request", "patch"]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What the patch cache does; all but `mode` are without effect where it is off.

    Attributes:
        mode: `schedule`: a list of steps, known in advance, is computed, and the others are forecast from them; no
            other field but `schedule` matters then. `patch`: every patch of every block by itself. `image`: a block is
            skipped only where all patches of the batch agree (the paper's whole-image variant). `interval`: all but the
            outermost blocks are computed at
            every `interval`-th step only (as DeepCache does). `accumulated`: a request skips all blocks until the
            changes of its input, added up from step to step, exceed `threshold` (as TeaCache does).
        threshold: largest mean squared change of a block's input since it was last computed, relative to the mean
            square of that input, at which `patch` and `image` reuse, where no predictor is given; None asks the
            predictor. For `accumulated` the largest sum of relative changes.
        predictor: file of a trained cache predictor; None for the workspace's, or else the one that the model has.
        patch_size: side of a patch of the cache in latent pixels; None for what suits the model (`default_patch_size`).
        interval: see `mode`.
        max_reuse: how many steps in a row a patch may reuse a block; None for as many as the predictor has learnt from,
            and 4 where none decides.
        warmup_steps: first steps of a request that are computed in full; so is its last step.
        memory_mb: bound of what the cache keeps; a block that would exceed it runs uncached.
        grain: what is computed or reused as one. `patch`: patches of a block by themselves, as in the paper.
            `request`: a request whole; where a predictor or `accumulated` decides it takes all blocks of a step or
            none, and what it would have got is forecast from its last two steps (`forecast`). `auto`: `request` where
            these decide, which is faster and gives better images (docs/cache.md), else `patch`.
        full_above: finer than `grain`: of the requests that have patches to compute, the share of these above which a
            block computes all patches of these requests; at 0 they are computed whole or not at all, and of `patch` it
            is 0.5. None for what `grain` says.
        schedule: file of the list of steps; None for the workspace's, or else the one that the model has.

    Raises:
        UsageError: a value is not allowed.
    """

    mode: CacheMode = "off"
    threshold: float | None = None
    predictor: Path | None = None
    patch_size: int | None = None
    interval: int = 3
    max_reuse: int | None = None
    warmup_steps: int = 3
    memory_mb: int = 2048
    full_above: float | None = None
    grain: CacheGrain = "auto"
    schedule: Path | None = None

    def __post_init__(self) -> None:
        if self.grain not in get_args(CacheGrain):
            raise UsageError(f"cache grain is {self.grain!r}, but it must be one of {', '.join(get_args(CacheGrain))}")
        if self.grain != "auto" and self.full_above is not None:
            raise UsageError("give a grain or full_above, not both")
        if self.mode not in CACHE_MODES:
            raise UsageError(f"cache is {self.mode!r}, but it must be one of {', '.join(CACHE_MODES)}")
        for name, low in (("patch_size", 1), ("interval", 2), ("max_reuse", 1), ("warmup_steps", 1), ("memory_mb", 1)):
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise UsageError(
                    f"cache {name.replace('_', ' ')} is {getattr(self, name)}, but it must be {low} or more"
                )
        if self.full_above is not None and not 0 <= self.full_above <= 1:
            raise UsageError(f"full_above is {self.full_above}, but it must be a share from 0 to 1")
        if self.threshold is not None and not 0 <= self.threshold < float("inf"):
            raise UsageError(f"cache threshold is {self.threshold}, but it must be a number from 0")
        if self.threshold is not None and self.mode in ("off", "schedule", "interval"):
            raise UsageError(f"--cache-threshold belongs to --cache patch, image or accumulated, not {self.mode}")
        if self.mode == "accumulated" and self.threshold is None:
            raise UsageError(
                "--cache accumulated needs --cache-threshold: the sum of relative changes that is let pass"
            )
        if self.predictor is not None and self.threshold is not None:
            raise UsageError("give --cache-predictor or --cache-threshold, not both")
        if self.predictor is not None and self.mode not in ("patch", "image"):
            raise UsageError(f"--cache-predictor belongs to --cache patch or image, not {self.mode}")
        if self.schedule is not None and self.mode != "schedule":
            raise UsageError(f"--cache-schedule belongs to --cache schedule, not {self.mode}")

    @property
    def is_on(self) -> bool:
        return self.mode != "off"

    @property
    def is_of_patches(self) -> bool:
        """Whether it is decided step by step what the model computes, from what it is handed."""
        return self.mode not in ("off", "schedule")

    @property
    def file(self) -> Path | None:
        """What decides, if that is a file."""
        return self.schedule or self.predictor

    @property
    def needs_predictor(self) -> bool:
        """Whether a trained predictor decides."""
        return self.mode in ("patch", "image") and self.threshold is None

    def own_full_above(self, *, tells_of_steps: bool) -> float | None:
        """`full_above`, or what `grain` stands for; None where a request takes all blocks of a step or none, as rules
        allow that tell of all blocks as one.
        """
        if self.full_above is not None or (tells_of_steps and self.grain != "patch"):
            return self.full_above
        return 0.0 if self.grain == "request" else 0.5

    def with_file_of(self, *folders: Path) -> "CacheOptions":
        """The same options with the predictor or the schedule of the first of these folders that has one, where they
        need one and name none.

        If none of them has one, the file is that of the first folder, so that errors say where it belongs.
        """
        if not (self.needs_predictor or self.mode == "schedule") or self.file is not None:
            return self
        is_scheduled = self.mode == "schedule"
        files = [folder / (CACHE_SCHEDULE_FILE if is_scheduled else CACHE_PREDICTOR_FILE) for folder in folders]
        found = next(filter(Path.is_file, files), files[0])
        return replace(self, schedule=found) if is_scheduled else replace(self, predictor=found)

    def from_anywhere(self) -> "CacheOptions":
        """The same options with absolute paths, for processes in other folders."""
        paths = {name: getattr(self, name) for name in ("predictor", "schedule")}
        return replace(self, **{name: path.absolute() for name, path in paths.items() if path is not None})

    def in_words(self) -> str:
        """The mode and what decides, for tables."""
        if not self.is_on:
            return self.mode
        if self.mode == "schedule":
            return f"{self.mode} {self.schedule}"
        if self.mode == "interval":
            return f"{self.mode}, every {self.interval} steps"
        decides = f"predictor {self.predictor}" if self.threshold is None else f"threshold {self.threshold:g}"
        grain = "" if self.grain == "auto" else f", {self.grain} by {self.grain}"
        return f"{self.mode}, {decides}{grain}"

    def identity(self) -> dict[str, Any]:
        """What decides images, as JSON: two equal ones reuse by the same rules.

        A predictor counts by its file's content, because training writes another one under the same name. Where the
        cache is off, the rest has no effect and stands at what earlier versions had: sets of images are found by it.

        Raises:
            OSError: the predictor's file cannot be read.
        """
        if self.mode == "schedule":
            assert self.schedule is not None, "whoever loads the model names the file"
            return {"mode": self.mode, "schedule": f"sha256:{sha256_of(self.schedule)}"}
        options = self if self.is_on else CacheOptions(patch_size=8)
        asks = self.is_on and self.needs_predictor
        tells = asks or self.mode == "accumulated"
        content = asdict(options) | {"full_above": options.own_full_above(tells_of_steps=tells)}
        del content["grain"], content["schedule"]
        if not asks:
            content["max_reuse"] = content["max_reuse"] or 4
        if self.predictor is not None:
            content["predictor"] = f"sha256:{sha256_of(self.predictor)}"
        return content


def default_patch_size(model_side: int, num_levels: int, unit: int) -> int:
    """Side of the cache's patches in latent pixels where the user names none.

    Of `patch` order, as on CUDA, the cache's patches are those of all layers, and a 3 x 3 convolution reads
    (s + 2) ** 2 / s ** 2 times a patch of side s: 4 times at s = 2, 1.56 times at s = 8. So a patch has 8 x 8 tokens at
    the deepest level, unless that is more than a quarter of the side that the model was trained for: the usual sizes,
    one half, three quarters and all of it, have that in common, and a smaller image still has four patches.

    Args:
        model_side: latent side that the model was trained for.
        num_levels: of the model.
        unit: side of a token of the finest level in latent pixels.

    Returns:
        32 for SDXL, 16 for Stable Diffusion 1.5 and 3, 8 for the bundled models; never less than a token of the deepest
        level.
    """
    deepest = unit << (num_levels - 1)
    return deepest * gcd(8, max(1, model_side // 4 // deepest))
