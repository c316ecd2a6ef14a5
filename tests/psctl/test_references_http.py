"""Edits by reference, as OpenAI's client sends them to a real server, beside drawings in the same batches."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from patchedserve.data.edits import EditSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.families.references import CROPPED

from ..support.edits import file_of, image_of, mask_of, plain_edit
from ..support.http_server import HttpServer
from ..support.plain import plain_image
from ..support.tiny_families import tiny_klein
from ..support.tiny_models import save_tiny

pytestmark = pytest.mark.slow
_TEXT = 16
IMAGES = [image_of(Resolution(70, 64), 1), image_of(Resolution(96, 64), 2)]
SQUARE = Resolution(64, 64)
PHOTO, MASK = image_of(SQUARE, 3), mask_of(SQUARE)
REFERENCES = tuple(CROPPED.fitted(image, 16) for image in IMAGES)
REQUESTS = [
    Request(0, "a red hat", Resolution(64, 64), 4, 1.0, seed=3),
    Request(1, "make it night", Resolution(64, 64), 4, 1.0, seed=4, references=REFERENCES[:1]),
    Request(2, "a cat on the sofa", Resolution(96, 32), 4, 1.0, seed=5, references=REFERENCES),
    Request(
        3,
        "a hat",
        SQUARE,
        4,
        1.0,
        seed=6,
        edit=EditSpec(PHOTO, MASK),
        references=CROPPED.beside(PHOTO, REFERENCES[:1]),
    ),
]


def drawn(client: openai.OpenAI, request: Request) -> NDArray[np.uint8]:
    own = {"seed": request.seed, "num_inference_steps": 4, "slo": 60}
    size = str(request.resolution)
    if request.edit is not None:
        files = [("photo.png", file_of(PHOTO)), ("0.png", file_of(IMAGES[0]))]
        mask = ("mask.png", file_of(MASK))
        found = client.images.edit(image=files, mask=mask, prompt=request.prompt, size=size, extra_body=own)  # type: ignore[call-overload]
    elif request.references:
        files = [(f"{place}.png", file_of(image)) for place, image in enumerate(IMAGES[: len(request.references)])]
        found = client.images.edit(image=files, prompt=request.prompt, size=size, extra_body=own)  # type: ignore[call-overload]
    else:
        found = client.images.generate(prompt=request.prompt, size=size, extra_body=own)  # type: ignore[call-overload]
    assert found.data is not None
    assert found.data[0].b64_json is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found.data[0].b64_json))))


def test_references_and_drawings_are_served_together(tmp_path: Path) -> None:
    model = save_tiny(
        tmp_path / "klein",
        tiny_klein(),
        guidance_scale=1.0,
        num_inference_steps=4,
        resolutions=["64x64", "96x32"],
        max_sequence_length=_TEXT,
    )
    pipe = tiny_klein()
    with HttpServer(model, tmp_path / "workspace") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            found = list(pool.map(lambda request: drawn(client, request), REQUESTS))
        for image, request in zip(found, REQUESTS, strict=True):
            of = plain_image if request.edit is None else partial(plain_edit, output_type="pil")
            expected = np.asarray(of(pipe, request, max_sequence_length=_TEXT), dtype=int)
            apart = np.abs(image - expected)
            assert (apart if request.edit is None else apart[MASK]).max() <= 1, request.request_id
        form = {"prompt": (None, "a hat"), "strength": (None, "0.5")}
        files = [("image[]", ("a.png", file_of(IMAGES[0]))), ("image[]", ("b.png", file_of(IMAGES[1])))]
        answer = httpx.post(f"{server.url}/v1/images/edits", files=[*files, *form.items()])
        assert answer.status_code == 400
        assert "others are references, with a mask or without a strength" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["limits"]["references"] == 10
        urls = [f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}" for image in IMAGES]
        body = {"prompt": "a cat on the sofa", "images": [{"image_url": url} for url in urls], "size": "96x32"}
        answer = httpx.post(
            f"{server.url}/v1/images/edits", json={**body, "seed": 5, "num_inference_steps": 4}, timeout=60
        )
        again = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))
        assert np.abs(again.astype(int) - found[2]).max() <= 1
        usage, seen = answer.json()["usage"], sum(reference.resolution.pixels for reference in REFERENCES)
        assert (usage["input_tokens"], usage["output_tokens"]) == (seen, 96 * 32)
        assert usage["total_tokens"] == seen + 96 * 32
        described = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/images/edits"]["post"]
        properties = described["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
        assert (properties["image"]["type"], properties["image"]["maxItems"]) == ("array", 10)
