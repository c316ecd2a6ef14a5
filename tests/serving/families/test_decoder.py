"""Images whose values overflow the autoencoder's number format."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.errors import RunError
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel

from ...support.tiny_models import save_tiny, tiny_sd3


def loaded(folder: Path, dtype: str, part: str = "", weight: float = 1.0) -> ServedModel:
    """Load a model in this dtype, after multiplying one weight of its decoder by a factor."""
    pipe: Any = tiny_sd3()
    if part:
        with torch.no_grad():
            pipe.vae.decoder.get_submodule(part).weight.mul_(weight)
    return load_model(str(save_tiny(folder / "model", pipe)), "cpu", dtype)


LATENTS = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(0))


def test_float16_overflow_is_decoded_in_float32(tmp_path: Path) -> None:
    model = loaded(tmp_path, "float16", "conv_in", 3e5)
    assert model.pipe.vae.dtype == torch.float16
    given = LATENTS.half()
    with torch.inference_mode():
        assert not model.pipe.vae.decode(given, return_dict=False)[0].isfinite().all(), "or it shows nothing"
    exact = loaded(tmp_path / "exact", "float32", "conv_in", 3e5)
    image, wanted = (np.asarray(each.decode(given), dtype=int) for each in (model, exact))
    # Weights and latents are rounded to float16.
    assert np.abs(image - wanted).max() <= 2
    assert image.std() > 5


@pytest.mark.parametrize(("dtype", "where"), [("float32", "in float32:"), ("bfloat16", "in bfloat16, nor in float32:")])
def test_overflow_in_every_format_is_an_error(dtype: str, where: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, dtype, "conv_norm_out", 3e38)
    with pytest.raises(RunError, match=f"the image is not finite {where}"):
        model.decode(LATENTS)


def test_non_finite_latents_are_an_error(tmp_path: Path) -> None:
    model = loaded(tmp_path, "bfloat16")
    damaged = LATENTS.clone()
    damaged[0, 1, 2, 3] = torch.inf
    with pytest.raises(RunError, match=r"the latents are not finite: .* bfloat16"):
        model.decode(damaged)
    assert np.asarray(model.decode(LATENTS)).std() > 0
