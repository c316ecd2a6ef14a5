"""Edits over HTTP that read their templates' records, which a real server makes."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from patchedserve.data.resolution import Resolution

from ..conftest import RunPsctl
from ..support.edits import file_of, image_of
from ..support.http_server import HttpServer
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import until
from .test_edits_http import picture

pytestmark = pytest.mark.slow
SIZE = Resolution(64, 64)
EDITS, GENERATIONS = "/v1/images/edits", "/v1/images/generations"
MASK = np.zeros((SIZE.height, SIZE.width), dtype=bool)
MASK[:32, :32] = True
Edit = Callable[..., tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]]
"""Function that edits the picture of a number: returns each image's fields of the response, and its pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    settings: dict[str, Any] = {"guidance_scale": 4.0, "num_inference_steps": 4, "resolutions": ["64x64"]}
    save_tiny(folder / "tiny", tiny_sdxl(), **settings)
    (folder / "mask.png").write_bytes(file_of(MASK))
    for number in range(5):
        (folder / f"{number}.png").write_bytes(file_of(image_of(SIZE, number)))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    options = ("--reuse-templates", "--max-steps", "1000", "--max-queue-time", "3600")
    with HttpServer(folder / "tiny", folder / "workspace", *options) as running:
        yield running


@pytest.fixture
def edit(http: httpx.Client, folder: Path) -> Edit:
    def drawn(number: int, **fields: Any) -> tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]:
        files = {"image": (folder / f"{number}.png").read_bytes(), "mask": (folder / "mask.png").read_bytes()}
        asked = {"prompt": "a red hat", "seed": 5, "slo": 60, **fields}
        texts = {name: (None, str(value)) for name, value in asked.items()}
        answer = http.post(EDITS, files={**files, **texts})
        assert answer.status_code == 200, answer.text
        told = answer.json()["data"]
        return told, [picture(each.pop("b64_json")) for each in told]

    return drawn


@pytest.fixture
def by_command(folder: Path, run_psctl: RunPsctl) -> Callable[..., NDArray[np.uint8]]:
    def drawn(number: int, *options: str) -> NDArray[np.uint8]:
        where = ("--model", folder / "tiny", "--workspace", folder / "workspace", "--dtype", "float32")
        words = ("edit", folder / f"{number}.png", "a red hat", "--mask", folder / "mask.png", "--seed", "5")
        done = run_psctl(*words, *where, "--overwrite", "-o", folder / "drawn.png", *options)
        assert done.returncode == 0, done.stderr
        assert "template:" not in done.stderr, "the server has recorded it"
        return np.asarray(Image.open(folder / "drawn.png"))

    return drawn


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"psctl_{name} ")), 0.0)


def far(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int(np.abs(one.astype(int) - other).max())


def test_first_edit_is_exact_and_later_ones_read_the_record(
    edit: Edit, by_command: Callable[..., NDArray[np.uint8]], http: httpx.Client, server: HttpServer
) -> None:
    before = {name: metric(http, name) for name in ("templates_recorded", 'edits_total{reused="true"}')}
    facts = {"mask_ratio": 0.25, "active_share": 0.25}
    told, [first] = edit(0)
    assert told == [{"steps_reused": 0, "reused": False, **facts}]
    assert far(first, by_command(0)) == 0
    until(lambda: metric(http, "templates_recorded") == before["templates_recorded"] + 1)
    told, [reused] = edit(0)
    assert told == [{"steps_reused": 4, "reused": True, **facts}]
    assert far(reused, by_command(0, "--reuse")) <= 1
    assert far(reused, first) > 1
    told, [exact] = edit(0, reuse="false")
    assert told == [{"steps_reused": 0, "reused": False, **facts}]
    assert far(exact, first) == 0
    told, [whole] = edit(0, full_steps=4)
    assert told == [{"steps_reused": 0, "reused": True, **facts}]
    assert far(whole, reused) > 1
    told, [wide] = edit(0, dilate=1)
    # All four cells lie within the dilated mask, so that the exact edit is faster.
    assert told == [{"steps_reused": 0, "reused": False, **facts, "active_share": 1.0}]
    assert far(wide, first) == 0
    told, images = edit(0, n=2, strength=0.5)
    assert [each["reused"] for each in told] == [True, True]
    for drawn in (first, reused, *images):
        assert (drawn[~MASK] == image_of(SIZE, 0)[~MASK]).all()
    assert metric(http, 'edits_total{reused="true"}') == before['edits_total{reused="true"}'] + 4
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert [line["reused"] for line in lines if line["event"] == "completed"][-6:] == [0, 1, 0, 1, 0, 2]


def test_streams_report_reuse(client: openai.OpenAI, edit: Edit, folder: Path, http: httpx.Client) -> None:
    edit(1)
    until(lambda: edit(1)[0][0]["reused"])
    files: dict[str, Any] = {"image": (folder / "1.png").read_bytes(), "mask": file_of(MASK)}
    stream = client.images.edit(**files, prompt="a red hat", stream=True, partial_images=2, extra_body={"slo": 60})
    events = [json.loads(event.model_dump_json()) for event in stream]
    assert [event["type"] for event in events[:-1]] == ["image_edit.partial_image"] * 2
    assert (events[-1]["reused"], events[-1]["active_share"]) == (True, 0.25)
    status = http.get(f"{GENERATIONS}/{events[-1]['id']}").json()
    assert status["data"][0]["reused"] is True


def test_concurrent_edits_cause_one_recording_and_share_batches(edit: Edit, http: httpx.Client) -> None:
    def new_one() -> NDArray[np.uint8]:
        [told] = (
            http.post(GENERATIONS, json={"prompt": "a car", "seed": 7, "slo": 60}).raise_for_status().json()["data"]
        )
        assert (list(told), told["steps_reused"]) == (["b64_json", "steps_reused"], 0), "it is no edit"
        return picture(told["b64_json"])

    before, seeds = metric(http, "templates_recorded"), range(3)
    exact = [edit(2, seed=seed, reuse="false")[1][0] for seed in seeds]
    with ThreadPoolExecutor(8) as pool:
        for told, [drawn] in pool.map(lambda seed: edit(2, seed=seed), seeds):
            # The last of them may have arrived after the first was recorded.
            assert told[0]["reused"] or min(far(drawn, each) for each in exact) <= 1
        until(lambda: edit(2)[0][0]["reused"])
        alone, new_alone = [edit(2, seed=seed)[1][0] for seed in seeds], new_one()
        together = [pool.submit(edit, 2, seed=seed) for seed in seeds]
        whole, new = pool.submit(edit, 2, seed=0, reuse="false"), pool.submit(new_one)
        for reused, wanted in zip(together, alone, strict=True):
            assert reused.result()[0][0]["reused"]
            assert far(reused.result()[1][0], wanted) <= 1
        assert far(whole.result()[1][0], exact[0]) <= 1
        assert far(new.result(), new_alone) <= 1
    assert metric(http, "templates_recorded") == before + 1


@pytest.mark.exhaustive
def test_existing_records_are_found_and_damaged_ones_are_rerecorded(
    edit: Edit, run_psctl: RunPsctl, folder: Path, http: httpx.Client, server: HttpServer
) -> None:
    where = ("--model", folder / "tiny", "--workspace", folder / "workspace", "--dtype", "float32", "--json")
    places = []
    for number in (3, 4):
        words = ("--template-seed", "3", "--template-prompt", "a room")
        added = run_psctl("templates", "add", folder / f"{number}.png", *words, *where)
        assert added.returncode == 0, added.stderr
        places.append(Path(json.loads(added.stdout)["folder"]))
    of_record = {"template_seed": 3, "template_prompt": "a room"}
    before = metric(http, "templates_recorded")
    assert edit(3, **of_record)[0][0]["reused"]
    step = places[1] / "step-0001.safetensors"
    step.write_bytes(step.read_bytes()[:-8])
    told, [drawn] = edit(4, **of_record)
    assert not told[0]["reused"]
    assert far(drawn, edit(4, reuse="false")[1][0]) == 0
    until(lambda: metric(http, "templates_recorded") == before + 1)
    assert edit(4, **of_record)[0][0]["reused"]
    warned = [line for line in server.lines if f"template {places[1].name} is damaged" in line]
    assert len(warned) == 1
    assert "it was put aside as" in warned[0]


def test_record_of_a_generation_is_read_and_not_rerecorded(
    edit: Edit, run_psctl: RunPsctl, folder: Path, http: httpx.Client
) -> None:
    where = ("--model", folder / "tiny", "--workspace", folder / "workspace", "--dtype", "float32")
    done = run_psctl("generate", "a room", "--seed", "5", "-o", folder / "5.png", "--save-template", *where)
    assert done.returncode == 0, done.stderr
    drawn, recorded = np.asarray(Image.open(folder / "5.png")), metric(http, "templates_recorded")
    told, [same] = edit(5, template_kind="trajectory", prompt="a room", paste="false")
    assert told[0]["reused"]
    assert far(same, drawn) <= 1
    told, [other] = edit(5, template_kind="trajectory")
    assert told[0]["reused"]
    assert far(other, drawn) > 1
    # Another image has no record of its generation, and none is made.
    told, [missed] = edit(0, template_kind="trajectory")
    assert not told[0]["reused"]
    assert far(missed, edit(0, reuse="false")[1][0]) == 0
    assert not edit(0, template_kind="trajectory")[0][0]["reused"]
    assert metric(http, "templates_recorded") == recorded


def test_invalid_fields_are_refused(http: httpx.Client, folder: Path) -> None:
    files = {"image": (folder / "0.png").read_bytes(), "mask": (folder / "mask.png").read_bytes()}
    for fields, param, message in (
        ({"reuse": "1"}, "reuse", "reuse is 1, but it must be true or false"),
        ({"template_seed": "-1"}, "template_seed", "must be a whole number from 0"),
        ({"template_seed": "3", "reuse": "false"}, "template_seed", "only edits with reuse read"),
        ({"template_prompt": "a room", "reuse": "false"}, "template_prompt", "only edits with reuse read"),
        ({"template_prompt": "x" * 32_001}, "template_prompt", "at most 32,000"),
        ({"full_steps": "5"}, None, "full_steps is 5, but the edit takes 4 steps"),
        ({"template_kind": "other"}, "template_kind", "one of noised, trajectory"),
        ({"template_kind": "trajectory", "template_seed": "3"}, "template_kind", "has its prompt and seed"),
        ({"dilate": "-1"}, "dilate", "must be a whole number from 0 to 64"),
    ):
        texts = {name: (None, value) for name, value in {"prompt": "a red hat", **fields}.items()}
        answer = http.post(EDITS, files={**files, **texts})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
    assert http.get("/v1/models").json()["data"][0]["defaults"]["reuse"] is True
