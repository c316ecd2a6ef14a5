"""Published mixes of sizes and steps, and the fitting of their sizes to those that are served."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import parse, parse_list
from patchedserve.data.traces.workloads import DATASET_C, fit_sizes
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.runs.trace_requests import draw_trace
from patchedserve.serving.runs.trace_settings import TraceSettings

SMALL = ModelDefaults(default_resolution=parse("256"), resolutions=parse_list("128,192,256"))


def fitted(sizes: str, served: str, own: str, native: str = "1024") -> str:
    found = fit_sizes(parse_list(sizes), parse_list(served), parse(own), parse(native))
    return ",".join(str(found[size]) for size in parse_list(sizes))


@pytest.mark.parametrize(
    ("sizes", "served", "own", "expected"),
    [
        # A model of the same size: only what it does not serve is mapped.
        ("512,768,1024,1536", "512,768,1024", "1024", "512x512,768x768,1024x1024,1024x1024"),
        # A quarter of the side.
        ("512,768,1024,1536", "128,192,256", "256", "128x128,192x192,256x256,256x256"),
        ("512,768,1024,1536", "128,192,256,384", "256", "128x128,192x192,256x256,384x384"),
        # Aspect and area: upright stays upright if there is such a size near enough.
        ("512x768,768x512", "1024,832x1216,1216x832", "1024", "832x1216,1216x832"),
        ("1024x1536", "1024,832x1216", "1024", "832x1216"),
        ("512x520", "256,512", "512", "256x256"),
        ("64x2048", "1024,128x512", "1024", "128x512"),
        # Equally near: the smaller one.
        ("512", "1024,256", "1024", "256x256"),
    ],
)
def test_sizes_are_fitted(sizes: str, served: str, own: str, expected: str) -> None:
    assert fitted(sizes, served, own) == expected


def test_dataset_c_has_the_published_mix() -> None:
    served = "512,768,1024,1536"
    requests = draw_trace(TraceSettings("dataset-c", resolutions=served, num_prompts=20_000), ModelDefaults())
    counts = Counter((request.resolution.width, request.num_inference_steps) for request in requests)
    expected = {(512, 20): 0.15, (768, 20): 0.25, (1024, 25): 0.45, (1536, 35): 0.15}
    assert counts.keys() == expected.keys()
    for shape, share in expected.items():
        assert counts[shape] / len(requests) == pytest.approx(share, abs=0.015)
    assert all(request.resolution.width == request.resolution.height for request in requests)


def test_dataset_c_differs_from_a_poisson_trace_only_in_sizes_and_steps() -> None:
    every: list[dict[str, Any]] = [{"request_rate": 3.0}, {"request_rate": 3.0, "duration_s": 20.0}]
    for settings in every:
        mix = draw_trace(TraceSettings("dataset-c", **settings), SMALL)
        poisson = draw_trace(TraceSettings("poisson", **settings), SMALL)
        assert [(r.arrival_s, r.prompt, r.seed) for r in mix] == [(r.arrival_s, r.prompt, r.seed) for r in poisson]
        assert all(one.arrival_s < other.arrival_s for one, other in pairwise(mix))


def test_dataset_c_on_a_small_model() -> None:
    requests = draw_trace(TraceSettings("dataset-c", num_prompts=400), SMALL)
    shapes = {(request.resolution.width, request.num_inference_steps) for request in requests}
    assert shapes == {(128, 20), (192, 20), (256, 25), (256, 35)}
    few = draw_trace(TraceSettings("dataset-c", num_prompts=400, num_inference_steps=2), SMALL)
    assert {request.num_inference_steps for request in few} == {2}
    assert [request.resolution for request in few] == [request.resolution for request in requests]


def test_dataset_c_keeps_sizes_that_are_all_served() -> None:
    served = parse_list("1536,1024,512,768,256")
    assert DATASET_C.sizes_on(served, parse("512")) == DATASET_C.sizes
    assert DATASET_C.sizes_on(served[1:], parse("512")) == parse_list("256,512") + parse_list("512,768")


def test_dataset_c_has_a_mix_of_its_own() -> None:
    with pytest.raises(UsageError, match="--mix is 1,1,1, but --trace dataset-c has its own: omit it"):
        draw_trace(TraceSettings("dataset-c", mix="1,1,1"), SMALL)
