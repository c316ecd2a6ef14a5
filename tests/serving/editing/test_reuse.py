"""Edits that read a template's record: exact where nothing is read, near where the rest of the image is the same."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import KEEPS, Keep
from patchedserve.serving.editing.templates import MANIFEST, TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.policies import get_policy

from ...support.edits import edit_request, mask_of
from ...support.patched_models import relative_error
from ...support.tiny_models import SAMPLERS, plain_latents
from .test_exact import pipeline

SMALL, LARGE, WIDE = Resolution(64, 64), Resolution(128, 128), Resolution(96, 64)
TEMPLATE = TemplateSpec("a picture", 5)


def model_with(pipe: Any, folder: Path, requests: Sequence[Request] = (), keep: Keep = "all") -> ServedModel:
    """With the records of these edits' templates."""
    model = build_model(pipe, name="tiny")
    model.use_keep(keep)
    model.templates, model.masked_up_to = TemplateStore(folder), 1.0
    for request in requests:
        key = model.template_key(request)
        assert key is not None
        if model.templates.find(key, model.device) is None:
            model.templates.add(key, model.recorded(request), model.device)
    return model


def serve(model: ServedModel, requests: Sequence[Request]) -> RunResult:
    engine = Engine(model, get_policy("continuous"), max_batch_size=8, collector=InMemory(keep_latents=True))
    for request in requests:
        engine.submit(request)
    engine.close()
    result = engine.run()
    assert [record.reason for record in result.records] == [None] * len(requests)
    return result


def some(value: Any) -> Any:
    assert value is not None
    return value


def edits() -> list[Request]:
    return [
        edit_request(0, SMALL, "line", template=TEMPLATE),
        edit_request(1, LARGE, "ellipse", 0.5, num_steps=9, template=TEMPLATE),
        edit_request(2, WIDE, "line", num_steps=4, guidance_scale=1.0, template=TEMPLATE),
    ]


@pytest.mark.parametrize(
    ("family", "sampler", "keep"),
    [
        *(
            (family, None, "all")
            for family in ("sd", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")
        ),
        *(("sdxl", name, "all") for name in SAMPLERS),
        *((family, None, keep) for family in ("sd", "sdxl", "sd3") for keep in ("outputs", "kv")),
    ],
)
def test_an_edit_of_the_whole_image_is_its_twin(family: str, sampler: str | None, keep: Keep, tmp_path: Path) -> None:
    pipe, requests = pipeline(family, sampler), [edit_request(0, LARGE, "all", template=TEMPLATE, num_steps=5)]
    reused = serve(model_with(pipe, tmp_path, requests, keep), requests)
    twin = serve(build_model(pipe, name="tiny"), requests)
    assert relative_error([reused.latents[0]], [twin.latents[0]]) <= 1e-3


@pytest.mark.parametrize(
    ("family", "keep"),
    [
        *(
            (each, "all")
            for each in ("sd", "sdxl", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")
        ),
        *((family, keep) for family in ("sdxl", "sd3") for keep in ("outputs", "kv")),
    ],
)
def test_edits_in_a_mixed_batch_are_those_alone(family: str, keep: Keep, tmp_path: Path) -> None:
    pipe = pipeline(family)
    model = model_with(pipe, tmp_path, edits(), keep)
    shares = [model.family.geometry.active_share(request.edit) for request in edits() if request.edit]
    assert max(shares) < 1
    new = Request(3, "a car", LARGE, 5, 4.0, seed=2)
    exact = edit_request(4, SMALL, seed=1)
    together = serve(model, [*edits(), new, exact])
    for request in edits():
        alone = serve(model, [replace(request, request_id=0)])
        assert relative_error([together.latents[request.request_id]], [alone.latents[0]]) <= 1e-5
    assert relative_error([together.latents[3][0]], [plain_latents(pipe, new)]) <= 1e-3


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_outside_the_mask_latents_end_as_the_images_and_inside_near_the_twins(family: str, tmp_path: Path) -> None:
    pipe, request = pipeline(family), edit_request(0, LARGE, template=TEMPLATE)
    model = model_with(pipe, tmp_path, [request])
    prepared = model.prepare(request)
    assert prepared.template is not None
    known = prepared.known
    assert known is not None
    reused = serve(model, [request]).latents[0]
    twin = serve(build_model(pipe, name="tiny"), [request]).latents[0]
    outside = ~known.mask.expand_as(known.clean)
    assert torch.equal(reused[outside], known.clean[outside])
    # Random weights; what trained ones make of it is measured elsewhere.
    # Of few positions in few blocks of FLUX, less goes outwards.
    assert (1e-4 if family == "flux" else 1e-3) <= relative_error([reused], [twin]) <= 0.5


def test_large_masks_are_not_worth_a_masked_pass(tmp_path: Path) -> None:
    requests = [edit_request(index, LARGE, kind, template=TEMPLATE) for index, kind in enumerate(("box", "all"))]
    model = model_with(pipeline("sdxl"), tmp_path, requests[:1])
    model.masked_up_to = 0.9
    shares = [model.family.geometry.active_share(request.edit) for request in requests if request.edit]
    assert shares[0] < 0.9 < shares[1]
    assert [model.prepare(request).template is None for request in requests] == [False, True]


def test_without_a_record_an_edit_is_as_without_a_template(tmp_path: Path) -> None:
    request, plain = edit_request(0, LARGE, template=TEMPLATE), edit_request(0, LARGE)
    model = model_with(pipeline("sdxl"), tmp_path)
    assert model.prepare(request).template is None
    assert model.prepare(replace(request, edit=None)).template is None
    assert torch.equal(serve(model, [request]).latents[0], serve(model, [plain]).latents[0])
    model.templates = None
    assert not torch.equal(serve(model, [request]).latents[0], serve(model, [plain]).latents[0])


def test_a_record_is_for_one_image_schedule_prompt_seed_and_number_of_rows(tmp_path: Path) -> None:
    request = edit_request(0, LARGE, template=TEMPLATE)
    model = model_with(pipeline("sdxl"), tmp_path, [request])
    edit = request.edit
    assert edit is not None
    same = [
        replace(request, seed=9, prompt="a dog"),
        replace(request, guidance_scale=9.0),
        replace(request, edit=edit_request(0, LARGE, "ellipse", template=TEMPLATE).edit),
        replace(request, edit=replace(edit, strength=0.5)),
    ]
    others = [
        replace(request, num_inference_steps=7),
        replace(request, guidance_scale=1.0),
        replace(request, edit=replace(edit, template=None)),
        replace(request, edit=replace(edit, template=TemplateSpec("", 5))),
        replace(request, edit=replace(edit, template=TemplateSpec("a picture", 6))),
        replace(request, edit=edit_request(0, LARGE, seed=1, template=TEMPLATE).edit),
        # It begins at the first step, from the noised image.
        replace(request, num_inference_steps=6, edit=replace(edit, strength=0.99)),
    ]
    assert [model.prepare(each).template is None for each in same] == [False] * len(same)
    assert model.family.geometry.first_step(others[-1]) == 1
    assert [model.prepare(each).template is None for each in others[:-1]] == [True] * (len(others) - 1)


def test_records_that_keep_something_else_are_others(tmp_path: Path) -> None:
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    sizes = {}
    for keep in KEEPS:
        model = model_with(pipe, tmp_path, keep=keep)
        assert model.prepare(request).template is None
        model = model_with(pipe, tmp_path, [request], keep)
        assert model.prepare(request).template is not None
        assert model.templates is not None
        sizes[keep] = model.templates.list()[0]["bytes"]
    assert model.templates is not None
    assert {each["about"]["keep"]: each["bytes"] for each in model.templates.list()} == sizes
    assert 2 * sizes["outputs"] < sizes["kv"] < sizes["all"]


@pytest.mark.parametrize("keep", ["outputs", "kv"])
def test_what_is_computed_of_all_pixels_is_nearer_to_the_twin(keep: Keep, tmp_path: Path) -> None:
    """Convolutions then see what an edit sends outwards."""
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    twin = serve(build_model(pipe, name="tiny"), [request]).latents[0]
    errors = {
        kept: relative_error([serve(model_with(pipe, tmp_path, [request], kept), [request]).latents[0]], [twin])
        for kept in (keep, "all")
    }
    assert 1e-4 < errors[keep] < errors["all"]


@pytest.mark.parametrize(("family", "sampler"), [("sdxl", "dpm++"), ("sd3", None)])
def test_steps_that_are_computed_whole_are_the_twins(family: str, sampler: str | None, tmp_path: Path) -> None:
    pipe, request = pipeline(family, sampler), edit_request(0, LARGE, template=TEMPLATE)
    twin = serve(build_model(pipe, name="tiny"), [request]).latents[0]
    model, errors = model_with(pipe, tmp_path, [request]), []
    for count in (0, 2, 4, 6):
        edit = replace(some(request.edit), full_steps=count)
        found = serve(model, [replace(request, edit=edit)]).latents[0]
        errors.append(relative_error([found], [twin]))
        # Among others, which read records at each of their steps.
        together = serve(model, [replace(request, edit=edit, request_id=9), *edits()]).latents[9]
        assert relative_error([together], [found]) <= 1e-5
    assert torch.equal(found, twin)
    assert errors[0] > errors[2] > errors[3] == 0
    with pytest.raises(UsageError, match="full_steps is 7, but the edit takes 6 steps"):
        model.check_request(replace(request, edit=replace(some(request.edit), full_steps=7)))


def test_cells_around_the_mask_are_computed_and_do_not_change(tmp_path: Path) -> None:
    pipe, request = pipeline("sd3"), edit_request(0, LARGE, "line", template=TEMPLATE)
    twin = serve(build_model(pipe, name="tiny"), [request]).latents[0]
    model, shares, errors = model_with(pipe, tmp_path, [request]), [], []
    known = some(model.prepare(request).known)
    outside = ~known.mask.expand_as(known.clean)
    for dilate in (0, 1, 2, 64):
        edit = replace(some(request.edit), dilate=dilate)
        shares.append(model.family.geometry.active_share(edit))
        found = serve(model, [replace(request, edit=edit)]).latents[0]
        assert torch.equal(found[outside], known.clean[outside])
        errors.append(relative_error([found], [twin]))
    assert shares == sorted(set(shares))
    assert shares[-1] == 1
    assert errors[0] > errors[-1]
    assert errors[-1] <= 1e-3


def drawn_and_recorded(model: ServedModel, folder: Path, request: Request) -> tuple[Request, Any]:
    """An edit of the whole image that a request has drawn, with its record, and the image's latents."""
    spool = folder / "spool"
    spool.mkdir(parents=True)
    model.start_trajectory(request, spool)
    engine = Engine(
        model, get_policy("continuous"), collector=InMemory(keep_images=True, keep_latents=True)
    )  # fmt: skip
    engine.submit(request)
    engine.submit(Request(7, "another", WIDE, 3, 2.0))
    engine.close()
    result = engine.run()
    pixels, model.templates = np.asarray(result.images[0]), TemplateStore(folder / "records")
    model.end_trajectory(request, pixels, result.latents[0], model.templates)
    assert model.trajectories == {}
    edit = EditSpec(pixels, np.ones(pixels.shape[:2], bool), template=TemplateSpec(kind="trajectory"))
    return replace(request, edit=edit), result.latents[0]


@pytest.mark.parametrize(
    ("family", "sampler", "keep"),
    [
        ("sdxl", "euler", "all"),
        ("sdxl", "dpm++", "kv"),
        ("sdxl", "euler-ancestral", "outputs"),
        *((family, None, "all") for family in ("sd", "sd3", "flux")),
        ("sd3", None, "outputs"),
    ],
)
def test_an_edit_that_asks_for_what_was_drawn_is_the_image_itself(
    family: str, sampler: str | None, keep: Keep, tmp_path: Path
) -> None:
    pipe, request = pipeline(family, sampler), Request(0, "a red hat", LARGE, 20, 4.0, seed=3)
    model = build_model(pipe, name="tiny")
    model.use_keep(keep)
    model.masked_up_to = 1.0
    whole, latents = drawn_and_recorded(model, tmp_path, request)
    assert relative_error([latents], [plain_latents(pipe, request)[None]]) <= 1e-3
    # Another process, which reads the files, step by step.
    model.templates = TemplateStore(tmp_path / "records", memory_mb=0)
    masks = [mask_of(LARGE, kind) for kind in ("box", "line", "speckles", "all")]
    edits = [replace(whole, request_id=index, edit=replace(some(whole.edit), mask=m)) for index, m in enumerate(masks)]
    tail = replace(edits[0], request_id=9, prompt="a dog", edit=replace(some(edits[0].edit), strength=0.5))
    prepared = model.prepare(tail)
    assert prepared.template is not None
    known = some(prepared.known)
    outside = ~known.mask.expand_as(known.clean)
    result = serve(model, [*edits, replace(edits[0], request_id=8, prompt="a dog"), tail])
    for edit in edits:
        assert relative_error([result.latents[edit.request_id]], [latents]) <= 1e-3
    for number in (8, 9):
        assert torch.equal(result.latents[number][outside], latents[outside])
        assert relative_error([result.latents[number]], [latents]) > 1e-2


def test_a_generations_record_is_for_its_image_steps_and_guidance(tmp_path: Path) -> None:
    model = build_model(pipeline("sdxl"), name="tiny")
    whole, _ = drawn_and_recorded(model, tmp_path, Request(0, "a red hat", LARGE, 4, 4.0, seed=3))
    edit = replace(some(whole.edit), mask=mask_of(LARGE))
    model.masked_up_to = 1.0
    same = [replace(whole, edit=edit), replace(whole, edit=edit, prompt="a dog", seed=5, negative_prompt="grey")]
    assert all(model.prepare(each).template is not None for each in same)
    others = [
        replace(whole, edit=edit, num_inference_steps=5),
        replace(whole, edit=edit, guidance_scale=3.0),
        replace(whole, edit=replace(edit, image=edit.image ^ 1)),
        replace(whole, edit=replace(edit, template=TemplateSpec())),
    ]
    for other in others:
        prepared = model.prepare(other)
        assert prepared.template is None
        assert some(prepared.known).trajectory is None
    for other in others[:3]:
        with pytest.raises(UsageError, match="there is no record of the image's generation"):
            model.use_template(other, tmp_path, lambda count: None)
    assert not model.use_template(same[0], tmp_path, lambda count: None)
    with pytest.raises(UsageError, match="72x64: for a record of the image, width and height must be multiples of 32"):
        model.start_trajectory(Request(0, "a", Resolution(72, 64), 4), tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "foreign", "manifest"])
def test_a_damaged_record_is_put_aside_and_the_edit_is_exact(damage: str, tmp_path: Path) -> None:
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
    # Another process, which has nothing in memory.
    model.templates = TemplateStore(tmp_path)
    with pytest.warns(UserWarning, match="is damaged .* it was put aside as"):
        assert model.prepare(request).template is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]
    assert model.prepare(request).template is None
    model = model_with(pipe, tmp_path, [request])
    assert model.prepare(request).template is not None


def test_memory_is_bounded_and_what_was_read_last_stays(tmp_path: Path) -> None:
    requests = [edit_request(0, SMALL, seed=seed, num_steps=2, template=TEMPLATE) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path, requests)
    assert model.templates is not None
    keys = [model.template_key(request) for request in requests]
    records = [model.templates.find(key, model.device) for key in keys if key is not None]
    assert all(record is not None for record in records)
    each = records[0].num_bytes if records[0] is not None else 0
    store = TemplateStore(tmp_path, memory_mb=2.5 * each / 1e6)
    for index in (0, 1, 0, 2):
        key = keys[index]
        assert key is not None
        assert store.find(key, model.device) is not None
    assert list(store._held) == [keys[index].digest for index in (0, 2) if keys[index] is not None]  # type: ignore[union-attr]


def test_the_folder_is_bounded_and_what_was_read_longest_ago_makes_room(tmp_path: Path) -> None:
    requests = [edit_request(0, SMALL, seed=seed, num_steps=2, template=TEMPLATE) for seed in range(3)]
    model = model_with(pipeline("sdxl"), tmp_path / "all", requests)
    keys = [key for request in requests if (key := model.template_key(request)) is not None]
    assert model.templates is not None
    records = [record for key in keys if (record := model.templates.find(key, model.device)) is not None]
    store = TemplateStore(tmp_path / "some", memory_mb=0.0, disk_mb=2.5 * records[0].num_bytes / 1e6)
    for place, key in enumerate(keys[:2]):
        store.add(key, records[place].steps or (), model.device)
        os.utime(tmp_path / "some" / key.digest / MANIFEST, (place, place))
    assert store.find(keys[0], model.device) is not None  # read now, so that the other one is older
    store.add(keys[2], records[2].steps or (), model.device)
    assert {each["id"] for each in store.list()} == {keys[0].digest, keys[2].digest}
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(each["id"] for each in store.list())
    assert store.find(keys[1], model.device) is None


def test_a_record_that_does_not_fit_into_memory_is_read_step_by_step(tmp_path: Path) -> None:
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    held = model_with(pipe, tmp_path, [request])
    streamed = model_with(pipe, tmp_path)
    streamed.templates = TemplateStore(tmp_path, memory_mb=0.01)
    key = held.template_key(request)
    assert key is not None
    found = streamed.templates.find(key, held.device)
    assert found is not None
    assert found.steps is None
    assert torch.equal(serve(held, [request]).latents[0], serve(streamed, [request]).latents[0])


def test_a_record_larger_than_the_folder_may_be_is_refused_and_others_stay(tmp_path: Path) -> None:
    small, large = (edit_request(0, size, num_steps=2, template=TEMPLATE) for size in (SMALL, LARGE))
    model = model_with(pipeline("sdxl"), tmp_path, [small])
    assert model.templates is not None
    (kept,) = model.templates.list()
    model.templates = TemplateStore(tmp_path, disk_mb=1.5 * kept["bytes"] / 1e6)
    with pytest.raises(RunError, match="is larger than"):
        model.use_template(large, tmp_path, lambda count: None)
    assert [each["id"] for each in model.templates.list()] == [kept["id"]]


def test_what_is_no_record_is_listed_as_damaged(tmp_path: Path) -> None:
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


def test_reuse_is_refused_where_records_have_no_such_step(tmp_path: Path) -> None:
    model = build_model(pipeline("sd3"), name="tiny")
    with pytest.raises(UsageError, match="which leaves out none of 6 steps"):
        model.use_template(edit_request(0, LARGE, strength=0.99, template=TEMPLATE), tmp_path, lambda count: None)


def test_what_cannot_be_written_is_used_from_memory(tmp_path: Path) -> None:
    request = edit_request(0, SMALL, num_steps=2, template=TEMPLATE)
    model = build_model(pipeline("sdxl"), name="tiny")
    model.masked_up_to = 1.0
    (tmp_path / "full").touch()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert model.use_template(request, tmp_path / "full", lambda count: None)
    assert model.prepare(request).template is not None
    assert not model.use_template(request, tmp_path / "full", lambda count: None)
