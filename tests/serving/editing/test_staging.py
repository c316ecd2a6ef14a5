"""Steps of records are read ahead, unit by unit, within a memory bound."""

import gc
import time
from pathlib import Path

import pytest
import torch

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.requests import Request
from patchedserve.data.templates import unit_of
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import TemplateTiers
from patchedserve.serving.patched.stepper import PatchedStepper

from ...support.edits import edit_request
from ...support.template_records import SMALL, TEMPLATE, model_with, some
from .test_exact import pipeline


def names_of(model: ServedModel, request: Request) -> list[str]:
    """Return the operators in the record of an edit; the record is in memory."""
    store = some(model.reuse.store)
    return list(some(store.find(some(model.reuse.key_of(request)), model.device)).source.steps[0][0])


def units_of(model: ServedModel) -> tuple[str, ...]:
    assert isinstance(model.stepper, PatchedStepper)
    return model.stepper.masked.units


def test_next_step_of_a_record_is_read_during_computation(tmp_path: Path) -> None:
    request = edit_request(0, SMALL, num_steps=6, template=TEMPLATE)
    model = model_with(pipeline("sdxl"), tmp_path, [request])
    key = some(model.reuse.key_of(request))
    step_mb = some(some(model.reuse.store).find(key, model.device)).num_bytes / 6e6
    store = TemplateStore(tmp_path, TemplateTiers(memory_mb=0, staging_mb=3.5 * step_mb))
    record, folder = some(store.find(key, model.device)), tmp_path / key.digest
    names, units = names_of(model, request), units_of(model)

    def read(step: int) -> list[torch.Tensor]:
        return [row[name] for row in record.read_rows(step, units) for name in names]

    first = read(0)
    record.expect(1, units)
    read(5)  # units are read in order, so by now the second step has been read, too
    (folder / "step-0001.safetensors").unlink()
    assert [each.shape for each in read(1)] == [each.shape for each in first]
    for step in (2, 3, 4, 5):
        read(step)
    with pytest.raises(FileNotFoundError):
        read(1)  # no longer among the steps in memory
    (folder / "step-0003.safetensors").rename(folder / "step-0001.safetensors")
    read(1)


def test_staged_steps_are_bounded(tmp_path: Path) -> None:
    requests = [edit_request(number, SMALL, num_steps=6, template=TemplateSpec("", number)) for number in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path, requests)
    units, device = units_of(model), model.device
    step_mb = some(some(model.reuse.store).find(some(model.reuse.key_of(requests[0])), device)).num_bytes / 6e6
    store = TemplateStore(tmp_path, TemplateTiers(memory_mb=0, staging_mb=4.5 * step_mb))
    records = [some(store.find(some(model.reuse.key_of(request)), device)) for request in requests]

    def staged() -> set[tuple[int, int]]:
        assert store.staging.num_bytes <= 4.5e6 * step_mb
        places = {(each._number, step): (index, step) for index, each in enumerate(records) for step in range(6)}
        return {places[key] for key in store.staging._staged}

    for step in range(3):
        in_use = [record.read_rows(step, units) for record in records]
        for record in records:
            record.expect(step + 1, units)
        # The steps that a pass reads, and the one next step that still fits.
        assert staged() == {(0, step), (1, step), (2, step), (0, step + 1)}
        del in_use
    # Two edits read one record at two steps; steps read ahead for the other records may remain.
    in_use = [records[0].read_rows(step, units) for step in (3, 4)]
    assert {(0, 3), (0, 4)} <= staged()
    del records[1:], record, in_use
    gc.collect()
    assert {index for index, _ in staged()} == {0}


def test_pass_waits_only_for_the_layers_it_needs(tmp_path: Path) -> None:
    request = edit_request(0, SMALL, num_steps=2, template=TEMPLATE)
    model = model_with(pipeline("sdxl"), tmp_path, [request])
    names, units = names_of(model, request), units_of(model)
    key = some(model.reuse.key_of(request))
    in_units = {unit: [name for name in names if unit_of(name) == unit] for unit in units}
    step_mb = some(some(model.reuse.store).find(key, model.device)).num_bytes / 2e6
    # Reading a step takes a second; with a limited link, records are not kept in memory, though they would fit.
    store = TemplateStore(tmp_path, link_mbps=step_mb)
    record = some(store.find(key, model.device))
    start_s = time.perf_counter()
    rows = record.read_rows(0, units)
    assert rows[0][in_units[units[0]][0]].isfinite().all()
    first = store.staging._staged[record._number, 0]
    loads = [first._loads[unit] for unit in units]
    assert not loads[-1].done()
    assert rows[1][in_units[units[-1]][-1]].isfinite().all()
    assert time.perf_counter() - start_s >= 0.99
    assert all(load.done() for load in loads)  # they are read in the order of the units
    # Loads that are no longer expected are dropped unless they have begun.
    record.expect(1, units)
    record.expect(1, units[-1:])
    assert len(store.staging._staged[record._number, 1]._loads) <= 2
