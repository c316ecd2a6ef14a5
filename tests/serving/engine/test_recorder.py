"""Missing templates of edits are recorded in free places of the batch while the engine serves."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import TemplateTiers
from patchedserve.serving.scheduling.policies import get_policy

from ...support.edits import edit_request
from ...support.patched_models import relative_error
from ...support.tiny_models import tiny_sdxl
from ...support.waits import until

SIZE, LARGE = Resolution(64, 64), Resolution(128, 128)
TEMPLATE = TemplateSpec("a picture", 5)


def model_in(folder: Path, **bounds: float) -> ServedModel:
    model = build_model(tiny_sdxl(), name="tiny")
    model.reuse.store, model.reuse.masked_up_to = TemplateStore(folder, TemplateTiers(**bounds)), 1.0
    return model


@contextmanager
def running(model: ServedModel, collector: InMemory) -> Iterator[Engine]:
    """Run an engine in a thread of its own, and abort it at the end."""
    engine = Engine(model, get_policy("continuous"), max_batch_size=4, collector=collector, records_templates=True)
    engine.start()
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        yield engine
    finally:
        engine.abort()
        thread.join()


def test_edits_are_exact_until_their_template_is_recorded(tmp_path: Path) -> None:
    model, collector = model_in(tmp_path), InMemory(keep_latents=True)
    edit, busy = edit_request(0, SIZE, template=TEMPLATE), Request(100, "a car", SIZE, 20, 4.0)

    def follow(record: RequestRecord) -> None:
        """Keep the batch busy with new images and submit edits until one has read the record."""
        if record.reused or record.request_id == 99:
            engine.close()
        elif record.request_id < 100:
            engine.submit(replace(edit, request_id=record.request_id + 2))
        elif not any(each.reused for each in collector.records):
            engine.submit(replace(busy, request_id=record.request_id + 1))

    engine = Engine(
        model,
        get_policy("continuous"),
        max_batch_size=4,
        collector=collector,
        on_finish=follow,
        records_templates=True,
    )
    for request in (edit, replace(edit, request_id=1), busy):
        engine.submit(request)
    engine.run()
    assert engine.callback_failures.count <= 2, "of those that come after the end"
    edits = [record for record in collector.records if record.request_id < 100]
    assert {record.status for record in edits} == {"completed"}
    assert [record.reused for record in edits[:2]] == [False, False]
    reused = [record.request_id for record in edits if record.reused]
    assert reused
    assert {record.reused for record in collector.records if record.request_id >= 100} == {None}
    assert model.reuse.store is not None
    assert (model.reuse.store.num_added, len(model.reuse.store.list())) == (1, 1)
    exact, ahead = (latents_of(model_in(tmp_path / "none"), edit), latents_of(model_in(tmp_path), edit))
    assert relative_error([collector.latents[0]], [exact]) <= 1e-5
    assert relative_error([collector.latents[reused[0]]], [ahead]) <= 1e-5
    assert relative_error([exact], [ahead]) > 1e-3


def latents_of(model: ServedModel, request: Request) -> torch.Tensor:
    engine = Engine(model, get_policy("continuous"), collector=InMemory(keep_latents=True))
    engine.submit(request)
    engine.close()
    return engine.run().latents[request.request_id]


def test_engine_that_ends_during_recording_leaves_no_partial_record(tmp_path: Path) -> None:
    model, collector = model_in(tmp_path), InMemory()
    long = edit_request(0, SIZE, num_steps=500, template=TEMPLATE)
    # It takes 2 of the steps, so it ends long before its template is recorded.
    edit = replace(long, edit=edit_request(0, SIZE, strength=0.004, template=TEMPLATE).edit)
    with running(model, collector) as engine:
        engine.submit(edit)
        until(lambda: any(tmp_path.glob(".*/step-0003.safetensors")))
    assert list(tmp_path.iterdir()) == []
    assert model.reuse.store is not None
    assert model.reuse.store.num_added == 0


def test_recording_failure_is_reported_once_and_edits_stay_exact(tmp_path: Path) -> None:
    model, collector = model_in(tmp_path, memory_mb=0.001, disk_mb=0.001), InMemory()
    edit = edit_request(0, SIZE, num_steps=2, template=TEMPLATE)
    with warnings.catch_warnings(record=True) as caught, running(model, collector) as engine:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "template")
        engine.submit(edit)
        until(lambda: len(caught) > 0)
        engine.submit(replace(edit, request_id=1))
        until(lambda: len(collector.records) == 2)
        other = replace(edit, request_id=2, num_inference_steps=3)
        engine.submit(other)
        until(lambda: len(caught) > 1)
    told = [str(each.message) for each in caught]
    assert len(told) == 2, "of each template once"
    assert all(
        "could not be recorded, and is not tried again: the template's record is larger" in each for each in told
    )
    assert [record.status for record in collector.records] == ["completed"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "template"), [("all", TEMPLATE), ("box", None)])
def test_templates_that_no_edit_would_read_are_not_recorded(
    kind: str, template: TemplateSpec | None, tmp_path: Path
) -> None:
    model, collector = model_in(tmp_path), InMemory()
    model.reuse.masked_up_to = 0.9
    with running(model, collector) as engine:
        engine.submit(edit_request(0, LARGE, kind, num_steps=2, template=template))
        until(lambda: len(collector.records) == 1)
        # Its template would be recorded after that of the first edit, if there were one.
        engine.submit(edit_request(1, LARGE, num_steps=3, template=TEMPLATE))
        until(lambda: any(tmp_path.glob("*/manifest.json")))
    assert model.reuse.store is not None
    assert [each["about"]["num_inference_steps"] for each in model.reuse.store.list()] == [3]
