"""Synthetic block profiles that follow a known rule, written as `psctl profile blocks` writes them."""

from pathlib import Path
from typing import Any

import numpy as np

from patchedserve.data.tables.block_facts import WHOLE_MODEL, BlockFacts
from patchedserve.data.tables.schemas import BLOCKS
from patchedserve.data.tables.streams import TableWriter
from patchedserve.training.cache.samples import BlockSamples, load_samples

FACTS = BlockFacts("emoji-xl", "0a4d4b3caea134bf", "EulerDiscreteScheduler", 8, ("down0", "mid", "up0"))
GAIN = (0.1, 10.0, 1.0, 2.0)
"""Factors by which the output of each block, and of the whole model as one, changes more than its input."""
THRESHOLD = 0.01
"""Threshold of the predictors that tests train."""


def write_profile(
    path: Path,
    *,
    num_requests: int = 15,
    num_steps: int = 12,
    lags: tuple[int, ...] = (1, 2, 3),
    noise: float = 0.1,
    facts: BlockFacts = FACTS,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a profile in which `output_mse_normalised` is `input_mse_normalised` times the block's `GAIN`, with noise
    on the logarithm, and return its path; `changes` replace columns."""
    generator = np.random.default_rng(seed)
    with TableWriter(path, BLOCKS, facts.to_json()) as writer:
        for request in range(num_requests):
            side = (128, 192, 256)[request % 3]
            patches = np.arange((side // 64) ** 2)
            for step in range(1, num_steps):
                for lag in (lag for lag in lags if lag <= step):
                    for index, block in enumerate((*facts.blocks, WHOLE_MODEL)):
                        change = 10 ** generator.normal(-2.5, 0.8, len(patches)) * lag
                        output = change * GAIN[index] * 10 ** generator.normal(0, noise, len(patches))
                        writer.write(
                            {
                                "request_id": request,
                                "width": side,
                                "height": side,
                                "scheduler": facts.scheduler,
                                "num_steps": num_steps,
                                "step": step,
                                "step_fraction": step / num_steps,
                                "block": block,
                                "block_index": index,
                                "patch": patches,
                                "lag": lag,
                                "input_mse": change * 2,
                                "output_mse": output * 3,
                                "input_mse_normalised": change,
                                "output_mse_normalised": output,
                                **changes,
                            }
                        )
    return path


def samples_of(profile: Path) -> BlockSamples:
    """Return all samples of a profile that `write_profile` has written."""
    facts, samples = load_samples(profile, max_rows=10**6, seed=0)
    assert facts == FACTS
    return samples
