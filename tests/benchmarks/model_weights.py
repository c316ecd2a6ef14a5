"""Bytes of the denoising models' weights, from the published configurations: no weights are downloaded or allocated.

    python tests/benchmarks/model_weights.py

Prints a line for each model: parameters in 10^9, and GB (10^9 bytes) with 16 bits and with 8 bits a weight
(`--quantize`, which keeps only linear layers in 8 bits: the figure is the least that it can reach).
"""

from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)

from patchedserve.tests.support.model_sizes import CONFIGS

MODELS: dict[str, Any] = {
    "sdxl": UNet2DConditionModel,
    "sd3": SD3Transformer2DModel,
    "flux-dev": FluxTransformer2DModel,
    "flux2-dev": Flux2Transformer2DModel,
    "flux2-klein": Flux2Transformer2DModel,
    "aura": AuraFlowTransformer2DModel,
    "chroma": ChromaTransformer2DModel,
    "lumina2": Lumina2Transformer2DModel,
    "qwen": QwenImageTransformer2DModel,
    "z-image": ZImageTransformer2DModel,
}


def main() -> None:
    print(f"{'model':12} {'10^9':>6} {'16 bits, GB':>12} {'8 bits, GB':>11}")
    for name, model in MODELS.items():
        with torch.device("meta"):
            weights = model(**CONFIGS[name]).parameters()
        num_weights = sum(weight.numel() for weight in weights)
        print(f"{name:12} {num_weights / 1e9:6.2f} {2 * num_weights / 1e9:12.1f} {num_weights / 1e9:11.1f}")


if __name__ == "__main__":
    main()
