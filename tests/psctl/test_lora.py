"""Options that change or load a model, as users pass them: to generate, edit and serve, and over HTTP."""

import base64
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import HeunDiscreteScheduler, StableDiffusionXLPipeline
from PIL import Image

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution

from ..conftest import RunPsctl
from ..support.edits import file_of, image_of, mask_of
from ..support.original_checkpoint import save_original
from ..support.plain import plain_image
from ..support.tiny_models import save_tiny, tiny_sdxl

REQUEST = Request(0, "a red hat", Resolution(32, 48), 3, guidance_scale=3.0, seed=4)
ASK = {
    "prompt": REQUEST.prompt,
    "size": str(REQUEST.resolution),
    "seed": REQUEST.seed,
    "num_inference_steps": REQUEST.num_inference_steps,
    "guidance_scale": REQUEST.guidance_scale,
    "slo": 60,
}
OPTIONS = ("--num-inference-steps", "3", "--guidance-scale", "3")
DRAW = ("generate", REQUEST.prompt, "-r", "32x48", "--seed", "4", *OPTIONS, "-o", "hat.png", "--overwrite")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "sdxl", tiny_sdxl(), resolutions=["32x48", "64"])


def pixels(image: Any) -> Any:
    return np.asarray(image, dtype=int)


@pytest.fixture
def psctl(run_psctl: RunPsctl, model_dir: Path) -> Any:
    def run(*arguments: str | Path) -> Any:
        return run_psctl(*arguments, PSCTL_MODEL=str(model_dir), PSCTL_DTYPE="float32")

    return run


@pytest.mark.product(most=1)
@pytest.mark.parametrize("more", [(), ("--parallel", "virtual:2")], ids=["one-device", "two-ranks"])
def test_unbatched_sampler_is_reported(psctl: Any, model_dir: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    done = psctl(*DRAW, "--sampler", "heun", *more)
    assert done.returncode == 0, done.stderr
    note = "scheduler HeunDiscreteScheduler is not batched; batched are DDIMScheduler, "
    assert [line for line in done.stderr.splitlines() if note in line]
    assert "each request takes its own scheduler's steps, in the passes that all share" in done.stderr
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(model_dir)
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    assert np.abs(pixels(Image.open(tmp_path / "hat.png")) - pixels(plain_image(pipe, REQUEST))).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lora", "style.safetensors"), "--lora style.safetensors: there is no such file"),
        (("--lora", "style.bin:0.5"), "only .safetensors files are loaded"),
        (("--lora", "style.bin:strong"), "'strong' is not a number; give PATH or PATH:SCALE"),
        (("--sampler", "plms"), "unipc"),
        (("--model-config", "sdxl"), "--model-config sdxl is of single files (.safetensors), and --model is "),
        (("--revision", "v2"), "--revision v2 is of hub ids (org/name), and --model is "),
        (
            ("--revision", "v2", "--model", "emoji-xl"),
            "--revision v2 is of hub ids (org/name), and --model is emoji-xl",
        ),
    ],
)
def test_bad_usage_gives_a_one_line_error(psctl: Any, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "style.bin").write_bytes(b"pickle")
    done = psctl(*DRAW, *arguments, "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_reuse_needs_a_batched_sampler(psctl: Any, tmp_path: Path) -> None:
    (tmp_path / "room.png").write_bytes(file_of(image_of(Resolution(128, 128))))
    (tmp_path / "mask.png").write_bytes(file_of(mask_of(Resolution(128, 128), "line")))
    edit = ("edit", "room.png", "a hat", "--mask", "mask.png", *OPTIONS, "--reuse", "--quiet")
    done = psctl(*edit, "--sampler", "heun")
    assert done.returncode == 2
    assert "reused with batched samplers only: scheduler HeunDiscreteScheduler is not batched" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert psctl(*edit, "--sampler", "unipc", "--overwrite").returncode == 0


def test_revision_is_part_of_the_model_name(spawn_psctl: RunPsctl) -> None:
    # In a process of its own because the hub's client reads its environment once.
    done = spawn_psctl(*DRAW, "--model", "someone/tiny", "--revision", "v2", "--quiet", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "model someone/tiny cannot be fetched from the hub (HF_HUB_OFFLINE is set)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_single_file_checkpoint_is_drawn(psctl: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra single-file is not installed")
    pipe = tiny_sdxl(widths=(24, 40))
    config = save_tiny(tmp_path / "config", pipe)
    for weights in config.rglob("*.safetensors"):
        weights.unlink()
    file = save_original(pipe, tmp_path / "model.safetensors")
    done = psctl(*DRAW, "--model", file, "--model-config", config, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert np.abs(pixels(Image.open(tmp_path / "hat.png")) - pixels(plain_image(pipe, REQUEST))).max() <= 1


@pytest.mark.exhaustive
def test_text_encoders_are_offloaded(psctl: Any, tmp_path: Path) -> None:
    assert psctl(*DRAW).returncode == 0
    usual = pixels(Image.open(tmp_path / "hat.png"))
    done = psctl(*DRAW, "--offload", "text", "--json")
    assert done.returncode == 0, done.stderr
    assert "without --offload" in done.stderr
    assert (pixels(Image.open(tmp_path / "hat.png")) == usual).all()
    drawn = json.loads(done.stdout)["offload"]
    assert drawn["weight_bytes"] < drawn["weight_bytes_while_encoding"] < drawn["weight_bytes_without_offload"]
    serve = (
        "serve",
        "--num-prompts",
        "3",
        "--num-inference-steps",
        "2",
        "--request-rate",
        "inf",
        "--system",
        "bucketed",
    )
    done = psctl(*serve, "--offload", "text", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)["offload"]
    assert served["weight_bytes"] == drawn["weight_bytes"]
    assert served["num_moves"] >= 6


@pytest.mark.exhaustive
def test_eight_bit_weights_are_reported_as_inexact(spawn_psctl: RunPsctl, model_dir: Path) -> None:
    done = spawn_psctl(*DRAW, "--model", model_dir, "--quantize", "int8")
    if importlib.util.find_spec("torchao") is None:
        assert done.returncode == 1
        assert (
            done.stderr.splitlines()[-1] + "\n"
            == "Error: torchao is not installed; install it with: pip install 'psctl[quantize]'\n"
        )
    else:
        assert done.returncode == 0, done.stderr
        assert "weights are kept in int8: images are near the model's own, not equal to them" in done.stderr
        assert "torchao" not in done.stderr  # its import prints many warnings
        assert "pytree" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_products_of_eight_bits_are_reported_as_inexact(psctl: Any, tmp_path: Path) -> None:
    done = psctl(*DRAW, "--quantize", "fp8", "--json")
    assert done.returncode == 0, done.stderr
    assert "layers multiply in fp8, which a CPU emulates slowly: images are near the model's own" in done.stderr


@pytest.fixture
def lora(model_dir: Path, tmp_path: Path) -> Path:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ..support.loras import save_lora

    return save_lora(tmp_path / "style.safetensors", tiny_sdxl(), "unet", "text_encoder")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_adapter_is_fused_by_every_command(psctl: Any, model_dir: Path, lora: Path, tmp_path: Path) -> None:
    from ..support.http_server import HttpServer
    from ..support.loras import fused

    given = ("--lora", f"{lora}:0.5")
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(model_dir)
    without = pixels(plain_image(pipe, REQUEST))
    expected = pixels(plain_image(fused(pipe, [(lora, 0.5)]), REQUEST))
    assert np.abs(expected - without).max() > 8

    done = psctl(*DRAW, *given)
    assert done.returncode == 0, done.stderr
    assert np.abs(pixels(Image.open(tmp_path / "hat.png")) - expected).max() <= 1

    size = Resolution(64, 64)
    (tmp_path / "room.png").write_bytes(file_of(image_of(size)))
    (tmp_path / "mask.png").write_bytes(file_of(mask_of(size)))
    edited = []
    for name, options in (("with.png", given), ("without.png", ())):
        done = psctl("edit", "room.png", "a hat", "--mask", "mask.png", *OPTIONS, "-o", name, *options)
        assert done.returncode == 0, done.stderr
        edited.append(pixels(Image.open(tmp_path / name)))
    assert np.abs(edited[0] - edited[1]).max() > 0

    serve = ("serve", "--system", "patchedserve", "--num-prompts", "3", "--num-inference-steps", "2", "--slo", "600")
    done = psctl(*serve, *given, "--prompt-cache", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "With --sampler, --lora, --adapter or --quantize no patch is reused" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["completed_requests"] == 3
    assert summary["prompt_cache"]["hits"] + summary["prompt_cache"]["misses"] >= 3

    with HttpServer(model_dir, tmp_path / "served", *given, env={"PSCTL_DTYPE": "float32"}) as server:
        import httpx

        answer = httpx.post(f"{server.url}/v1/images/generations", json=ASK, timeout=60)
        assert answer.status_code == 200, answer.text
        drawn = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        refused = httpx.post(f"{server.url}/v1/images/generations", json=ASK | {"lora": "style"}, timeout=60)
    assert np.abs(pixels(drawn) - expected).max() <= 1
    assert refused.status_code == 400
    assert "no adapters are served here; psctl serve --adapter NAME=PATH" in refused.json()["error"]["message"]


def test_adapters_of_images_must_be_loaded_and_used(psctl: Any, tmp_path: Path) -> None:
    cases = (
        (("--use-adapter", "ink"), "adapter ink is unknown; none is served: see --adapter NAME=PATH"),
        (("--adapter", "ink=a.safetensors"), "--adapter ink is used by no image: add --use-adapter ink, or leave it"),
        (("--adapter", "ink=a.safetensors", "--use-adapter", "ink"), "--adapter a.safetensors: there is no such file"),
        (("--adapter", "ink"), "--adapter ink: give NAME=PATH"),
    )
    for arguments, message in cases:
        done = psctl(*DRAW, *arguments, "--quiet")
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert message in done.stderr
    (tmp_path / "room.png").write_bytes(file_of(image_of(Resolution(128, 128))))
    (tmp_path / "mask.png").write_bytes(file_of(mask_of(Resolution(128, 128), "line")))
    edit = ("edit", "room.png", "a hat", "--mask", "mask.png", "--adapter", "ink=a.safetensors", "--use-adapter", "ink")
    done = psctl(*edit, "--reuse", "--quiet")
    assert done.returncode == 2
    assert "--reuse does not work with --use-adapter: records are of the model without adapters" in done.stderr


@pytest.mark.slow
def test_each_request_has_its_own_adapters(psctl: Any, model_dir: Path, lora: Path, tmp_path: Path) -> None:
    import httpx

    from ..support.http_server import HttpServer

    given = ("--adapter", f"ink={lora}")
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(model_dir)
    without = pixels(plain_image(pipe, REQUEST))
    pipe.load_lora_weights(str(lora.parent), weight_name=lora.name, adapter_name="ink")
    pipe.set_adapters(["ink"], adapter_weights=[0.5])
    expected = pixels(plain_image(pipe, REQUEST))
    assert np.abs(expected - without).max() > 8

    two = (
        "generate",
        *[REQUEST.prompt] * 2,
        "-r",
        "32x48",
        "-r",
        "64",
        *OPTIONS,
        "--seed",
        "4",
        "-o",
        "both",
        "--json",
    )
    done = psctl(*two, *given, "--use-adapter", "ink:0.5", "--use-adapter", "")
    assert done.returncode == 0, done.stderr
    assert [image["lora"] for image in json.loads(done.stdout)["images"]] == ["ink:0.5", None]
    assert np.abs(pixels(Image.open(tmp_path / "both" / "000.png")) - expected).max() <= 1

    lines = [{"arrival_s": 0, "lora": "ink"}, {"arrival_s": 0}, {"arrival_s": 0.1, "lora": "ink:0.5"}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    serve = ("serve", "--trace", "trace.jsonl", "--num-inference-steps", "2", "--slo", "600", "--json", *given)
    done = psctl(*serve, "--system", "patchedserve")
    assert done.returncode == 0, done.stderr
    assert "--adapter or --quantize no patch is reused unless you choose --cache" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["completed_requests"] == 3

    options = (*given, "--system", "patched-fcfs", "--slo", "600")  # nothing is measured
    with HttpServer(model_dir, tmp_path / "served", *options) as server:
        url = f"{server.url}/v1/images/generations"
        for named, wanted in (
            ({"lora": "ink:0.5"}, expected),
            ({"lora": [{"name": "ink", "scale": 0.5}]}, expected),
            ({}, without),
        ):
            answer = httpx.post(url, json=ASK | named, timeout=60)
            assert answer.status_code == 200, answer.text
            drawn = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
            assert np.abs(pixels(drawn) - wanted).max() <= 1
        unknown = httpx.post(url, json=ASK | {"lora": "oil"}, timeout=60)
        cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert unknown.status_code == 400
    assert unknown.json()["error"]["message"] == "lora: adapter oil is unknown; there are ink"
    assert cards[0]["adapters"] == ["ink"]
