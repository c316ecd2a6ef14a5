"""Scores that choose the light images to defer: a good score beats random choices, noise does not."""

import numpy as np
import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.eval.cascade.scores import ScoreSettings, compare_scores
from patchedserve.eval.metrics.fid import frechet_distance

COUNT, WIDTH = 160, 5


def no_progress(what: str, total: int):
    return lambda count: None


def test_informative_score_beats_random_choices_and_noise_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    real, heavy = (torch.randn(COUNT, WIDTH, generator=generator) for _ in range(2))
    # Every other light image is as good as the heavy one; the others are far off.
    is_bad = torch.arange(COUNT) % 2 == 0
    features = {"reference": real, "heavy": heavy, "light": heavy + 3.0 * is_bad[:, None]}
    noise = np.random.default_rng(1).random(COUNT)
    scores = {
        "knows": {"light": [float("nan") if bad else 1.0 for bad in is_bad.tolist()], "heavy": [1.0] * COUNT},
        "noise": {"light": noise.tolist(), "heavy": noise[::-1].tolist()},
    }
    settings = ScoreSettings((0.0, 0.25, 0.5, 1.0), (0.5,), num_draws=8, num_resamples=20)
    found = compare_scores(features, scores, settings, start_phase=no_progress)  # type: ignore[arg-type]
    knows, blind = found["rows"]
    # With half of the images deferred, the good score has replaced all bad ones.
    assert knows["curve"][2]["fid"] == pytest.approx(frechet_distance(real, heavy))
    assert knows["against_random"][0]["high"] < 0
    assert blind["against_random"][0]["low"] < 0 < blind["against_random"][0]["high"]
    assert knows["easy"]["share"] == 1.0
    assert len(knows["easy"]["differences"]) == COUNT // 2
    band = found["random"][2]
    assert band["low"] < band["fid"] < band["high"]
    for row in found["rows"]:
        assert row["curve"][0]["fid"] == pytest.approx(frechet_distance(real, features["light"]))
        assert row["curve"][-1]["fid"] == pytest.approx(frechet_distance(real, heavy))


@pytest.mark.parametrize("wrong", [{"shares": (1.5,)}, {"tested": (-0.1,)}, {"num_draws": 1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ScoreSettings(**wrong)  # type: ignore[arg-type]
