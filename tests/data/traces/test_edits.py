"""Edits of traces: published mask ratios, masks of the requested area, files, and refused inputs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request, TracedEdit
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.edits import (
    SHAPES,
    EditDraws,
    MaskRatios,
    drawn_mask,
    read_mask_ratios,
    with_pixels,
)
from patchedserve.data.traces.files import load_trace, save_trace
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.serving.families.geometry import Geometry
from patchedserve.serving.families.references import CROPPED, KONTEXT
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.runs.trace_requests import blank_image, draw_requests, with_references
from patchedserve.serving.runs.trace_settings import TraceSettings

# InstGenIE section 2.2 and figure 3.
PUBLISHED = {
    "production": ((0.048, 0.061, 0.072, 0.082, 0.095, 0.110, 0.128, 0.154, 0.208), 0.112),
    "public": ((0.013, 0.018, 0.025, 0.036, 0.056, 0.155, 0.197, 0.253, 0.765), 0.193),
}
SIZE = Resolution(128, 192)


def trace_of(edits: EditDraws | None, count: int = 200, seed: int = 3) -> list[Request]:
    return generate_trace(TraceConfig(num_prompts=count, seed=seed, edits=edits), ["a cat", "a dog", "a hat"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_ratios_have_the_published_deciles_and_mean(name: str) -> None:
    ratios, (deciles, mean) = read_mask_ratios(name), PUBLISHED[name]
    drawn = [ratios.quantile(share) for share in np.random.default_rng(0).random(20_000)]
    assert np.mean(drawn) == pytest.approx(mean, abs=0.003)
    assert ratios.mean == pytest.approx(mean, abs=1e-9)
    # The standard error of a decile grows with the distance to the next decile.
    gaps = np.diff([ratios.ratios[0], *deciles, ratios.ratios[-1]])
    off = np.abs(np.quantile(drawn, np.arange(1, 10) / 10) - deciles)
    assert np.all(off < 0.15 * np.maximum(gaps[:-1], gaps[1:]))
    assert np.all(np.diff(ratios.ratios) > 0)


def test_production_has_the_published_range() -> None:
    ratios = read_mask_ratios("production")
    assert (ratios.quantile(0), ratios.quantile(1)) == (0.016, 0.421)


def test_viton_has_the_published_mean() -> None:
    ratios = read_mask_ratios("viton")
    drawn = [ratios.quantile(share) for share in np.random.default_rng(0).random(20_000)]
    assert np.mean(drawn) == pytest.approx(0.35, abs=0.005)
    assert 0 < min(drawn) < max(drawn) <= 1


def test_ratios_of_a_file_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "ratios.csv"
    path.write_text("id,mask_ratio\na,0.5\nb,0.1\nc,0.2\n")
    assert read_mask_ratios(str(path)) == MaskRatios((0.0, 0.5, 1.0), (0.1, 0.2, 0.5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ratio\n0.5\n", "must be CSV with a column mask_ratio"),
        ("mask_ratio\n", "there are no mask ratios"),
        ("mask_ratio\n0.5\nhalf\n", "ratios.csv:3: mask_ratio is 'half', but it must be a number"),
        ("mask_ratio\n1.5\n", "ratios.csv:2: mask_ratio is 1.5, but it must be above 0 and at most 1"),
        (None, "mask ratios are production, public, viton or a file"),
    ],
)
def test_files_without_ratios_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ratios.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as raised:
        read_mask_ratios(str(path))
    assert message in str(raised.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_have_their_area_and_a_latent(shape: str) -> None:
    ratios = read_mask_ratios("public")
    for seed in range(100):
        ratio = ratios.quantile(np.random.default_rng(seed).random())
        mask = drawn_mask(shape, seed, ratio, SIZE)
        assert mask.shape == (SIZE.height, SIZE.width)
        # Small masks may differ by a fraction of a pixel.
        assert abs(mask.sum() - ratio * SIZE.pixels) <= max(0.0101 * ratio * SIZE.pixels, 1)
        assert mask[::8, ::8].any()
        assert np.array_equal(mask, drawn_mask(shape, seed, ratio, SIZE))
        # Large masks have few possible positions.
        assert ratio > 0.5 or not np.array_equal(mask, drawn_mask(shape, seed + 1000, ratio, SIZE))


def test_box_masks_are_rectangles_and_shape_masks_are_connected() -> None:
    for seed in range(20):
        box, blob = (drawn_mask(shape, seed, 0.1, SIZE) for shape in ("box", "blob"))
        down, right = np.nonzero(box)
        assert box.sum() == (np.ptp(down) + 1) * (np.ptp(right) + 1)
        # A blob is connected: every row between its first and its last contains part of it.
        rows = np.nonzero(blob.any(axis=1))[0]
        assert len(rows) == np.ptp(rows) + 1


def test_adding_edits_changes_nothing_else_of_a_trace() -> None:
    ratios = read_mask_ratios("production")
    plain, few, all_of_them = (trace_of(each) for each in (None, EditDraws(0.3, ratios), EditDraws(1.0, ratios)))
    assert [replace(request, traced=None) for request in few] == plain
    assert [request.traced for request in few] != [None] * len(few)
    # A request that is an edit at a small share is the same edit at a larger share.
    pairs = [(one.traced, other.traced) for one, other in zip(few, all_of_them, strict=True) if one.traced]
    assert 30 < len(pairs) < 90
    assert all(one == other for one, other in pairs)


def test_templates_follow_zipf() -> None:
    counts = Counter(
        request.traced.image
        for request in trace_of(EditDraws(1.0, read_mask_ratios("public"), num_templates=4), 4000)
        if request.traced is not None
    )
    weights = [counts[f"emoji:{index}"] / 4000 for index in range(4)]
    assert weights == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)


def test_traces_with_edits_read_back_equal(tmp_path: Path) -> None:
    trace = trace_of(EditDraws(0.5, read_mask_ratios("viton"), strength=0.7))
    path = tmp_path / "trace.jsonl"
    save_trace(path, trace)
    assert load_trace(path) == trace
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit = next(line for line in lines if "image" in line)
    assert edit["strength"] == 0.7
    assert {"mask", "mask_ratio"} <= edit.keys()


def test_edits_by_reference_change_nothing_else_and_read_back_equal(tmp_path: Path) -> None:
    ratios = read_mask_ratios("production")
    plain, by_mask, found = (
        trace_of(each, 400) for each in (None, EditDraws(0.3, ratios), EditDraws(0.3, ratios, most_references=3))
    )
    assert [replace(request, traced=None) for request in found] == plain
    assert [each.traced is None for each in found] == [each.traced is None for each in by_mask]
    edits = [request.traced for request in found if request.traced is not None]
    assert [edit.image for edit in edits] == [each.traced.image for each in by_mask if each.traced is not None]
    assert {len(edit.references) for edit in edits} == {0, 1, 2}
    assert all(request.edited is None and request.num_steps == request.num_inference_steps for request in found)
    path = tmp_path / "trace.jsonl"
    save_trace(path, found)
    assert load_trace(path) == found
    seen = with_references(found, Geometry.of_transformer(16, 1, CROPPED), "tiny", blank_image)
    assert [each.pixels_seen for each in seen] == [
        each.resolution.pixels * (1 if each.traced is None else 2 + len(each.traced.references)) for each in found
    ]
    save_trace(path, seen)
    assert load_trace(path) == found
    with pytest.raises(UsageError, match=r"request \d+ is drawn from references, but tiny takes none"):
        with_references(found, Geometry.of_unet(8, 3), "tiny", blank_image)
    with pytest.raises(UsageError, match="references are given, but tiny takes one reference at most"):
        with_references(found, Geometry.of_transformer(16, 1, KONTEXT), "tiny", blank_image)


def test_files_of_references(tmp_path: Path) -> None:
    for name, size in (("room.png", (64, 80)), ("cat.png", (100, 48))):
        Image.new("RGB", size, (200, 100, 0)).save(tmp_path / name)
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,resolution,prompt,image,references\n0,64x80,a,room.png,cat.png;room.png\n1,64,b,,\n")
    geometry = Geometry.of_transformer(16, 1, CROPPED)
    first, second = draw_requests(TraceSettings(str(path)), ModelDefaults(), geometry=lambda: geometry)
    assert [str(each.resolution) for each in first.references] == ["64x80", "96x48", "64x80"]
    assert (first.references[0].image == (200, 100, 0)).all()
    assert second.references == ()
    assert [str(each.resolution) for each in with_references([first], geometry, "tiny", blank_image)[0].references] == [
        "64x80",
        "96x48",
        "64x80",
    ]
    masked = {"arrival_s": 0, "resolution": "64x80", "prompt": "a", "image": "room.png", "mask": "box:1"}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**masked, "mask_ratio": 0.2, "references": ["cat.png"]}) + "\n")
    (request,) = draw_requests(TraceSettings(str(path)), ModelDefaults(), geometry=lambda: geometry)
    assert request.edit is not None
    assert [each.image is request.edit.image for each in request.references] == [True, False]
    assert not geometry.has_record(request)


def test_files_of_images_and_masks(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[:32, :16] = 255
    Image.fromarray(pixels).save(tmp_path / "room.png")
    Image.fromarray(mask).save(tmp_path / "chair.png")
    line = {"arrival_s": 0, "resolution": "64", "prompt": "a chair", "image": "room.png", "mask": "chair.png"}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (request,) = load_trace(path)
    named = TracedEdit(str(tmp_path / "room.png"), str(tmp_path / "chair.png"), 0.125)
    assert request.traced == named
    edit = with_pixels(request).edit
    assert edit is not None
    assert np.array_equal(edit.image, pixels)
    assert np.array_equal(edit.mask, mask > 0)
    save_trace(tmp_path / "elsewhere" / "trace.jsonl", [with_pixels(request)])
    assert load_trace(tmp_path / "elsewhere" / "trace.jsonl") == [request]
    with pytest.raises(UsageError, match="resolution is 128x128, but the image to edit has 64x64 pixels"):
        with_pixels(replace(request, resolution=Resolution(128, 128)))


def test_edits_without_pixels_are_not_served_as_new_images() -> None:
    request = Request(0, "a cat", SIZE, 10, traced=TracedEdit("emoji:3", "ellipse:7", 0.2))
    with pytest.raises(UsageError, match="request 0 is an edit whose image was not read"):
        Geometry.of_unet(8, 3).check_edit(request)


def test_other_commands_refuse_traces_with_edits(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(path, trace_of(EditDraws(1.0, read_mask_ratios("public")), 3))
    defaults = ModelDefaults(2, 4.0, SIZE, (SIZE,))
    assert len(draw_requests(TraceSettings(str(path)), defaults, geometry=lambda: Geometry.of_unet(8, 3))) == 3
    with pytest.raises(
        UsageError, match="request 0 of the trace is an edit, and only psctl serve, simulate and bench slo take"
    ):
        draw_requests(TraceSettings(str(path)), defaults)


def test_data_set_images_are_templates() -> None:
    pytest.importorskip("resvg_py", reason="pictures are drawn with psctl[train]")
    request = Request(0, "a cat", SIZE, 10, traced=TracedEdit("emoji:3", "ellipse:7", 0.2, 0.5))
    edit = with_pixels(request).edit
    assert edit is not None
    assert edit.resolution == SIZE
    assert edit.mask_ratio == pytest.approx(0.2, rel=0.01)
    assert request.num_steps == with_pixels(request).num_steps == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strength": 0.5}, "image is missing, but edits need one"),
        ({"references": ["emoji:1"]}, "image is missing, but edits need one"),
        ({"image": "emoji:1", "strength": 0.5}, "strength is 0.5, but it is of an edit by a mask, and there is none"),
        ({"image": "emoji:1", "mask_ratio": 0.5}, "mask_ratio is 0.5, but it is of an edit by a mask"),
        ({"image": "emoji:1", "references": ["emoji:x"]}, "references is 'emoji:x', but after the colon"),
        ({"image": "emoji:1", "references": 5}, "references is 5, but it must be"),
        ({"image": "emoji:1", "mask": "box:1"}, "mask_ratio is missing, but the mask box:1 needs it"),
        ({"image": "emoji:x", "mask": "box:1", "mask_ratio": 0.1}, "image is 'emoji:x', but after the colon"),
        ({"image": "emoji:1", "mask": "blob:", "mask_ratio": 0.1}, "mask is 'blob:', but after the colon"),
        ({"image": "emoji:1", "mask": "box:1", "mask_ratio": 0}, "mask_ratio is 0.0, but it must be a number above 0"),
        ({"image": "emoji:1", "mask": "box:1", "mask_ratio": 0.1, "strength": 2}, "strength is 2.0, but it must be"),
    ],
)
def test_bad_lines_are_refused_with_line_number(tmp_path: Path, given: dict[str, object], message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival_s": 0, "resolution": "64", "prompt": "a", **given}) + "\n")
    with pytest.raises(UsageError) as raised:
        load_trace(path)
    assert str(raised.value).startswith(f"{path}:1: {message}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0}, "share of edits is 0, but it must be above 0 and at most 1"),
        ({"num_templates": 0}, "number of templates is 0"),
        ({"most_references": 0}, "number of references is 0"),
        ({"skew": -1}, "skew of templates is -1, but it must be finite and not negative"),
    ],
)
def test_invalid_sampling_settings_are_refused(given: dict[str, float], message: str) -> None:
    fields = {"share": 0.5, "ratios": read_mask_ratios("viton"), **given}
    with pytest.raises(UsageError, match=message):
        EditDraws(**fields)  # pyright: ignore[reportArgumentType]
