"""`POST /v1/images/edits` as its clients see it: OpenAI's client and wrong forms, against a real server."""

import base64
import io
import json
import os
import signal
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from patchedserve.data.resolution import Resolution

from ..support.edits import edit_request, file_of, image_of, mask_of, plain_edit, redraw_request
from ..support.http_server import HttpServer
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import is_alive, until

pytestmark = pytest.mark.slow
SIZE, SEED = Resolution(64, 48), 5
EDITS, GENERATIONS = "/v1/images/edits", "/v1/images/generations"
IMAGE, MASK = image_of(SIZE, SEED), mask_of(SIZE, "ellipse")
ASK = {"num_inference_steps": 4, "seed": SEED, "slo": 60}


def huge_png() -> bytes:
    """Return a file of a few bytes whose header declares more pixels than may be decoded."""
    file = bytearray(file_of(MASK))
    file[16:24] = (30_000).to_bytes(4) * 2
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4)
    return bytes(file)


FILES: dict[str, Any] = {"image": file_of(IMAGE), "mask": file_of(MASK)}


def many_scans() -> bytes:
    """Return a JPEG file of about a thousand scans, each of which makes a decoder pass over the whole image."""
    file = file_of(IMAGE, "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * 1_000 + file[-2:]


TRANSPARENT = np.dstack([IMAGE, np.where(MASK, 0, 255).astype(np.uint8)])
NOISE = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
TWO_FRAMES = {"save_all": True, "append_images": [Image.fromarray(IMAGE[::-1])]}
WRONG: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"image": None}, "image", "missing_required_parameter", "image is missing"),
    ({"image": "room.png"}, "image", "invalid_value", "'image' is text, but image and mask are files"),
    ({"image": b""}, "image", "invalid_value", "image is no PNG, JPEG or WebP file"),
    ({"image": file_of(IMAGE, "GIF", **TWO_FRAMES)}, "image", "invalid_value", "image is no PNG, JPEG or WebP file"),
    ({"image": file_of(IMAGE, "PNG", **TWO_FRAMES)}, "image", "invalid_value", "an animation of 2 images"),
    ({"image": FILES["image"][:2000]}, "image", "invalid_value", "image: damaged image"),
    ({"image": huge_png()}, "image", "invalid_value", "image"),
    ({"image": many_scans()}, "image", "invalid_value", "image has more than 100 scans"),
    (
        {"image": file_of(NOISE[:500, :500])},
        "image",
        "invalid_value",
        "500x500, but width and height must be multiples",
    ),
    (
        {"image": file_of(NOISE[:520, :512])},
        "image",
        "invalid_value",
        "image: 512x520 pixels, but at most 262,144 in all",
    ),
    ({"image": [FILES["image"]] * 2}, "image", "invalid_value", "2 images were sent, but one is edited at a time"),
    ({"image[]": FILES["image"]}, "image", "invalid_value", "2 images were sent"),
    ({"mask": None, "feather_px": "4"}, "feather_px", "invalid_value", "feather_px keeps what is outside a mask, but"),
    ({"mask": b"no image"}, "mask", "invalid_value", "mask is no PNG, JPEG or WebP file"),
    ({"mask": huge_png()}, "mask", "invalid_value", "mask"),
    ({"mask": FILES["mask"][:90]}, "mask", "invalid_value", "mask: damaged image"),
    (
        {"mask": file_of(MASK[:40])},
        "mask",
        "invalid_value",
        "the mask has 64x40 pixels, but the image to edit has 64x48",
    ),
    ({"mask": file_of(~mask_of(SIZE, "all"))}, "mask", "invalid_value", "the mask is empty"),
    ({"mask": file_of(np.eye(48, 64, k=3, dtype=bool))}, None, "invalid_value", "the mask is too thin"),
    ({"mask": [FILES["mask"]] * 2}, "mask", "invalid_value", "the field 'mask' comes twice"),
    ({"markup": FILES["mask"]}, "markup", "unsupported_parameter", "a mask says what is edited"),
    ({"prompt": None}, "prompt", "missing_required_parameter", "prompt is missing"),
    ({"prompt": b"a red hat"}, "prompt", "invalid_value", "'prompt' is a file"),
    ({"prompt": ["a", "b"]}, "prompt", "invalid_value", "the field 'prompt' comes twice"),
    ({"prompt": "x" * 300_000}, None, "invalid_form", "the body is not a valid form"),
    ({f"x{number}": "" for number in range(80)}, None, "invalid_form", "Too many fields"),
    *(
        ({"strength": value}, "strength", "invalid_value", "strength is ")
        for value in ("0", "2", "x", "", "-1", "1e999", "NaN", "true", "0x1", " 1", "01")
    ),
    ({"strength": "0.1"}, None, "invalid_value", "strength is 0.1, but with 2 steps it must be at least 0.5"),
    *(({"size": value}, "size", "invalid_value", "own size: 64x48") for value in ("48x64", "64", "", "AUTO")),
    *(({"n": value}, "n", "invalid_value", "n is ") for value in ("0", "11", "2.0", "1e0", "two", "\uff12")),
    *(({"seed": value}, "seed", "invalid_value", "seed is ") for value in ("-1", "9" * 40, "1.5")),
    *(({name: "yes"}, name, "invalid_value", "must be true or false") for name in ("stream", "paste", "progress")),
    ({"stream": "1"}, "stream", "invalid_value", "stream is 1, but it must be true or false"),
    ({"partial_images": "1"}, "partial_images", "invalid_value", "partial_images needs stream to be true"),
    ({"feather_px": "257"}, "feather_px", "invalid_value", "feather_px is 257"),
    ({"feather_px": "4", "paste": "false"}, "feather_px", "invalid_value", "so it needs paste"),
    ({"reuse": "true"}, "reuse", "invalid_value", "the server has no --reuse-templates"),
    ({"template_seed": "1"}, "template_seed", "invalid_value", "which only edits with reuse read"),
    ({"full_steps": "1"}, "full_steps", "invalid_value", "which only edits with reuse read"),
    ({"dilate": "1"}, "dilate", "invalid_value", "which only edits with reuse read"),
    ({"input_fidelity": "medium"}, "input_fidelity", "invalid_value", "one of low, high"),
    ({"background": "transparent"}, "background", "invalid_value", "no alpha channel"),
    *(({name: "low"}, name, "unknown_parameter", "is unknown") for name in ("moderation", "style", "colour", "mask[]")),
]
"""Wrong fields of an otherwise correct form: the field that the error names, its code, and a part of its message."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("server")
    settings: dict[str, Any] = {"guidance_scale": 4.0, "num_inference_steps": 4, "resolutions": ["64x48"]}
    model = save_tiny(folder / "tiny", tiny_sdxl(), **settings)
    options = ("--max-pixels", "262144", "--max-steps", "1000", "--max-queue-time", "3600")
    with HttpServer(model, folder / "workspace", *options) as running:
        yield running


def picture(b64_json: str | None) -> NDArray[np.uint8]:
    assert b64_json is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))))


def edited(client: openai.OpenAI, *, of_us: dict[str, Any] | None = None, **fields: Any) -> list[NDArray[np.uint8]]:
    found = client.images.edit(prompt="a red hat", extra_body={**ASK, **(of_us or {})}, **fields)
    assert found.data is not None
    return [picture(each.b64_json) for each in found.data]


def form(**fields: Any) -> dict[str, Any]:
    """Return a correct form with these fields: bytes become a file, None omits a field, a list sends each entry."""
    usual = {**FILES, "prompt": "a red hat", "num_inference_steps": "2", "slo": "60"}
    parts = [
        (name, (f"{name}.png" if isinstance(part, bytes) else None, part))
        for name, given in {**usual, **fields}.items()
        for part in (given if isinstance(given, list) else [given])
        if part is not None
    ]
    return {"files": parts}


def test_openai_client_edits_equal_diffusers(client: openai.OpenAI) -> None:
    [alone] = edited(client, **FILES)
    wanted = plain_edit(tiny_sdxl(), edit_request(0, SIZE, "ellipse", num_steps=4, seed=SEED), "pil")
    assert np.abs(alone.astype(int) - np.asarray(wanted))[MASK].max() <= 1
    first, second = edited(client, **FILES, n=2, size="64x48")
    assert np.abs(first.astype(int) - alone).max() <= 1, "in a batch, sums are rounded in another order"
    assert (first != second)[MASK].any()
    for drawn in (alone, first, second):
        assert (drawn[~MASK] == IMAGE[~MASK]).all()
    [decoded] = edited(client, **FILES, of_us={"paste": False})
    assert (decoded[~MASK] != IMAGE[~MASK]).any()


def test_whole_image_is_redrawn_without_a_mask(client: openai.OpenAI) -> None:
    [drawn] = edited(client, image=FILES["image"])
    wanted = plain_edit(tiny_sdxl(), redraw_request(0, SIZE, num_steps=4, seed=SEED), "pil")
    assert np.abs(drawn.astype(int) - np.asarray(wanted)).max() <= 1


def test_transparent_pixels_are_editable(client: openai.OpenAI) -> None:
    on_white = np.where(MASK[..., None], np.uint8(255), IMAGE)
    [wanted] = edited(client, image=file_of(on_white), mask=FILES["mask"])
    assert (wanted[~MASK] == IMAGE[~MASK]).all()
    # The client names the field of an image in a list `image[]`.
    as_mask = {"image": file_of(on_white), "mask": file_of(TRANSPARENT, "WEBP", lossless=True)}
    ways: list[dict[str, Any]] = [{"image": [file_of(TRANSPARENT)]}, as_mask]
    for files in ways:
        [drawn] = edited(client, **files)
        assert (drawn[~MASK] == IMAGE[~MASK]).all()
        assert (drawn == wanted).all()


def test_bodies_of_json_are_forms(client: openai.OpenAI, http: httpx.Client) -> None:
    [wanted] = edited(client, **FILES)
    image, mask = (base64.b64encode(FILES[name]).decode() for name in ("image", "mask"))
    url = f"data:image/png;base64,{image}"
    for files in (
        {"image": image, "mask": mask},
        {"images": [{"type": "image_url", "image_url": url}], "mask": {"image_url": f"data:image/png;base64,{mask}"}},
        {"image": [url], "mask": mask, "images": None, "strength": None},
    ):
        answer = http.post(EDITS, json={"prompt": "a red hat", **ASK, **files})
        assert answer.status_code == 200, answer.text
        assert (picture(answer.json()["data"][0]["b64_json"]) == wanted).all()
    for files, param, message in (
        ({"image": "https://example.org/a.png"}, "image", "image is a web address, which is not fetched here"),
        ({"images": [{"file_id": "file-1"}]}, "images", "images has 'file_id', but images are sent as image_url"),
        ({"image": image, "images": [image]}, "images", "image and images are both given"),
        ({"image": url, "mask": 5}, "mask", "mask is 5, but it must be a data URL or base64"),
        ({"image": "data:image/png,a"}, "image", "a data URL must begin like data:image/png;base64,"),
        ({"image": "%%%"}, "image", "image is no valid base64"),
        ({"image": "aGF0"}, "image", "image is no PNG, JPEG or WebP file"),
        ({"image": [url] * 65}, "images", "65 images were sent, but at most 64 are read"),
        ({"image": []}, "image", "image is missing"),
        ({"image": image, "strength": "0.5"}, "strength", "strength is '0.5', but it must be a number"),
        ({"image": image, "x": 1}, "x", "the field 'x' is unknown"),
    ):
        answer = http.post(EDITS, json={"prompt": "a red hat", **files})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
    answer = http.post(EDITS, content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_edit_is_streamed(client: openai.OpenAI, http: httpx.Client) -> None:
    of_us = {"num_inference_steps": 8, "strength": 0.5, "progress": True}
    stream = client.images.edit(
        **FILES, prompt="a red hat", input_fidelity="high", stream=True, partial_images=2, extra_body=ASK | of_us
    )
    events = [json.loads(event.model_dump_json()) for event in stream]
    kinds = [event["type"].removeprefix("image_edit.") for event in events]
    assert [event["partial_image_index"] for event in events if event["type"] == "image_edit.partial_image"] == [0, 1]
    progress = [(each["steps_done"], each["num_inference_steps"]) for each in events if "steps_done" in each]
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)], "of the steps that are taken"
    assert kinds[-1] == "completed"
    last = picture(events[-1]["b64_json"])
    assert (last[~MASK] == IMAGE[~MASK]).all()
    [again] = edited(client, **FILES, of_us=of_us | {"progress": False})
    assert (again == last).all()
    status = http.get(f"{GENERATIONS}/{events[-1]['id']}").json()
    assert (status["status"], status["num_inference_steps"], status["steps_done"]) == ("completed", 4, [4])


def test_more_concurrent_edits_than_body_readers(http: httpx.Client) -> None:
    names = []
    with ExitStack() as streams:
        for _ in range(6):
            asked = form(num_inference_steps="1000", slo="600", stream="true")
            stream = streams.enter_context(http.stream("POST", EDITS, **asked))
            names.append(stream.headers["x-generation-id"])
        assert len(http.get("/v1/state").json()["requests"]) == 6
        for name in names:
            assert http.delete(f"{GENERATIONS}/{name}").status_code == 200
        until(lambda: http.get("/v1/state").json()["requests"] == [])
        assert {http.get(f"{GENERATIONS}/{name}").json()["status"] for name in names} == {"cancelled"}


def test_idle_connections_block_no_edit(http: httpx.Client, server: HttpServer) -> None:
    with ExitStack() as idle:
        for path in (EDITS, "/v1/files") * 12:
            raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=40)
            idle.enter_context(raw).sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode())
            raw.sendall(b"Content-Type: multipart/form-data; boundary=a\r\nContent-Length: 40000000\r\n\r\n--a")
        assert http.post(EDITS, **form(), timeout=25).status_code == 200
        files = {"file": ("a.jsonl", b'{"custom_id": "a", "body": {"prompt": "a cat"}}'), "purpose": (None, "batch")}
        assert http.post("/v1/files", files=files, timeout=25).status_code == 200


def test_client_disconnect_ends_image_decoding(http: httpx.Client, server: HttpServer) -> None:
    assert http.post(EDITS, **form()).status_code == 200
    decoders = [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if f"(psctl-edits) S {server.process.pid} " in stat.read_text()
    ]
    assert decoders
    try:
        for process in decoders:
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            http.post(EDITS, **form(), timeout=1)
        until(lambda: not all(map(is_alive, decoders)))
    finally:
        for process in filter(is_alive, decoders):
            os.kill(process, signal.SIGCONT)
    assert http.post(EDITS, **form()).status_code == 200


def test_invalid_forms_are_refused(http: httpx.Client) -> None:
    for fields, param, code, message in WRONG:
        answer = http.post(EDITS, **form(**fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (fields.keys(), error)
        assert message in error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 250
    others: list[tuple[dict[str, Any], int, str]] = [
        ({"json": {"prompt": "a red hat"}}, 400, "missing_required_parameter"),
        ({"data": {"prompt": "a red hat"}}, 415, "unsupported_media_type"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "invalid_form"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400, "invalid_form"),
        (form(model="another"), 404, "model_not_found"),
        (form(slo="1e-6"), 503, "deadline_unreachable"),
    ]
    for body, status, code in others:
        answer = http.post(EDITS, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert http.post(EDITS, **form(size="auto", n="1", user="12", response_format="url")).json()["data"][0]["url"]
