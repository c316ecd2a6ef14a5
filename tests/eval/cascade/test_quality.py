"""The quality of served images: rows of the bank's features, and differences of two systems on the same requests."""

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.eval.cascade.quality import (
    compare_served,
    quality_curve,
    quality_over_time,
    served_features,
    served_quality,
)
from patchedserve.eval.metrics.fid import frechet_distance
from patchedserve.serving.cascade.legs import Leg

COUNT, WIDTH = 120, 6


def features() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    real, other, noise = (torch.randn(COUNT, WIDTH, generator=generator) for _ in range(3))
    return {"reference": real, "heavy": other + 0.1 * noise, "light": other + 1.5}


def test_features_are_those_of_the_serving_model() -> None:
    known = features()
    places, served_by = [3, 5, 3, 7], ["light", "heavy", None, "heavy"]
    found = served_features(known, places, served_by)  # type: ignore[arg-type]
    assert torch.equal(found, torch.stack([known["light"][3], known["heavy"][5], known["heavy"][7]]))
    assert served_features(known, [1], [None]).shape == (0, WIDTH)


def test_quality_is_measured_on_served_images() -> None:
    known = features()
    places = list(range(COUNT))
    mixed: list[Leg | None] = ["light" if place % 3 else "heavy" for place in places]
    quality = served_quality(known, places, mixed)
    assert quality["fid_heavy"] == pytest.approx(frechet_distance(known["reference"], known["heavy"]))
    assert quality["fid_heavy"] < quality["fid"] < quality["fid_light"]
    assert (quality["num_images"], quality["num_prompts"], quality["num_reference"]) == (COUNT, COUNT, COUNT)
    nothing = served_quality(known, [0, 1], [None, "light"])
    assert (nothing["fid"], nothing["num_images"]) == (None, 1)


def test_quality_by_threshold_uses_the_images_it_would_serve() -> None:
    known = features()
    confidences = [float("nan"), *(place / COUNT for place in range(1, COUNT))]
    curve = quality_curve(known, confidences, num_points=5)
    thresholds = [threshold for threshold, _ in curve]
    assert thresholds[0] == 0
    assert thresholds[-1] == 1
    assert thresholds == sorted(set(thresholds))
    assert len(thresholds) == 6
    for threshold, fid in curve:
        # NaN is below every threshold except 0.
        heavy = [threshold > 0 and not confidence >= threshold for confidence in confidences]
        served: list[Leg | None] = ["heavy" if each else "light" for each in heavy]
        assert fid == pytest.approx(served_quality(known, list(range(COUNT)), served)["fid"])
    assert curve[0][1] > curve[2][1] > curve[-1][1]


def test_quality_over_time_uses_windows_of_served_images() -> None:
    known = features()
    places = [place % COUNT for place in range(2 * COUNT)]
    served: list[Leg | None] = ["light" if place < COUNT else "heavy" for place in range(2 * COUNT)]
    served[5] = None
    rows = quality_over_time(known, places, served, [0.5 * place for place in range(2 * COUNT)], window=COUNT - 1)
    assert [(row["start_s"], row["end_s"]) for row in rows] == [(0.0, 59.5), (60.0, 119.5)]
    light, heavy = (row["kid"] or 0.0 for row in rows)
    assert light > 10 * abs(heavy)
    assert (rows[0]["low"] or 0.0) < light < (rows[0]["high"] or 0.0)
    assert quality_over_time(known, places, served, [0.0] * len(places), window=1000) == []


def test_systems_are_compared_on_images_that_both_served() -> None:
    known = features()
    places = list(range(COUNT))
    light: list[Leg | None] = ["light"] * COUNT
    better: list[Leg | None] = ["heavy" if place % 2 else "light" for place in places]
    found = compare_served(known, places, light, better, num_resamples=30)
    assert found.difference < 0
    assert found.high is not None
    assert found.high < 0
    assert found.n == COUNT
    refused: list[Leg | None] = [None if place < 20 else "heavy" for place in places]
    assert compare_served(known, places, light, refused, num_resamples=5).n == COUNT - 20
    with pytest.raises(UsageError, match="at least 2"):
        compare_served(known, places, light, [None] * COUNT)
