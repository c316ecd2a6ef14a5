"""A server of OpenAI's images API with the request fields of others, as a process of its own. It draws patterns.

    python tests/support/images_server.py vllm-omni --port 0

Forms of requests, by the names of fields that are published in the servers' sources:

* vllm-omni (`entrypoints/openai/protocol/images.py`): answers `b64_json`, refuses `url`.
* sglang (`multimodal_gen/runtime/entrypoints/openai/protocol.py`): answers `url` unless `b64_json` is requested.
* other: no server's; `width`, `height`, `steps` and `cfg_scale`, no seed, and answers `url`.

Images depend on prompt, seed, size and steps. One is drawn at a time.
"""

import argparse
import asyncio
import base64
import io
import time
import zlib
from typing import Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from PIL import Image
from pydantic import BaseModel, Field


class VllmOmni(BaseModel):
    prompt: str
    model: str | None = None
    n: int = Field(1, ge=1, le=10)
    size: str | None = None
    response_format: Literal["b64_json", "file"] = "b64_json"
    user: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = Field(None, ge=1, le=200)
    guidance_scale: float | None = Field(None, ge=0, le=20)
    true_cfg_scale: float | None = Field(None, ge=0, le=20)
    seed: int | None = None
    output_format: str | None = None


class Sglang(BaseModel):
    prompt: str
    model: str | None = None
    n: int | None = 1
    quality: str | None = "auto"
    response_format: str | None = "url"
    size: str | None = "1024x1024"
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    seed: int | None = 1024
    generator_device: str | None = "cuda"
    negative_prompt: str | None = None
    enable_teacache: bool | None = False


class Other(BaseModel):
    prompt: str
    width: int
    height: int
    steps: int
    cfg_scale: float = 4.0


FORMS: dict[str, type[BaseModel]] = {"vllm-omni": VllmOmni, "sglang": Sglang, "other": Other}


def drawn(prompt: str, seed: int, width: int, height: int, noise: float) -> bytes:
    """Return a smooth pattern of the prompt and the seed, as PNG, with noise in gray levels."""
    rng = np.random.default_rng([zlib.crc32(prompt.encode()), seed])
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse) + noise * rng.standard_normal((height, width, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def make_app(form: str, step_s: float, noise: float) -> FastAPI:
    """Return the app, which takes `step_s` seconds a step."""
    app, turn = FastAPI(), asyncio.Lock()
    kept: dict[str, bytes] = {}
    received: list[dict[str, Any]] = []
    kind = FORMS[form]

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": f"{form}-model", "object": "model"}]}

    @app.get("/received")
    def requests() -> list[dict[str, Any]]:
        return received

    @app.get("/v1/images/{name}.png")
    def image(name: str) -> Response:
        if name not in kept:
            raise HTTPException(404)
        return Response(kept[name], media_type="image/png")

    @app.post("/v1/images/generations")
    async def generate(body: kind) -> dict[str, Any]:  # type: ignore[valid-type]
        given = body.model_dump()  # type: ignore[attr-defined]
        received.append(body.model_dump(exclude_unset=True))  # type: ignore[attr-defined]
        size = given.get("size") or f"{given.get('width', 64)}x{given.get('height', 64)}"
        width, height = map(int, size.split("x"))
        steps = given.get("num_inference_steps") or given.get("steps") or 20
        async with turn:
            await asyncio.sleep(step_s * steps)
            seed = given.get("seed")
            content = drawn(given["prompt"], len(received) if seed is None else seed, width, height, noise)
        if given.get("response_format") == "b64_json":
            data = {"b64_json": base64.b64encode(content).decode()}
        else:
            kept[str(len(kept))] = content
            data = {"url": f"/v1/images/{len(kept) - 1}.png"}
        return {"created": int(time.time()), "data": [data]}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=sorted(FORMS))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--noise", type=float, default=0.0)
    options = parser.parse_args()
    uvicorn.run(make_app(options.form, options.step_s, options.noise), port=options.port, access_log=False)
