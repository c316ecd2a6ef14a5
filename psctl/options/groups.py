"""The options of engines, caches, traces and evaluations: one table of flags for each dataclass that they set."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ...data.datasets.spec import spec_options_help
from ...eval.options import EvalOptions
from ...serving.cache.options import CacheOptions
from ...serving.options import EngineOptions, ModelOptions
from ...serving.parallel.options import NormOptions, ParallelOptions
from ...serving.runs.trace_settings import TraceEditSettings, TraceSettings
from ..flags import Flags, flag, preset
from .common import GuidanceScale, MaxBatchSize, NumInferenceSteps, Prompts, Resolutions, Seed

if TYPE_CHECKING:
    import torch

    from ...eval.metrics.judges import Judges

_SEED, _RESOLUTIONS, _PROMPTS, _STEPS, _SCALE, _BATCH = (
    get_args(alias)[1] for alias in (Seed, Resolutions, Prompts, NumInferenceSteps, GuidanceScale, MaxBatchSize)
)

CACHE = Flags(
    CacheOptions,
    {
        "mode": flag(
            "--cache",
            "Reuse what earlier steps gave: at all steps but those of a list (schedule, the best of these), as a "
            "predictor or a limit says (patch), only where the whole batch agrees (image), at fixed intervals, or "
            "until a request's changes add up (accumulated).",
            is_shared=True,
        ),
        "threshold": flag(
            "--cache-threshold",
            "Reuse by this rule instead of a predictor: the block's input has changed less, relative to its mean "
            "square. With --cache accumulated the sum of changes.",
            is_shared=True,
            show_default=False,
        ),
        "predictor": flag(
            "--cache-predictor",
            "Trained by psctl train-predictor cache. Default: the workspace's, or else the model's.",
            is_shared=True,
            dir_okay=False,
        ),
        "schedule": flag(
            "--cache-schedule",
            "Searched by psctl train-predictor schedule. Default: the workspace's, or else the model's.",
            is_shared=True,
            dir_okay=False,
        ),
        "grain": flag(
            "--cache-grain",
            "What is reused as one: a request's whole step, or each patch of each block by itself, as in PatchedServe. "
            "auto: requests where a predictor or --cache accumulated decides, patches where a limit does.",
            is_shared=True,
        ),
        "interval": flag("--cache-interval", "Steps from one computation to the next.", is_shared=True),
        "patch_size": flag(
            "--cache-patch-size",
            "Side of the cache's patches in latent pixels. Default: what suits the model, 8 for the bundled ones.",
            is_shared=True,
            show_default=False,
        ),
        "max_reuse": flag(
            "--max-reuse",
            "Steps in a row that a patch may reuse a block. Default: what the predictor has learnt from; else 4.",
            is_shared=True,
            show_default=False,
        ),
        "warmup_steps": flag("--warmup-steps", "First steps of a request that are computed in full.", is_shared=True),
        "memory_mb": flag("--cache-memory", "Most that the cache keeps.", is_shared=True, metavar="MB"),
    },
)


def _set_engine(context: typer.Context, ranks: str) -> str:
    if ranks != "1":
        preset(context, {"engine": "parallel"})
    return ranks


PARALLEL = Flags(
    ParallelOptions,
    {
        "ranks": flag(
            "--parallel",
            "Share each image among so many devices, each in a process; virtual:N tries it in one. Sets --engine.",
            is_shared=True,
            metavar="N|virtual:N",
            is_eager=True,
            callback=_set_engine,
        ),
        "mode": flag(
            "--parallel-mode",
            "sync: exact; displaced: by what the others had in the call before, but for the first; naive: parts that "
            "know nothing of each other; auto: displaced where that is expected to save more than a tenth.",
            is_shared=True,
        ),
        "norms": Flags(
            NormOptions,
            {
                "mode": flag(
                    "--gn",
                    "Statistics of displaced GroupNorms: of the call before, corrected by the own change; waiting for "
                    "all; the others' as they were; the own alone.",
                    is_shared=True,
                )
            },
        ),
        "warmup": flag("--parallel-warmup", "Calls after the first that are not displaced yet.", is_shared=True, min=0),
        "cfg_split": flag(
            "--cfg-split",
            "Half of the ranks take what guidance adds; auto where their number is even.",
            is_shared=True,
        ),
        "shares": flag(
            "--parallel-shares", 'Of the ranks in an image, as "2,1". Default: equal.', is_shared=True, metavar="SHARES"
        ),
        "text": flag(
            "--parallel-text",
            "Models with a text stream: every rank has all of it, or its part; auto splits where it is long.",
            is_shared=True,
        ),
        "from_pixels": flag(
            "--parallel-from",
            "Images of fewer pixels are drawn whole, by one rank each; auto: whichever are done sooner so, as measured "
            "at the start.",
            is_shared=True,
            metavar="PIXELS|auto",
        ),
        "decode": flag(
            "--parallel-decode",
            "Images are decoded by rank 0, or in strips by all ranks, which need less memory each then.",
            is_shared=True,
        ),
        "devices": flag(
            "--parallel-devices",
            'Of the ranks, as "cuda:0,cuda:2"; one may be named twice. Default: from --device on, one each.',
            is_shared=True,
            metavar="DEVICES",
        ),
        "backend": flag(
            "--parallel-backend",
            "What carries tensors between ranks; auto: memory that they share, and between machines gloo; nccl: from "
            "GPU to GPU.",
            is_shared=True,
        ),
        "timeout_s": flag(
            "--parallel-timeout",
            "How long ranks may keep each other waiting; who does so for longer is done without.",
            is_shared=True,
            metavar="SECONDS",
        ),
        "memory_mb": flag(
            "--parallel-memory",
            "Most that a rank keeps of others for displaced calls; beyond it calls are synchronous.",
            is_shared=True,
            metavar="MB",
            min=1,
        ),
    },
)
MODEL = Flags(
    ModelOptions,
    {
        "sampler": flag("--sampler", "Instead of the model's own, with the other settings of that one."),
        "lora": flag(
            "--lora",
            "Adapter that is fused into the weights, a .safetensors file; several are added up.",
            metavar="PATH[:SCALE]",
        ),
        "adapter": flag(
            "--adapter",
            "Adapter (LoRA) that each image or request may name, a .safetensors file; give one for each.",
            metavar="NAME=PATH",
        ),
        "quantize": flag(
            "--quantize",
            "Weights of the denoising model in 8 bits, by torchao. Images are near those without, not equal.",
        ),
    },
)
_PROMPT_CACHE = flag(
    "--prompt-cache", "Most that is kept of texts that were encoded before; 0 keeps none.", metavar="MB", min=0
)
_OFFLOAD = flag(
    "--offload",
    "text: text encoders are on the device only while they encode; on a CPU they are read again each time.",
    is_shared=True,
)
_STAGES = flag(
    "--stages",
    "Where texts are encoded and images decoded: beside the denoise loop in threads, or in processes of their own; "
    "inline: between its steps; auto: inline on a CPU of up to 4 cores, else threads.",
    is_shared=True,
)
_OF_MODELS = {"model": MODEL, "prompt_cache_mb": _PROMPT_CACHE, "offload": _OFFLOAD, "stages": _STAGES}
ENGINE = Flags(
    EngineOptions,
    {
        "engine": flag(
            "--engine",
            "patched: all resolutions in one batch; plain: unmodified diffusers, a batch per resolution; "
            "parallel: set by --parallel.",
            is_shared=True,
        ),
        "order": flag("--order", "How tokens are packed; auto: image on a CPU, patch on a GPU.", is_shared=True),
        "patch_size": flag(
            "--patch-size",
            "Side of a patch in latent pixels (image pixels / 8). Default: what all sizes have in common.",
            is_shared=True,
            min=1,
            show_default=False,
        ),
        "strategy": flag("--strategy", "How convolutions see beyond a patch; auto measures at start.", is_shared=True),
        "kernels": flag("--kernels", "auto: Triton on a GPU, torch elsewhere.", is_shared=True),
        "compile": flag(
            "--compile",
            "torch.compile the transformer blocks, which do not depend on the requests in the batch.",
            is_shared=True,
        ),
        "cuda_graphs": flag(
            "--cuda-graphs/--no-cuda-graphs",
            "Record the launches of passes, and replay them. Default: on CUDA, unless another option excludes it.",
            is_shared=True,
            show_default=False,
        ),
        "cache": CACHE,
    },
)
TRACE = Flags(
    TraceSettings,
    {
        "trace": flag(
            "--trace",
            "Random or recorded arrivals, or a file (JSONL, CSV, Request(...) lines).",
            metavar="poisson|gamma|diurnal|shape|azure|FILE",
        ),
        "request_rate": flag("--request-rate", "Mean arrivals per second of a random trace; inf: all at once."),
        "cv": flag("--cv", "Coefficient of variation of the gaps, with --trace gamma. Default: 2."),
        "amplitude": flag("--amplitude", "Swing of the rate, with --trace diurnal, 0 to 1. Default: 0.8."),
        "period_s": flag("--period", "Length of the day, with --trace diurnal. Default: 600.", metavar="SECONDS"),
        "arrivals": flag("--arrivals", "CSV of recorded arrivals, with --trace azure (arrived_at or TIMESTAMP)."),
        "curve": flag("--curve", "CSV of the rate over time (time_s, rate), with --trace shape. Default: a day."),
        "rate_range": flag(
            "--rate-range", "Least and greatest rate, with --trace shape, over --duration.", metavar="MIN:MAX"
        ),
        "num_prompts": flag("--num-prompts", "Number of requests. Default: 32, or with --duration or a file all."),
        "duration_s": flag("--duration", "Seconds in which requests arrive.", metavar="SECONDS"),
        "resolutions": _RESOLUTIONS,
        "mix": flag("--mix", 'As "1,1,2" or "128=0.5,192=0.5". Default: equal.', metavar="WEIGHTS"),
        "prompts": _PROMPTS,
        "num_inference_steps": _STEPS,
        "guidance_scale": _SCALE,
        "seed": _SEED,
        "from_zero": flag("--from-zero", "Start a trace file with its first request, whatever its clock says."),
        "slo": flag(
            "--slo",
            "Seconds that a request may take which brings no SLO, as 2.5, or 128x128=1.5,256=3. Default: --slo-scale "
            "times its latency alone.",
            metavar="SECONDS|WxH=SECONDS,...",
        ),
    },
)
EDITS = Flags(
    TraceEditSettings,
    {
        "share": flag("--edits", "Share of the requests that edit an image.", metavar="SHARE"),
        "mask_ratios": flag(
            "--mask-ratios",
            "Of edits: as published of two traces and of a benchmark, or CSV with a column mask_ratio. Default: "
            "production.",
            metavar="production|public|viton|FILE",
        ),
        "templates": flag("--templates", "Of edits: how many images they share. Default: 20.", metavar="N"),
        "template_skew": flag(
            "--template-skew", "Of edits: image n is edited in proportion to 1 / n to this power (Zipf). Default: 1."
        ),
        "strength": flag("--edit-strength", "Of edits: share of the steps that are taken. Default: 1."),
    },
)
EDITED_TRACE = TRACE.using(edits=EDITS)
DRAW = Flags(
    EvalOptions,
    {
        "dataset": flag(
            "--dataset",
            "Captions to draw and images to compare with: emoji, coco:, diffusiondb:, imagefolder:, parquet:. Options "
            f"follow the path, as in 'coco:PATH?split=NAME'. {spec_options_help()}.",
            metavar="emoji|coco:PATH|...",
        ),
        "num_prompts": flag("--num-prompts", "Text-image pairs of the set.", min=1),
        "resolutions": _RESOLUTIONS,
        "num_inference_steps": _STEPS,
        "guidance_scale": _SCALE,
        "policy": flag("--policy", "Which requests join the batch, and when."),
        "max_batch_size": _BATCH,
        "max_bad": flag("--max-bad", "Images that may be missing, damaged or fail.", min=0),
        "seed": _SEED,
    },
)

TraceFlags = Annotated[TraceSettings, EDITED_TRACE]
EngineFlags = Annotated[EngineOptions, ENGINE]
ParallelEngineFlags = Annotated[EngineOptions, ENGINE.using(parallel=PARALLEL, **_OF_MODELS)]
ServedEngineFlags = Annotated[EngineOptions, ENGINE.using(parallel=PARALLEL.fixing(may_use_fewer=True), **_OF_MODELS)]
PatchFlags = Annotated[EngineOptions, ENGINE.without("engine", "cache")]


@dataclass(frozen=True, slots=True)
class JudgeFlags:
    """Options for the networks that judge images."""

    clip_model: Annotated[
        str,
        flag(
            "--clip-model",
            "Judge of the CLIP score: bundled name, folder or hub id of a transformers CLIP model.",
            is_shared=True,
        ),
    ] = "emoji-clip"
    fid_weights: Annotated[Path | None, flag("--fid-weights", "Inception weights; looked for.", is_shared=True)] = None
    lpips_weights: Annotated[Path | None, flag("--lpips-weights", "LPIPS weights; looked for.", is_shared=True)] = None

    def to_judges(self, device: "torch.device") -> "Judges":
        """Return the networks, which are loaded at their first use."""
        from ...eval.metrics.judges import Judges

        return Judges(self.clip_model, self.fid_weights, self.lpips_weights, device)


JUDGES = Flags.of(JudgeFlags)
