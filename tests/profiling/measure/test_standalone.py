"""Standalone latencies are those of plain diffusers for every engine, and kept for the same circumstances."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.measure import standalone
from patchedserve.profiling.measure.standalone import TABLE_FILE, read_standalone, standalone_latencies
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

from ...support.tiny_models import tiny_sdxl

REQUEST = Request(0, "a fox", Resolution(32, 32), num_inference_steps=2, guidance_scale=3.0)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_sdxl()


def served(pipe: Any, options: EngineOptions, name: str = "tiny", fingerprint: str = "f") -> ServedModel:
    return build_model(pipe, name=name, fingerprint=fingerprint, defaults=ModelDefaults(), options=options)


def num_measured(model: ServedModel, tables: Path) -> int:
    measured: list[Any] = []
    standalone_latencies(model, [REQUEST], tables, on_measure=measured.append)
    return len(measured)


@pytest.mark.slow
def test_whatever_serves_it_is_plain_diffusers_that_is_measured(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: list[str] = []
    serve_alone = standalone._serve_alone
    monkeypatch.setattr(
        standalone,
        "_serve_alone",
        lambda model, *rest: steppers.append(model.stepper.name) or serve_alone(model, *rest),
    )
    settings = [
        EngineOptions(cache=CacheOptions("interval", patch_size=4)),
        EngineOptions(),
        EngineOptions("plain"),
        EngineOptions(order="patch", strategy="stitch"),
    ]
    assert [num_measured(served(pipe, options), tmp_path) for options in settings] == [1, 0, 0, 0]
    assert set(steppers) == {"plain"}
    # In the faster of its memory formats.
    assert len(list(tmp_path.glob("plain-*.json"))) == 1
    # The same files under another name are the same model; other files under the same name are not.
    assert num_measured(served(pipe, EngineOptions(), name="./tiny"), tmp_path) == 0
    assert num_measured(served(pipe, EngineOptions(), fingerprint="g"), tmp_path) == 1
    assert len(read_standalone(tmp_path / TABLE_FILE)) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_threads_count(pipe: Any, tmp_path: Path) -> None:
    model, threads = served(pipe, EngineOptions("plain")), torch.get_num_threads()
    assert num_measured(model, tmp_path) == 1
    torch.set_num_threads(threads + 1)
    try:
        assert num_measured(model, tmp_path) == 1
    finally:
        torch.set_num_threads(threads)
    assert num_measured(model, tmp_path) == 0


def test_a_table_of_before_is_measured_anew_and_a_later_one_is_refused(pipe: Any, tmp_path: Path) -> None:
    model, table = served(pipe, EngineOptions("plain")), tmp_path / TABLE_FILE
    for version in (1, 2):
        old = {"version": version, "rows": [{"key": {}, "latency_s": 1.0, "samples_s": [1.0]}]}
        table.write_text(json.dumps(old))
        assert num_measured(model, tmp_path) == 1
        assert len(read_standalone(table)) == 1
    table.write_text(json.dumps({"version": 99, "rows": []}))
    with pytest.raises(UsageError, match="version 99"):
        num_measured(model, tmp_path)
