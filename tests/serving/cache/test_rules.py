"""Decisions of a trained predictor: per patch before each block, per request where all blocks count as one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.serving.cache.rules import PatchView, Predicted
from patchedserve.training.cache.fitting import FitSettings, fit_cache_predictor
from patchedserve.training.cache.predictor import CachePredictor, features_of

from ...support.block_profiles import FACTS, THRESHOLD, samples_of, write_profile

COUNTS = (4, 9, 1, 16)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> CachePredictor:
    samples = samples_of(write_profile(tmp_path_factory.mktemp("profile") / "b.parquet"))
    return fit_cache_predictor(samples, FACTS, FitSettings(threshold=THRESHOLD))


def view_of(block: int) -> PatchView:
    rng, count = np.random.default_rng(block), sum(COUNTS)
    request = np.repeat(np.arange(len(COUNTS)), COUNTS)
    change = torch.from_numpy(10 ** rng.normal(-2.3 + 0.4 * (request - 1.5), 0.4)).float()
    steps = np.array([2, 5, 7, 9])[request]
    return PatchView(block, len(FACTS.blocks), change, request, steps, np.full(count, 12), steps % 3, 4096 * request)


def votes(predictor: CachePredictor, view: PatchView) -> np.ndarray:
    assert view.change is not None
    others = (view.steps_done / 12, view.reuses, view.pixels)
    features = features_of(view.change, view.block, *(torch.from_numpy(each).float() for each in others))
    return predictor.votes(features).numpy()


@pytest.mark.parametrize("min_confidence", [0.2, 0.5, 0.8])
def test_patches_follow_their_vote_and_requests_the_mean_vote(predictor: CachePredictor, min_confidence: float) -> None:
    cut = replace(predictor, min_confidence=min_confidence)
    rule, num_blocks = Predicted(cut), len(FACTS.blocks)
    for block in range(num_blocks):
        view = view_of(block)
        assert rule.may_reuse(view).tolist() == (votes(cut, view) > min_confidence).tolist()
    view = view_of(num_blocks)
    starts = np.cumsum([0, *COUNTS])
    expected = [votes(cut, view)[a:b].mean() > min_confidence for a, b in pairwise(starts)]
    assert rule.may_reuse(view).tolist() == np.repeat(expected, COUNTS).tolist()
    assert len(set(expected)) == 2 or min_confidence != 0.5


def test_max_reuse_beyond_the_training_range_is_refused(predictor: CachePredictor) -> None:
    assert Predicted(predictor).max_reuse == predictor.max_lag
    with pytest.raises(UsageError, match=f"--max-reuse is {predictor.max_lag + 1}, but the predictor has learnt from"):
        Predicted(predictor, predictor.max_lag + 1)
