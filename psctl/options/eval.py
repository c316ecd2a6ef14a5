"""Groups of options of the commands that draw images of a data set and judge them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.datasets.spec import spec_options_help
from .common import GuidanceScale, MaxBatchSize, NumInferenceSteps, Resolutions

if TYPE_CHECKING:
    import torch

    from ...eval.metrics.judges import Judges
    from ...eval.options import EvalOptions

Dataset = Annotated[
    str,
    typer.Option(
        "--dataset",
        metavar="emoji|coco:PATH|...",
        help="Captions to draw and images to compare with: emoji, coco:, diffusiondb:, imagefolder:, parquet:. Options "
        f"follow the path, as in 'coco:PATH?split=NAME'. {spec_options_help()}.",
    ),
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Text-image pairs of the set.")]
Policy = Annotated[str, typer.Option("--policy", help="Who joins the batch and when.")]
ClipModel = Annotated[
    str,
    typer.Option(
        "--clip-model",
        help="Judge of the CLIP score: bundled name, folder or hub id of a transformers CLIP model.",
        envvar="PSCTL_CLIP_MODEL",
    ),
]
FidWeights = Annotated[
    Path | None, typer.Option("--fid-weights", envvar="PSCTL_FID_WEIGHTS", help="Inception weights; looked for.")
]
LpipsWeights = Annotated[
    Path | None, typer.Option("--lpips-weights", envvar="PSCTL_LPIPS_WEIGHTS", help="LPIPS weights; looked for.")
]
MaxBad = Annotated[int, typer.Option("--max-bad", min=0, help="Images that may be missing, damaged or fail.")]


@dataclass(frozen=True, slots=True)
class DrawFlags:
    """What is drawn."""

    dataset: Dataset = "emoji"
    num_prompts: NumPrompts = 256
    resolutions: Resolutions = None
    num_inference_steps: NumInferenceSteps = None
    guidance_scale: GuidanceScale = None
    policy: Policy = "continuous"
    max_batch_size: MaxBatchSize = 16
    max_bad: MaxBad = 0

    def to_options(self, metrics: tuple[str, ...], seed: int) -> "EvalOptions":
        """Check it. Raises UsageError as `EvalOptions`."""
        from ...eval.options import EvalOptions

        return EvalOptions(
            metrics,
            self.dataset,
            self.num_prompts,
            seed,
            self.resolutions,
            self.num_inference_steps,
            self.guidance_scale,
            self.policy,
            self.max_batch_size,
            self.max_bad,
        )


@dataclass(frozen=True, slots=True)
class JudgeFlags:
    """Which networks judge."""

    clip_model: ClipModel = "emoji-clip"
    fid_weights: FidWeights = None
    lpips_weights: LpipsWeights = None

    def to_judges(self, device: "torch.device") -> "Judges":
        """The networks, which are loaded when they are first asked."""
        from ...eval.metrics.judges import Judges

        return Judges(self.clip_model, self.fid_weights, self.lpips_weights, device)


DRAW_FLAGS, JUDGE_FLAGS = DrawFlags(), JudgeFlags()
"""The groups as nobody has changed them: defaults of commands' parameters."""
