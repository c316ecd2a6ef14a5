"""`--control` of `psctl generate` and `psctl edit` as users run them, on a tiny model with a ControlNet."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import StableDiffusionXLControlNetPipeline
from PIL import Image

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution

from ..conftest import RunPsctl
from ..support.controls import net_of, save
from ..support.edits import image_of, mask_of
from ..support.plain import plain_image
from ..support.tiny_models import tiny_sdxl

_SIZE = Resolution(64, 96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model, its net, an image for it of another size, and an image to edit with its mask."""
    path, pipe = tmp_path_factory.mktemp("controls"), tiny_sdxl()
    save(path, pipe, {"edges": net_of(pipe, 1)})
    Image.fromarray(image_of(Resolution(80, 80))).save(path / "edges.png")
    Image.fromarray(image_of(_SIZE)).save(path / "room.png")
    Image.fromarray(mask_of(_SIZE)).save(path / "mask.png")
    return path


@pytest.fixture
def run(run_psctl: RunPsctl, folder: Path) -> RunPsctl:
    model: dict[str, Any] = {"PSCTL_MODEL": str(folder / "model"), "PSCTL_DTYPE": "float32"}

    def run(*words: str, **_: str) -> Any:
        command, *others = (word.replace("FOLDER", str(folder)) for word in words)
        steps = ("--num-inference-steps", "3", "-q")
        return run_psctl(command, *others, "--controlnet", f"net={folder / 'edges'}", *steps, **model)

    return run


@pytest.mark.slow
def test_an_image_follows_a_control_of_another_size(run: RunPsctl, folder: Path, tmp_path: Path) -> None:
    control = ("--control", "net:0.8:0:0.7=FOLDER/edges.png")
    done = run("generate", "a hat", "-r", str(_SIZE), "--guidance-scale", "3", *control, "-o", "hat.png")
    assert (done.returncode, done.stderr) == (0, "")
    pipe = tiny_sdxl()
    made: Any = StableDiffusionXLControlNetPipeline(**pipe.components, controlnet=net_of(pipe, 1))
    request = Request(0, "a hat", _SIZE, 3, 3.0)
    expected = plain_image(
        made,
        request,
        image=Image.open(folder / "edges.png"),
        controlnet_conditioning_scale=0.8,
        control_guidance_end=0.7,
    )
    difference = np.abs(np.asarray(Image.open(tmp_path / "hat.png"), int) - np.asarray(expected, int))
    assert difference.max() <= 1


@pytest.mark.slow
def test_an_edit_takes_a_control(run: RunPsctl, tmp_path: Path) -> None:
    for name, scale in (("with.png", 1), ("without.png", 0)):
        words = ("--mask", "FOLDER/mask.png", "--control", f"net:{scale}=FOLDER/edges.png", "-o", name)
        done = run("edit", "FOLDER/room.png", "a hat", *words)
        assert (done.returncode, done.stderr) == (0, "")
    found, other = (np.asarray(Image.open(tmp_path / name), int) for name in ("with.png", "without.png"))
    mask = mask_of(_SIZE)
    assert not np.abs(found - other)[~mask].any()
    assert np.abs(found - other)[mask].mean() > 0.5


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ((), "--controlnet net is used by no image: add --control net=IMAGE"),
        (("--control", "other=FOLDER/edges.png"), "ControlNet other is unknown; there are net"),
        (("--control", "net"), "--control net: give NAME[:SCALE[:START:END]]=IMAGE"),
        (("--control", "net:much=FOLDER/edges.png"), "SCALE, START and END are numbers"),
        (("--control", "net:1:0=FOLDER/edges.png"), "give NAME[:SCALE[:START:END]]=IMAGE"),
        (("--control", "net:nan=FOLDER/edges.png"), "scale of control net is nan, but it must be a number from 0"),
        (("--control", "net:1:0.5:0.5=FOLDER/edges.png"), "starts at 0.5, but it must end later"),
        (("--control", "net=FOLDER/missing.png"), "missing.png: the image file is missing"),
        (("--control", "net=FOLDER/model/model_index.json"), "model_index.json"),
        (("--control", "net=FOLDER/edges.png") * 2, "control net is given twice"),
    ],
)
def test_a_wrong_control_is_one_line(run: RunPsctl, control: tuple[str, ...], said: str) -> None:
    done = run("generate", "a hat", "-r", "64", *control)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
