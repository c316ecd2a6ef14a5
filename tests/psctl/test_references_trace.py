"""Traces with edits by reference: served, and on the virtual clock."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.requests import Request
from patchedserve.data.tables.schemas import RECORDS, read_rows
from patchedserve.data.traces.edits import image_of
from patchedserve.data.traces.files import load_trace
from patchedserve.serving.families.geometry import Geometry
from patchedserve.serving.families.references import CROPPED
from patchedserve.serving.runs.trace_requests import with_references

from ..conftest import RunPsctl
from ..support.plain import plain_image
from ..support.tiny_families import tiny_klein
from ..support.tiny_models import save_tiny, tiny_sdxl

TRACE = ("--edits", "0.6", "--edit-references", "2", "--templates", "3", "--num-prompts", "6", "--seed", "3", "--json")
TABLE = "combination,ms\n32x32,10\n64x64,40\n4*64x64,160\n4*32x32 + 4*64x64,200\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    settings: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 16}
    return save_tiny(tmp_path / "klein", tiny_klein(), **settings, resolutions=["64x64", "96x64"])


def results(run: Any, folder: Path) -> tuple[list[Request], list[dict[str, Any]]]:
    assert run.returncode == 0, run.stderr
    run_dir = folder / json.loads(run.stdout)["run_dir"]
    return load_trace(run_dir / "trace.jsonl"), read_rows(run_dir / "records.parquet", RECORDS)


@pytest.mark.slow
def test_served_images_follow_their_references(run_psctl: RunPsctl, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="pictures are drawn with psctl[train]")
    where = {"PSCTL_MODEL": str(model), "PSCTL_DTYPE": "float32"}
    serve = ("serve", *TRACE, "--request-rate", "50", "--slo-scale", "500", "--policy", "continuous")
    run = run_psctl(*serve, "--save-dir", tmp_path / "images", **where)
    trace, records = results(run, tmp_path)
    seen = with_references(trace, Geometry.of_transformer(16, 1, CROPPED), "klein", image_of)
    assert {len(request.references) for request in seen} == {0, 1, 2}
    for request, record in zip(seen, records, strict=True):
        drawn = np.asarray(Image.open(tmp_path / "images" / f"{request.request_id:03}.png"), dtype=int)
        expected = np.asarray(plain_image(tiny_klein(), request, max_sequence_length=16))
        assert np.abs(drawn - expected).max() <= 1, request.request_id
        assert record["status"] == "completed"
        assert (record["strength"], record["mask_ratio"]) == (None, None)
        assert (record["references"] or "").split() == [str(each.resolution) for each in request.references]
    # What a request takes alone depends on what it sees.
    wanted = {" beside ".join([str(each.resolution)] * (1 + len(each.references))) + ", 2 steps" for each in seen}
    assert json.loads(run.stdout)["standalone_latency"].keys() == wanted


def test_references_take_time_on_the_virtual_clock(run_psctl: RunPsctl, model: Path, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(TABLE)
    where = {"PSCTL_MODEL": str(model)}
    simulate = ("simulate", "--latency", tmp_path / "steps.csv", "--request-rate", "0.1", "--policy", "continuous")
    trace, records = results(run_psctl(*simulate, *TRACE, "--resolutions", "32,64", **where), tmp_path)
    latency_s: dict[tuple[str, int], set[float]] = {}
    for request, record in zip(trace, records, strict=True):
        seen = 0 if request.traced is None else 1 + len(request.traced.references)
        latency_s.setdefault((str(request.resolution), seen), set()).add(round(record["latency_s"], 6))
    assert all(len(alike) == 1 for alike in latency_s.values())
    # An image of 32 px with three references of its size has as many pixels as one of 64 px; latencies are on a line.
    for (size, seen), alike in latency_s.items():
        assert alike == {round(2 * (0.01 if size == "32x32" else 0.04) * (1 + seen), 6)}, (size, seen)
    run = run_psctl(*simulate, *TRACE, PSCTL_MODEL=str(save_tiny(tmp_path / "sdxl", tiny_sdxl())))
    assert run.returncode == 2
    assert run.stderr.endswith("sdxl takes none\n")
    for words, message in (
        (
            ("--edits", "1", "--edit-references", "2", "--mask-ratios", "public"),
            "--mask-ratios is public, but it is of",
        ),
        (("--edit-references", "2"), "there are none: add --edits"),
        (("--edits", "1", "--edit-references", "0"), "number of references is 0"),
        (("--edits", "1", "--edit-references", "20", "--num-prompts", "100"), "references are given, but"),
    ):
        run = run_psctl(*simulate, *words, **where)
        assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
        assert message in run.stderr


def test_sweeps_simulate_edits_by_masks(run_psctl: RunPsctl, tmp_path: Path) -> None:
    """Without records they compute all pixels, as new images do; no image is read."""
    (tmp_path / "steps.csv").write_text(TABLE)
    tables = ("--latency", "steps.csv", "--plain-latency", "steps.csv", "--resolutions", "32,64")
    sweep = ("bench", "slo", "--on", "simulator", *tables, "--systems", "bucketed", "--rates", "5", "--json")
    where = {"PSCTL_MODEL": str(save_tiny(tmp_path / "sdxl", tiny_sdxl(), num_inference_steps=2))}
    plain, edits = (
        json.loads(run_psctl(*sweep, *more, **where).stdout)["engines"]["simulator"]["points"]
        for more in ((), ("--edits", "0.5", "--mask-ratios", "public"))
    )
    assert [point["latency_p95"] for point in edits] == [point["latency_p95"] for point in plain]


@pytest.mark.slow
def test_sweeps_serve_edits_by_reference(run_psctl: RunPsctl, model: Path, tmp_path: Path) -> None:
    where = {"PSCTL_MODEL": str(model), "PSCTL_DTYPE": "float32"}
    (tmp_path / "steps.csv").write_text(TABLE)
    sides = {
        "simulator": ("--latency", "steps.csv", "--plain-latency", "steps.csv", "--resolutions", "32,64"),
        "engine": ("--warmup-requests", "2"),
    }
    for side, own in sides.items():
        if side == "engine":
            pytest.importorskip("resvg_py", reason="pictures are drawn with psctl[train]")
        sweep = ("bench", "slo", "--on", side, *own, "--systems", "diffusers-fcfs,bucketed", "--rates", "50")
        run = run_psctl(*sweep, *TRACE, "--slo-scale", "1000", **where)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        points = next(iter(found["engines"].values()))["points"]
        assert [point["slo_attainment_rate"] for point in points] == [1, 1]
        small, large = ("32x32", "64x64") if side == "simulator" else ("64x64", "96x64")
        alone = found["standalone_s"]
        assert {name.count("beside") for name in alone} == {0, 1, 2}
        assert {name.split(" ")[0] for name in alone} == {small, large}
        if side == "simulator":
            for name, time_s in alone.items():
                expected = 2 * (0.01 if name.startswith(small) else 0.04) * (1 + name.count("beside"))
                assert time_s == pytest.approx(expected)
