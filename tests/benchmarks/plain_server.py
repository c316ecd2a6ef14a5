"""A minimal server: FastAPI around a diffusers pipeline, one request at a time.

    python tests/benchmarks/plain_server.py MODEL_DIR --port 8001

It implements the part of OpenAI's images API that `psctl bench serve` uses, so that both servers get the same load.
"""

import argparse
import asyncio
import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import uvicorn
from fastapi import FastAPI


def make_app(model: Path, dtype: torch.dtype) -> FastAPI:
    """Return the app over the pipeline of this folder."""
    # One thread loads and draws. OpenMP would keep workers for every thread that has computed; with more workers than
    # cores, all of them sleep at barriers, which takes twice as long.
    turn = ThreadPoolExecutor(1)
    pipe: Any = turn.submit(partial(diffusers.DiffusionPipeline.from_pretrained, model, torch_dtype=dtype)).result()
    pipe.set_progress_bar_config(disable=True)
    app = FastAPI()

    def draw(body: dict[str, Any]) -> bytes:
        width, height = map(int, body["size"].split("x"))
        with torch.inference_mode():
            image = pipe(
                body["prompt"],
                width=width,
                height=height,
                num_inference_steps=body["num_inference_steps"],
                guidance_scale=body["guidance_scale"],
                generator=torch.Generator("cpu").manual_seed(body["seed"]),
            ).images[0]
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    @app.post("/v1/images/generations")
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        image = await asyncio.get_running_loop().run_in_executor(turn, draw, body)
        return {"created": int(time.time()), "data": [{"b64_json": base64.b64encode(image).decode()}]}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    uvicorn.run(make_app(given.model, getattr(torch, given.dtype)), port=given.port, access_log=False)
