"""`psctl generate` as users run it, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution

from ..conftest import RunPsctl
from ..support.plain import plain_image
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl


@pytest.fixture(scope="module")
def sdxl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "sdxl"
    return save_tiny(path, tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0)


@pytest.fixture
def generate(run_psctl: RunPsctl, sdxl_dir: Path) -> RunPsctl:
    def run(*arguments: str | Path, **options: str):
        return run_psctl("generate", *arguments, PSCTL_MODEL=str(sdxl_dir), **options)

    return run


@pytest.mark.slow
def test_mixed_resolutions_in_one_call(generate: RunPsctl, tmp_path: Path) -> None:
    run = generate(
        "a hat",
        "two cars",
        "sea",
        "-r",
        "32",
        "-r",
        "48x32",
        "-r",
        "64",
        "--seed",
        "5",
        "--json",
        "-q",
        PSCTL_DTYPE="float32",
    )
    assert (run.returncode, run.stderr) == (0, "")
    images = json.loads(run.stdout)["images"]
    assert [image["path"] for image in images] == ["images/000.png", "images/001.png", "images/002.png"]
    assert [image["seed"] for image in images] == [5, 6, 7]
    assert [image["num_inference_steps"] for image in images] == [2, 2, 2]
    pipe = tiny_sdxl()
    for image, prompt, size in zip(images, ("a hat", "two cars", "sea"), ((32, 32), (48, 32), (64, 64)), strict=True):
        request = Request(image["id"], prompt, Resolution(*size), 2, guidance_scale=3.0, seed=image["seed"])
        found = np.asarray(Image.open(tmp_path / image["path"]), dtype=int)
        assert np.abs(found - np.asarray(plain_image(pipe, request), dtype=int)).max() <= 1


@pytest.mark.slow
def test_one_prompt_to_one_file_and_the_models_own_size(generate: RunPsctl, tmp_path: Path) -> None:
    run = generate("a [bold] hat", "--output", "new/hat.jpg", "--num-inference-steps", "1")
    assert run.returncode == 0, run.stderr
    assert "new/hat.jpg" in run.stdout
    assert "a [bold] hat" in run.stdout
    image = Image.open(tmp_path / "new" / "hat.jpg")
    assert (image.size, image.format) == ((64, 64), "JPEG")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hat.jpg"]


def test_prompts_from_a_file_and_sd3(run_psctl: RunPsctl, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "sd3", tiny_sd3(), num_inference_steps=2)
    (tmp_path / "prompts.txt").write_text("a hat\n\na car\n")
    run = run_psctl("generate", "--prompts", "prompts.txt", "--model", model, "-r", "32", "-o", "out", "--json")
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000.png", "001.png"]
    assert [image["guidance_scale"] for image in json.loads(run.stdout)["images"]] == [5.0, 5.0]


@pytest.mark.slow
def test_existing_images_are_kept_unless_overwrite_is_given(generate: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "hat.png").write_text("precious")
    run = generate("a hat", "-o", "hat.png", "-r", "32")
    assert run.returncode == 2
    assert "hat.png exists already" in run.stderr
    assert (tmp_path / "hat.png").read_text() == "precious"
    assert generate("a hat", "-o", "hat.png", "-r", "32", "--overwrite").returncode == 0
    assert Image.open(tmp_path / "hat.png").size == (32, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        ([""], "prompt number 0 is '', but it must say what to draw"),
        (["a hat", " "], "prompt number 1 is ' '"),
        (["a", "-o", "/proc/x.png"], "folder /proc is not writable"),
        (["a", "b", "-o", "/proc/self"], "folder /proc/self is not writable"),  # for every user, including root
        (["a", "--prompts", "nowhere.txt"], "not both"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "empty.txt"], "empty.txt"),
        (["a", "-r", "100"], "multiple of 8"),
        (["a", "-r", "axb"], "axb"),
        (["a", "b", "c", "-r", "32", "-r", "64"], "2 times for 3 prompts"),
        (["a", "b", "-o", "one.png"], "give a folder"),
        (["a", "-o", "empty.txt"], "is a file"),
        (["a", "-o", "empty.txt/one.png"], "is a file"),
        (["a", "--guidance-scale", "-1"], "guidance_scale is -1"),
        (["a", "--num-inference-steps", "0"], "num-inference-steps"),
        (["a", "--seed", str(2**63)], "seed"),
        (["a", "--seed", "-1"], "seed"),
        (["a", "--model", "emoji-xxl"], "emoji-xl, emoji-3"),
        (["a", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    generate: RunPsctl, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    run = generate(*arguments, "--quiet")
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.slow
def test_failed_image_is_reported_and_others_are_kept(generate: RunPsctl, tmp_path: Path) -> None:
    # A folder with the name of the second image, which no file can replace.
    (tmp_path / "images" / "001.png").mkdir(parents=True)
    run = generate("a", "b", "-r", "32", "--overwrite", "--json", "-q")
    assert run.returncode == 1
    assert "1 of 2 images failed; number 1" in run.stderr
    assert [image["status"] for image in json.loads(run.stdout)["images"]] == ["completed", "failed"]
    assert (tmp_path / "images" / "000.png").is_file()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_ranks_in_processes_equal_virtual_ranks(
    run_psctl: RunPsctl, tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Any
) -> None:
    model = save_tiny(tmp_path / "model", make(), num_inference_steps=4, guidance_scale=3.0)
    capfd.readouterr()
    for number, ranks in enumerate(("2", "virtual:2", "1")):
        options = ("--cfg-split", "off", "--parallel-mode", "displaced", "--parallel-warmup", "0") if number < 2 else ()
        # One request at a time: the composition of batches depends on the clock, and rounding on their size.
        # Batches of several requests are compared in tests/serving/parallel.
        done = run_psctl(
            *("generate", "a hat", "a sea", "-r", "64", "--model", model, "--dtype", "float32", "--engine"),
            *("plain" if ranks == "1" else "parallel", "--parallel", ranks, *options, "-o", str(number)),
            *("--max-batch-size", "1"),
            OMP_NUM_THREADS="2" if ranks == "2" else "1",
        )
        assert done.returncode == 0, done.stderr
        assert capfd.readouterr().err == "", "neither the other ranks nor the libraries below Python say anything"
    images = [
        [np.asarray(Image.open(tmp_path / str(number) / name)) for name in ("000.png", "001.png")]
        for number in range(3)
    ]
    assert all(map(np.array_equal, images[0], images[1]))
    assert not any(map(np.array_equal, images[0], images[2])), "they are displaced"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--parallel two", "--parallel is 'two', but it must be a number of ranks, as 2 or virtual:2"),
        (
            "--parallel 2 --engine plain",
            "--parallel does not work with --engine plain: ranks are an engine of their own",
        ),
        ("--engine parallel", "--engine parallel needs --parallel with two ranks"),
        ("--parallel 2 --cache patch", "--cache patch does not work with --parallel: it is only for --engine patched"),
        (
            "--parallel 2 --compile",
            "--compile does not work with --parallel: it makes graphs of whole blocks, but ranks",
        ),
        ("--parallel 3 --parallel-shares 2,1", "--parallel-shares are 2, but there are 3 ranks"),
        ("--parallel 2 --parallel-shares 2,x", "--parallel-shares are '2,x', but they must be positive numbers"),
        (
            "--parallel 2 --parallel-backend nccl",
            "--parallel-backend nccl takes a GPU of its own for each rank, but they",
        ),
        ("--parallel 2 --parallel-devices cpu", "--parallel-devices names 1, but there are 2 ranks"),
        ("--parallel 2 --parallel-devices cpu,tpu", "--parallel-devices is 'cpu,tpu', but each must be cpu, cuda or"),
        ("--parallel 2 --parallel-timeout 0", "--parallel-timeout is 0.0, but it must be a positive number"),
        ("--parallel 999", "--parallel 999 takes a process for each rank, but here at most"),
        ("--parallel virtual:9", "9 ranks are too many for latents of 4 rows"),
    ],
)
def test_invalid_numbers_of_ranks_are_refused(generate: RunPsctl, options: str, said: str) -> None:
    done = generate("a hat", "-r", "32", *options.split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: {said}")


@pytest.mark.product(most=1)
@pytest.mark.parametrize("stages", ["threads", "processes"])
def test_non_finite_image_is_not_saved(run_psctl: RunPsctl, tmp_path: Path, stages: str) -> None:
    pipe = tiny_sd3()
    with torch.no_grad():
        pipe.vae.decoder.conv_norm_out.weight.mul_(3e38)
    model = save_tiny(tmp_path / "model", pipe, num_inference_steps=2)
    options = ("--model", model, "-r", "32", "--stages", stages, "--dtype", "bfloat16", "-q", "-o", "a.png")
    done = run_psctl("generate", "a cat", *options)
    assert (done.returncode, done.stdout.count("failed")) == (1, 1)
    assert len(done.stderr.splitlines()) == 1
    assert "the image is not finite in bfloat16, nor in float32" in done.stderr
    assert not (tmp_path / "a.png").exists()
