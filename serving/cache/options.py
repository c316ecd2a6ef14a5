"""Options of the cache. Imports no torch, so that options are checked before anything heavy is loaded."""

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
    """Options of the patch cache. With `mode` at `off`, all others have no effect.

    Attributes:
        mode: `schedule`: the steps in a list, known in advance, are computed, and the others are forecast from them;
            the only other field in use is `schedule`. `patch`: the decision is per patch and block. `image`: a block is
            skipped only if all patches of the batch agree (the paper's whole-image variant). `interval`: all but the
            outermost blocks are computed only at every `interval`-th step (as in DeepCache). `accumulated`: a request
            skips all blocks until the sum of its input's changes over the steps reaches `threshold` (as in TeaCache).
        threshold: for `patch` and `image`, the mean squared change of a block's input since it was last computed,
            relative to the mean square of that input, below which it is reused; None to use the predictor. For
            `accumulated`, the sum of relative changes at which a request is computed.
        predictor: file of a trained cache predictor; None for that of the workspace, or else of the model.
        patch_size: side of a patch of the cache in latent pixels; None for the model's default (`default_patch_size`).
        interval: as described for `mode`.
        max_reuse: largest number of steps in a row for which a patch may reuse a block; None for the number that the
            predictor was trained on, or 4 without a predictor.
        warmup_steps: number of first steps of a request that are computed in full. Its last step is computed, too.
        memory_mb: memory bound of the cache; a block that would exceed it runs uncached.
        grain: unit that is computed or reused as a whole. `patch`: single patches of a block, as in the paper.
            `request`: whole requests; if a predictor or `accumulated` decides, a request takes all blocks of a step or
            none, and its output at a skipped step is forecast from its last two steps (`forecast`). `auto`: `request`
            if one of these decides, which is faster and gives better images (docs/cache.md), otherwise `patch`.
        full_above: finer control than `grain`: of the requests with patches to compute, the share of patches to compute
            above which a block computes all their patches. At 0, requests are computed whole or not at all; `patch`
            stands for 0.5. None for the value of `grain`.
        schedule: file of the list of steps; None for that of the workspace, or else of the model.

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
        """Whether the patches or requests to compute are decided at every step, from the model's inputs."""
        return self.mode not in ("off", "schedule")

    @property
    def takes_whole_steps(self) -> bool:
        """Whether a request takes all blocks of a step or none, so that the computed ones are a batch of their own."""
        is_of_steps = self.mode == "accumulated" or self.needs_predictor
        return self.is_of_patches and self.resolve_full_above(reuses_whole_steps=is_of_steps) is None

    @property
    def features(self) -> dict[str, str]:
        """Features in use, by their name in `serving.conflicts.CONFLICTS`, each as users write it."""
        is_used = {"--cache": True, "a cache of blocks": not self.takes_whole_steps}
        return {name: f"--cache {self.mode}" for name, is_given in is_used.items() if is_given and self.is_of_patches}

    @property
    def file(self) -> Path | None:
        """File of the schedule or the predictor; None if none is given."""
        return self.schedule or self.predictor

    @property
    def needs_predictor(self) -> bool:
        """Whether a trained predictor decides."""
        return self.mode in ("patch", "image") and self.threshold is None

    def resolve_full_above(self, *, reuses_whole_steps: bool) -> float | None:
        """Return `full_above`, or the value of `grain`; None if a request takes all blocks of a step or none.

        The latter is possible with rules that decide about all blocks as one (`reuses_whole_steps`).
        """
        if self.full_above is not None or (reuses_whole_steps and self.grain != "patch"):
            return self.full_above
        return 0.0 if self.grain == "request" else 0.5

    def with_file_of(self, *folders: Path) -> "CacheOptions":
        """Return the options with the predictor or the schedule of the first folder that has one, if they need one and
        name none.

        If no folder has one, the path is in the first folder, so that error messages name the expected place.
        """
        if not (self.needs_predictor or self.mode == "schedule") or self.file is not None:
            return self
        is_scheduled = self.mode == "schedule"
        files = [folder / (CACHE_SCHEDULE_FILE if is_scheduled else CACHE_PREDICTOR_FILE) for folder in folders]
        found = next(filter(Path.is_file, files), files[0])
        return replace(self, schedule=found) if is_scheduled else replace(self, predictor=found)

    def from_anywhere(self) -> "CacheOptions":
        """Return the options with absolute paths, for processes in other folders."""
        paths = {name: getattr(self, name) for name in ("predictor", "schedule")}
        return replace(self, **{name: path.absolute() for name, path in paths.items() if path is not None})

    def in_words(self) -> str:
        """Return the mode and the basis of its decisions in words, for tables."""
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
        """Return the options that affect images, as JSON: options with equal identities reuse by the same rules.

        A predictor or a schedule is identified by its file's content, because training writes another one under the
        same name. If the cache is off, the other fields have no effect and keep the values of earlier versions, as sets
        of images are looked up by this identity.

        Raises:
            OSError: the file cannot be read.
        """
        if self.mode == "schedule":
            assert self.schedule is not None, "whoever loads the model names the file"
            return {"mode": self.mode, "schedule": f"sha256:{sha256_of(self.schedule)}"}
        options = self if self.is_on else CacheOptions(patch_size=8)
        asks = self.is_on and self.needs_predictor
        tells = asks or self.mode == "accumulated"
        content = asdict(options) | {"full_above": options.resolve_full_above(reuses_whole_steps=tells)}
        del content["grain"], content["schedule"]
        if not asks:
            content["max_reuse"] = content["max_reuse"] or 4
        if self.predictor is not None:
            content["predictor"] = f"sha256:{sha256_of(self.predictor)}"
        return content


def default_patch_size(model_side: int, num_levels: int, unit: int) -> int:
    """Return the default side of the cache's patches in latent pixels.

    In `patch` order, as on CUDA, the cache's patches are those of all layers, and a 3 x 3 convolution reads
    (s + 2) ** 2 / s ** 2 times a patch of side s: 4 times at s = 2, 1.56 times at s = 8. A patch therefore has 8 x 8
    tokens at the deepest level, unless that is more than a quarter of the side that the model was trained for. This
    quarter divides the usual sizes, one half, three quarters and all of it, and a smaller image still has four patches.

    Args:
        model_side: latent side that the model was trained for.
        num_levels: number of levels of the model.
        unit: side of a token of the finest level in latent pixels.

    Returns:
        32 for SDXL, 16 for Stable Diffusion 1.5 and 3, 8 for the bundled models; never less than a token of the deepest
        level.
    """
    deepest = unit << (num_levels - 1)
    return deepest * gcd(8, max(1, model_side // 4 // deepest))
