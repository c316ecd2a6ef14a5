"""Images of the server in random mixed batches, with joins and cancels, compared with plain diffusers one by one.

    python tests/benchmarks/http_parity.py [--model emoji-xl] [--num-images 500] [--output-file FILE]

In float32. Goals: PSNR of at least 70 dB for each image and 90 dB in the mean (equal images count as 100). Exits with 1
otherwise.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image

from patchedserve.data.files import write_json
from patchedserve.data.prompts.captions import load_prompts
from patchedserve.data.requests import Request
from patchedserve.eval.metrics.psnr import MAX_PSNR_DB, psnr
from patchedserve.serving.models.build import as_plain
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.http_server import HttpServer

_LEAST_DB, _MEAN_DB = 70.0, 90.0
_AT_ONCE = 24
_LEAVES = 0.1


@dataclass(frozen=True, slots=True)
class Drawn:
    """An image and its request."""

    request: Request
    image: Image.Image


def requests_of(sizes: Sequence[Any], count: int, seed: int) -> list[Request]:
    """Return requests of random sizes, 8 to 30 steps, guidance 1 to 7.5."""
    draws, prompts = random.Random(seed), load_prompts()
    return [
        Request(
            number,
            draws.choice(prompts),
            draws.choice(sizes),
            draws.randrange(8, 31),
            draws.choice((1.0, 3.0, 4.5, 7.5)),
            seed=draws.randrange(2**40),
        )
        for number in range(count)
    ]


async def drawn_by(url: str, requests: Sequence[Request], seed: int) -> list[Drawn]:
    """Return the images that the server draws, while some clients disconnect."""
    draws, found = random.Random(seed), list[Drawn]()
    places = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask(request: Request, leaves_after_s: float | None) -> None:
            body = {
                "prompt": request.prompt,
                "size": str(request.resolution),
                "num_inference_steps": request.num_inference_steps,
                "guidance_scale": request.guidance_scale,
                "seed": request.seed,
            }
            async with places:
                try:
                    async with asyncio.timeout(leaves_after_s):
                        answer = await client.post("/v1/images/generations", json=body)
                except TimeoutError:
                    return
                answer.raise_for_status()
                content = base64.b64decode(answer.json()["data"][0]["b64_json"])
                found.append(Drawn(request, Image.open(io.BytesIO(content)).convert("RGB")))

        leaves = [draws.uniform(0.1, 3.0) if draws.random() < _LEAVES else None for _ in requests]
        await asyncio.gather(*(ask(request, leave) for request, leave in zip(requests, leaves, strict=True)))
    return found


def alone(pipe: Any, request: Request) -> Image.Image:
    """Return the image of plain diffusers."""
    with torch.inference_mode():
        return pipe(
            request.prompt,
            width=request.resolution.width,
            height=request.resolution.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
        ).images[0]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--num-images", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    model = load_model(given.model, "cpu", "float32")
    requests = requests_of(model.defaults.resolutions, int(given.num_images / (1 - _LEAVES)) + 20, given.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        HttpServer(given.model, Path(folder), "--system", "patched-fcfs", "--cache", "off", start_s=300) as server,
    ):
        found = asyncio.run(drawn_by(server.url, requests, given.seed))[: given.num_images]
        assert server.stop() == 0
    pipe: Any = as_plain(model).pipe
    values = [min(MAX_PSNR_DB, psnr(each.image, alone(pipe, each.request))) for each in found]
    mean = sum(values) / len(values)
    result = {
        "machine": cpu_name(),
        "model": given.model,
        "num_images": len(values),
        "min_db": min(values),
        "mean_db": mean,
        "equal": sum(value == MAX_PSNR_DB for value in values),
    }
    print(json.dumps(result, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result | {"psnr_db": values})
    return 0 if min(values) >= _LEAST_DB and mean >= _MEAN_DB else 1


if __name__ == "__main__":
    sys.exit(main())
