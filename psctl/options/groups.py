"""The options of engines, caches, traces and evaluations: one table of flags for each dataclass that they set."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, get_args

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
            "Reuse results of earlier steps: at all steps but those of a list (schedule, which is recommended), where "
            "a predictor or a limit allows it (patch), only for whole batches (image), at fixed intervals (interval), "
            "or until the changes of a request add up to a limit (accumulated).",
            is_shared=True,
        ),
        "threshold": flag(
            "--cache-threshold",
            "Without a predictor: reuse a block whose input has changed by less than this, relative to its mean "
            "square. With --cache accumulated: limit of the sum of changes.",
            is_shared=True,
            show_default=False,
        ),
        "predictor": flag(
            "--cache-predictor",
            "Predictor made by psctl train-predictor cache. Default: the workspace's, else the model's.",
            is_shared=True,
            dir_okay=False,
        ),
        "schedule": flag(
            "--cache-schedule",
            "Schedule made by psctl train-predictor schedule. Default: the workspace's, else the model's.",
            is_shared=True,
            dir_okay=False,
        ),
        "grain": flag(
            "--cache-grain",
            "Unit of reuse: the whole step of a request, or single patches of single blocks, as in PatchedServe. "
            "auto: requests with a predictor or --cache accumulated, patches with a limit.",
            is_shared=True,
        ),
        "interval": flag("--cache-interval", "Number of steps between computations.", is_shared=True),
        "patch_size": flag(
            "--cache-patch-size",
            "Side of the cache's patches in latent pixels. Default: the smallest that suits the model, 8 for the "
            "bundled ones.",
            is_shared=True,
            show_default=False,
        ),
        "max_reuse": flag(
            "--max-reuse",
            "Maximum number of consecutive steps for which a patch may reuse a block. Default: that of the "
            "predictor's profile, else 4.",
            is_shared=True,
            show_default=False,
        ),
        "warmup_steps": flag(
            "--warmup-steps", "Number of first steps of a request that are computed in full.", is_shared=True
        ),
        "memory_mb": flag("--cache-memory", "Maximum memory of the cache.", is_shared=True, metavar="MB"),
    },
    panel="Cache",
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
            "Split each image among this number of devices, with a process each; virtual:N runs them in one process. "
            "Sets --engine.",
            is_shared=True,
            metavar="N|virtual:N",
            is_eager=True,
            callback=_set_engine,
        ),
        "mode": flag(
            "--parallel-mode",
            "sync: exact; displaced: with the other ranks' values of the previous call, except in the first one; "
            "naive: without the other ranks' values; auto: displaced if it is expected to save more than a tenth.",
            is_shared=True,
        ),
        "norms": Flags(
            NormOptions,
            {
                "mode": flag(
                    "--gn",
                    "Statistics of displaced GroupNorms: those of the previous call, corrected by this rank's change; "
                    "synchronous ones; the other ranks' stale ones; or this rank's alone.",
                    is_shared=True,
                )
            },
        ),
        "warmup": flag(
            "--parallel-warmup", "Number of calls after the first that are synchronous.", is_shared=True, min=0
        ),
        "cfg_split": flag(
            "--cfg-split",
            "Compute the unconditional rows on half of the ranks; auto: if their number is even.",
            is_shared=True,
        ),
        "shares": flag(
            "--parallel-shares",
            'Shares of the ranks in an image, such as "2,1". Default: equal.',
            is_shared=True,
            metavar="SHARES",
        ),
        "text": flag(
            "--parallel-text",
            "Models with a text stream: each rank computes all of it, or its part; auto splits long texts.",
            is_shared=True,
        ),
        "from_pixels": flag(
            "--parallel-from",
            "Images with fewer pixels are drawn whole, by one rank each; auto measures at start which images are "
            "faster so.",
            is_shared=True,
            metavar="PIXELS|auto",
        ),
        "decode": flag(
            "--parallel-decode",
            "Decode images on rank 0, or in strips on all ranks, which takes less memory per rank.",
            is_shared=True,
        ),
        "devices": flag(
            "--parallel-devices",
            'Devices of the ranks, such as "cuda:0,cuda:2"; one may be named twice. Default: one each, from --device '
            "on.",
            is_shared=True,
            metavar="DEVICES",
        ),
        "backend": flag(
            "--parallel-backend",
            "Transport between ranks. auto: shared memory, or gloo between machines; nccl: from GPU to GPU.",
            is_shared=True,
        ),
        "timeout_s": flag(
            "--parallel-timeout",
            "Seconds after which ranks give up on one that does not respond.",
            is_shared=True,
            metavar="SECONDS",
        ),
        "memory_mb": flag(
            "--parallel-memory",
            "Maximum memory per rank for other ranks' values; calls that need more are synchronous.",
            is_shared=True,
            metavar="MB",
            min=1,
        ),
    },
    panel="Several devices for an image (--parallel)",
)
MODEL = Flags(
    ModelOptions,
    {
        "sampler": flag("--sampler", "Sampler that replaces the model's, with the same settings."),
        "lora": flag(
            "--lora",
            "Adapter (.safetensors) that is fused into the weights; may be repeated.",
            metavar="PATH[:SCALE]",
        ),
        "adapter": flag(
            "--adapter",
            "Adapter (LoRA, .safetensors) that requests may name; may be repeated.",
            metavar="NAME=PATH",
        ),
        "quantize": flag(
            "--quantize",
            "int8: keep the weights of the denoising model in 8 bits (torchao), which saves memory; fp8: multiply in "
            "8-bit floating point, which is faster on GPUs that can. Images are close to those without, but not equal.",
        ),
    },
    panel="Changes of the model",
)
_PROMPT_CACHE = flag(
    "--prompt-cache",
    "Maximum memory for the embeddings of recent texts, and again for recent references; 0 encodes each anew.",
    metavar="MB",
    min=0,
)
_OFFLOAD = flag(
    "--offload",
    "text: keep the text encoders on the device only while they encode; on a CPU they are read again each time.",
    is_shared=True,
)
_STAGES = flag(
    "--stages",
    "Where texts are encoded and images decoded: in threads or processes beside the denoise loop, or inline, between "
    "its steps; auto: inline on a CPU of up to 4 cores, else threads.",
    is_shared=True,
)
_DECODER_DTYPE = flag(
    "--decoder-dtype",
    "Number format in which images are decoded; auto: the autoencoder's own, or that of psctl.json.",
    is_shared=True,
)
_DECODE_BATCH = flag(
    "--decode-batch",
    "Maximum number of images of one size that are decoded together. Default: as many as a tenth of a GPU's memory "
    "holds; 1 on a CPU.",
    is_shared=True,
    min=1,
    show_default=False,
)
_OF_MODELS = {
    "model": MODEL,
    "prompt_cache_mb": _PROMPT_CACHE,
    "offload": _OFFLOAD,
    "stages": _STAGES,
    "decoder_dtype": _DECODER_DTYPE,
    "decode_batch": _DECODE_BATCH,
}
ENGINE = Flags(
    EngineOptions,
    {
        "engine": flag(
            "--engine",
            "patched: all resolutions in one batch; plain: unmodified diffusers, one batch per resolution; parallel: "
            "set by --parallel.",
            is_shared=True,
        ),
        "order": flag("--order", "Order of tokens in memory; auto: image on a CPU, patch on a GPU.", is_shared=True),
        "patch_size": flag(
            "--patch-size",
            "Side of a patch in latent pixels (image pixels / 8). Default: the greatest common divisor of all sides.",
            is_shared=True,
            min=1,
            show_default=False,
        ),
        "strategy": flag(
            "--strategy", "How convolutions read pixels beyond a patch; auto measures at start.", is_shared=True
        ),
        "kernels": flag(
            "--kernels", "Implementation of the kernels; auto: Triton on a GPU, torch elsewhere.", is_shared=True
        ),
        "compile": flag(
            "--compile",
            "torch.compile the transformer blocks, which do not depend on the requests in the batch.",
            is_shared=True,
        ),
        "cuda_graphs": flag(
            "--cuda-graphs/--no-cuda-graphs",
            "Record passes as CUDA graphs and replay them. Default: on CUDA, unless another option excludes it.",
            is_shared=True,
            show_default=False,
        ),
        "cache": CACHE,
    },
    panel="Engine",
)
TRACE = Flags(
    TraceSettings,
    {
        "trace": flag(
            "--trace",
            "Random arrivals, the mix of sizes and steps of vllm-omni's Dataset C, a recorded trace (azure, "
            "diffusiondb, gentd26, katz: --arrivals), or a file (JSONL, CSV, Request(...) lines).",
            metavar="poisson|gamma|diurnal|shape|dataset-c|RECORDED|FILE",
        ),
        "request_rate": flag("--request-rate", "Mean arrivals per second of a random trace; inf: all at once."),
        "cv": flag("--cv", "Coefficient of variation of the gaps, with --trace gamma. Default: 2."),
        "amplitude": flag("--amplitude", "Amplitude of the rate, with --trace diurnal, 0 to 1. Default: 0.8."),
        "period_s": flag("--period", "Length of a day, with --trace diurnal. Default: 600.", metavar="SECONDS"),
        "arrivals": flag(
            "--arrivals",
            "File of a recorded trace: CSV (azure: arrived_at or TIMESTAMP; gentd26), metadata.parquet (diffusiondb) "
            "or JSON (katz).",
        ),
        "owners": flag(
            "--owners",
            "Recorded traces: users whose requests are replayed, or their number, drawn at random. Default: all.",
            metavar="N|NAME,...",
        ),
        "speed": flag(
            "--speed", "Recorded traces and files: replay X times as fast as recorded.", metavar="X", show_default=False
        ),
        "curve": flag(
            "--curve", "CSV of the rate over time (time_s, rate), with --trace shape. Default: a bundled day."
        ),
        "rate_range": flag(
            "--rate-range", "Lowest and highest rate over --duration, with --trace shape.", metavar="MIN:MAX"
        ),
        "num_prompts": flag("--num-prompts", "Number of requests. Default: 32, or all with --duration or a file."),
        "duration_s": flag("--duration", "Length of the trace in seconds.", metavar="SECONDS"),
        "resolutions": _RESOLUTIONS,
        "mix": flag(
            "--mix",
            'Weights of the resolutions, such as "1,1,2" or "128=0.5,192=0.5". Default: equal.',
            metavar="WEIGHTS",
        ),
        "prompts": _PROMPTS,
        "num_inference_steps": _STEPS,
        "guidance_scale": _SCALE,
        "seed": _SEED,
        "from_zero": flag("--from-zero", "Shift the times of a trace file, so that it starts with its first request."),
        "slo": flag(
            "--slo",
            "SLO in seconds of requests without one, such as 2.5, or 128x128=1.5,256=3. Default: --slo-scale times "
            "their standalone latency.",
            metavar="SECONDS|WxH=SECONDS,...",
        ),
    },
    panel="Trace",
)
EDITS = Flags(
    TraceEditSettings,
    {
        "share": flag("--edits", "Share of the requests that edit an image.", metavar="SHARE"),
        "mask_ratios": flag(
            "--mask-ratios",
            "Edits: mask ratios, as published for two traces and a benchmark, or CSV with a column mask_ratio. "
            "Default: production.",
            metavar="production|public|viton|FILE",
        ),
        "templates": flag("--templates", "Edits: number of images that they share. Default: 20.", metavar="N"),
        "template_skew": flag(
            "--template-skew",
            "Edits: exponent of the popularity of images (Zipf): image n is edited in proportion to 1 / n to this "
            "power. Default: 1.",
        ),
        "strength": flag("--edit-strength", "Edits: share of the steps that are taken. Default: 1."),
        "references": flag(
            "--edit-references",
            "Edits: new images that follow 1 to N images, of models that take references, in place of masks.",
            metavar="N",
        ),
    },
    panel="Edits of the trace (--edits)",
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
        "num_prompts": flag("--num-prompts", "Number of text-image pairs.", min=1),
        "resolutions": _RESOLUTIONS,
        "num_inference_steps": _STEPS,
        "guidance_scale": _SCALE,
        "policy": flag("--policy", "Policy that decides which requests join the batch, and when."),
        "max_batch_size": _BATCH,
        "max_bad": flag("--max-bad", "Number of images that may be missing, damaged or fail.", min=0),
        "seed": _SEED,
    },
    panel="Images to draw",
)

TraceFlags = Annotated[TraceSettings, EDITED_TRACE]
EngineFlags = Annotated[EngineOptions, ENGINE]
DrawingEngineFlags = Annotated[EngineOptions, ENGINE.using(model=MODEL)]
"""Without options that change no image."""
ParallelEngineFlags = Annotated[EngineOptions, ENGINE.using(parallel=PARALLEL, **_OF_MODELS)]
ServedEngineFlags = Annotated[EngineOptions, ENGINE.using(parallel=PARALLEL.fixing(may_use_fewer=True), **_OF_MODELS)]
PatchFlags = Annotated[EngineOptions, ENGINE.without("engine", "cache")]


@dataclass(frozen=True, slots=True)
class JudgeFlags:
    """Options for the networks that judge images."""

    PANEL: ClassVar = "Judges of images"

    clip_model: Annotated[
        str,
        flag(
            "--clip-model",
            "CLIP model of the CLIP score: bundled name, folder or hub id of a transformers model.",
            is_shared=True,
        ),
    ] = "emoji-clip"
    fid_weights: Annotated[
        Path | None, flag("--fid-weights", "Inception weights. Default: the installed ones.", is_shared=True)
    ] = None
    lpips_weights: Annotated[
        Path | None, flag("--lpips-weights", "LPIPS weights. Default: the installed ones.", is_shared=True)
    ] = None

    def to_judges(self, device: "torch.device") -> "Judges":
        """Return the networks, which are loaded at their first use."""
        from ...eval.metrics.judges import Judges

        return Judges(self.clip_model, self.fid_weights, self.lpips_weights, device)


JUDGES = Flags.of(JudgeFlags)
