"""Records on disk and in memory: damage, bounds, and failed reads and writes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.errors import RunError, UsageError
from patchedserve.serving.editing.records import FileSteps, MemorySteps
from patchedserve.serving.editing.templates import MANIFEST, TemplateStore
from patchedserve.serving.options import TemplateTiers

from ...support.edits import edit_request
from ...support.template_records import LARGE, SMALL, TEMPLATE, build_tiny, model_with, serve, some, with_records
from .test_exact import pipeline


@pytest.mark.product(most=2)
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "foreign", "manifest"])
def test_damaged_record_is_quarantined_and_the_edit_is_exact(damage: str, tmp_path: Path) -> None:
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    model = model_with(pipe, tmp_path, [request])
    (place,) = tmp_path.glob("*/" + MANIFEST)
    step = place.parent / "step-0003.safetensors"
    content = step.read_bytes()
    if damage == "truncated":
        step.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        step.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        step.unlink()
    elif damage == "foreign":
        place.write_text(place.read_text().replace("a picture", "another"))
    else:
        place.write_text(place.read_text()[:100])
    # A new store stands for another process, with nothing in memory.
    model.reuse.store = TemplateStore(tmp_path)
    with pytest.warns(UserWarning, match="is damaged .* it was put aside as"):
        assert model.prepare(request).template is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]
    assert model.prepare(request).template is None
    model = model_with(pipe, tmp_path, [request])
    assert model.prepare(request).template is not None


def test_memory_is_bounded_and_keeps_recently_read_records(tmp_path: Path) -> None:
    requests = [edit_request(0, SMALL, seed=seed, num_steps=2, template=TEMPLATE) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path, requests)
    assert model.reuse.store is not None
    keys = [model.reuse.key_of(request) for request in requests]
    records = [model.reuse.store.find(key, model.device) for key in keys if key is not None]
    assert all(record is not None for record in records)
    each = records[0].num_bytes if records[0] is not None else 0
    store = TemplateStore(tmp_path, TemplateTiers(memory_mb=2.5 * each / 1e6))
    for index in (0, 1, 0, 2):
        key = keys[index]
        assert key is not None
        assert store.find(key, model.device) is not None
    assert [some(key).digest in store._in_memory for key in keys] == [True, False, True]


def test_folder_is_bounded_and_evicts_least_recently_read_records(tmp_path: Path) -> None:
    requests = [edit_request(0, SMALL, seed=seed, num_steps=2, template=TEMPLATE) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path / "all", requests)
    keys = [key for request in requests if (key := model.reuse.key_of(request)) is not None]
    assert model.reuse.store is not None
    records = [record for key in keys if (record := model.reuse.store.find(key, model.device)) is not None]
    steps = [record.source.steps for record in records if isinstance(record.source, MemorySteps)]
    store = TemplateStore(tmp_path / "some", TemplateTiers(memory_mb=0.0, disk_mb=2.5 * records[0].num_bytes / 1e6))
    for place, key in enumerate(keys[:2]):
        store.add(key, steps[place], model.device)
        os.utime(tmp_path / "some" / key.digest / MANIFEST, (place, place))
    assert store.find(keys[0], model.device) is not None  # read now, so the other one is older
    store.add(keys[2], steps[2], model.device)
    assert {each["id"] for each in store.list()} == {keys[0].digest, keys[2].digest}
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(each["id"] for each in store.list())
    found = [store.folder, *store.folder.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600, 0o700}, "its owner's alone"
    assert store.find(keys[1], model.device) is None


def test_records_of_one_owner_do_not_evict_those_of_another(tmp_path: Path) -> None:
    """This holds for memory and disk; other owners find only records that belong to no owner."""
    pipe, owners = pipeline("sdxl"), ("b", "a", "a", "a")
    edits = [
        edit_request(0, SMALL, num_steps=2, template=TemplateSpec("a picture", seed, owner=owner))
        for seed, owner in enumerate(owners)
    ]
    model = model_with(pipe, tmp_path / "all", edits[:1])
    [first] = some(model.reuse.store).list()
    tiers = TemplateTiers(memory_mb=2.5 * first["bytes"] / 1e6, disk_mb=2.8 * first["bytes"] / 1e6)
    store = TemplateStore(tmp_path / "some", tiers)
    model = with_records(build_tiny(pipe), store, edits)
    keys = [some(model.reuse.key_of(edit)) for edit in edits]
    assert [key.owner for key in keys] == list(owners)
    assert len({key.digest for key in keys}) == 4
    assert [key.digest in store._in_memory for key in keys] == [True, False, False, True]
    assert {each["id"] for each in store.list()} == {keys[0].digest, keys[3].digest}
    of_b = edits[0]
    others = [
        replace(of_b, edit=replace(some(of_b.edit), template=TemplateSpec("a picture", 0, owner=name))) for name in "ac"
    ]
    assert [model.prepare(each).template is None for each in (of_b, *others)] == [False, True, True]
    everybodys = replace(of_b, edit=replace(some(of_b.edit), template=TemplateSpec("a picture", 0)))
    assert model.prepare(everybodys).template is None
    model.reuse.store = TemplateStore(tmp_path / "everybody")
    with_records(model, model.reuse.store, [everybodys])
    assert [model.prepare(each).template is None for each in (of_b, *others, everybodys)] == [False] * 4


def test_record_larger_than_memory_is_read_step_by_step(tmp_path: Path) -> None:
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    held = model_with(pipe, tmp_path, [request])
    streamed = model_with(pipe, tmp_path)
    streamed.reuse.store = TemplateStore(tmp_path, TemplateTiers(memory_mb=0.01))
    key = held.reuse.key_of(request)
    assert key is not None
    found = streamed.reuse.store.find(key, held.device)
    assert found is not None
    assert isinstance(found.source, FileSteps)
    assert torch.equal(serve(held, [request]).latents[0], serve(streamed, [request]).latents[0])


READER = """
import sys
from pathlib import Path
from patchedserve.data.files import lock_folder

with lock_folder(Path(sys.argv[1]), is_shared=True) as is_held:
    print(is_held, flush=True)
    sys.stdin.read()
"""


def test_record_that_another_process_reads_is_not_evicted(tmp_path: Path) -> None:
    """Replicas share a folder: none deletes a record that it or another one reads step by step."""
    requests = [edit_request(0, SMALL, num_steps=2, template=TemplateSpec("", seed)) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path, requests[:2])
    first, second, third = (some(model.reuse.key_of(request)) for request in requests)
    for age_s, key in ((2, first), (1, second)):
        os.utime(tmp_path / key.digest / MANIFEST, (age_s, age_s))
    num_bytes = some(model.reuse.store).list()[0]["bytes"]
    model.reuse.store = store = TemplateStore(tmp_path, TemplateTiers(memory_mb=0, disk_mb=1.5 * num_bytes / 1e6))
    command = [sys.executable, "-c", READER, str(tmp_path / first.digest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"
        reading = store.find(second, model.device)
        assert reading is not None
        store._make_room(third)
        assert {each["id"] for each in store.list()} == {first.digest, second.digest}
        del reading
        store._make_room(third)
        assert [each["id"] for each in store.list()] == [first.digest]
    model.reuse.use_template(requests[2], tmp_path, lambda count: None)
    assert [each["id"] for each in store.list()] == [third.digest]


def test_record_with_steps_too_large_to_stage_is_not_read(tmp_path: Path) -> None:
    request = edit_request(0, SMALL, num_steps=2, template=TEMPLATE)
    model = model_with(pipeline("sdxl"), tmp_path, [request])
    model.reuse.store = TemplateStore(tmp_path, TemplateTiers(memory_mb=0, staging_mb=0.001))
    with pytest.raises(RunError, match=r"a step of the template's record is .* MB, and --template-staging-mb is 0.001"):
        model.reuse.use_template(request, tmp_path, lambda count: None)
    with pytest.warns(UserWarning, match="template-staging-mb"):
        assert model.prepare(request).template is None


def test_record_larger_than_the_folder_limit_is_refused_and_others_stay(tmp_path: Path) -> None:
    small, large = (edit_request(0, size, num_steps=2, template=TEMPLATE) for size in (SMALL, LARGE))
    model = model_with(pipeline("sdxl"), tmp_path, [small])
    assert model.reuse.store is not None
    (kept,) = model.reuse.store.list()
    model.reuse.store = TemplateStore(tmp_path, TemplateTiers(disk_mb=1.5 * kept["bytes"] / 1e6))
    with pytest.raises(RunError, match="is larger than"):
        model.reuse.use_template(large, tmp_path, lambda count: None)
    assert [each["id"] for each in model.reuse.store.list()] == [kept["id"]]


def test_invalid_records_are_listed_as_damaged(tmp_path: Path) -> None:
    for name, content in (("a", "{}"), ("b", "[]"), ("c", "no JSON"), (".hidden", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(content)
    store = TemplateStore(tmp_path)
    assert sorted(each["id"] for each in store.list()) == ["a", "b", "c"]
    assert all(each["error"] for each in store.list())
    with pytest.raises(RunError, match="template a is damaged"):
        store.check("a")
    with pytest.raises(UsageError, match="there is no template"):
        store.remove("../elsewhere")
    store.remove("b")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "a", "c"]


def test_reuse_is_refused_if_records_lack_the_step(tmp_path: Path) -> None:
    model = build_tiny(pipeline("sd3"))
    with pytest.raises(UsageError, match="which leaves out none of 6 steps"):
        model.reuse.use_template(edit_request(0, LARGE, strength=0.99, template=TEMPLATE), tmp_path, lambda count: None)


def test_unwritable_record_is_used_from_memory(tmp_path: Path) -> None:
    request = edit_request(0, SMALL, num_steps=2, template=TEMPLATE)
    model = build_tiny(pipeline("sdxl"))
    model.reuse.masked_up_to = 1.0
    (tmp_path / "full").touch()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert model.reuse.use_template(request, tmp_path / "full", lambda count: None)
    assert model.prepare(request).template is not None
    assert not model.reuse.use_template(request, tmp_path / "full", lambda count: None)


def test_quarantined_records_count_and_are_evicted_first(tmp_path: Path) -> None:
    requests = [edit_request(0, SMALL, num_steps=2, template=TemplateSpec("", seed)) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path, requests[:1])
    (kept,) = some(model.reuse.store).list()
    aside = (tmp_path / kept["id"]).rename(tmp_path / f"{kept['id']}-1.bad")
    (aside / MANIFEST).unlink()
    os.utime(aside, (1, 1))
    model.reuse.store = TemplateStore(tmp_path, TemplateTiers(disk_mb=2.5 * kept["bytes"] / 1e6))
    for request in requests[:2]:
        model.reuse.use_template(request, tmp_path, lambda count: None)
    assert not aside.exists()
    assert len(model.reuse.store.list()) == 2
