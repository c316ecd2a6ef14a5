"""`psctl edit` as users run it, on a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.edits import EditSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.families import build_family
from patchedserve.serving.families.references import CROPPED
from patchedserve.serving.models.defaults import read_geometry

from ..conftest import RunPsctl
from ..support.edits import edit_request, image_of, mask_of, plain_edit, redraw_request
from ..support.killed_edits import edit_and_kill
from ..support.plain import plain_image
from ..support.tiny_families import tiny_flux, tiny_klein
from ..support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl

SIZE = Resolution(64, 48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.fromarray(image_of(SIZE)).save(tmp_path / "room.png")
    Image.fromarray(mask_of(SIZE)).save(tmp_path / "mask.png")
    save_tiny(tmp_path / "sdxl", tiny_sdxl(), num_inference_steps=2, guidance_scale=4.0)
    return tmp_path


def test_edit_equals_diffusers_and_keeps_pixels_outside_the_mask(run_psctl: RunPsctl, folder: Path) -> None:
    request = edit_request(0, SIZE, num_steps=2)
    run = run_psctl(
        "edit", folder / "room.png", "a red hat", "--mask", folder / "mask.png", "-n", "2", "-o", folder / "hats",
        "--json", "--dtype", "float32", PSCTL_MODEL=str(folder / "sdxl"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    mask, image = mask_of(SIZE), image_of(SIZE)
    assert told["mask_ratio"] == pytest.approx(mask.mean())
    assert mask.mean() < told["active_share"] <= 1
    assert [each["seed"] for each in told["images"]] == [0, 1]
    first, second = (np.asarray(Image.open(each["path"])).astype(int) for each in told["images"])
    expected = np.asarray(plain_edit(tiny_sdxl(), request, "pil")).astype(int)
    assert np.abs(first - expected)[mask].max() <= 1
    for drawn in (first, second):
        assert (drawn[~mask] == image[~mask]).all()
    assert (first != second)[mask].any()


def test_whole_image_is_redrawn_without_a_mask(run_psctl: RunPsctl, folder: Path) -> None:
    edit = ("edit", folder / "room.png", "a red hat", "--dtype", "float32", "-o", folder / "hat.png")
    where = {"PSCTL_MODEL": str(folder / "sdxl")}
    run = run_psctl(*edit, "--num-inference-steps", "4", **where)
    assert run.returncode == 0, run.stderr
    expected = plain_edit(tiny_sdxl(), redraw_request(0, SIZE, num_steps=4), "pil")
    assert np.abs(np.asarray(Image.open(folder / "hat.png")).astype(int) - np.asarray(expected)).max() <= 1
    run = run_psctl(*edit, "--reuse", "--feather", "4", **where)
    assert (run.returncode, run.stderr) == (2, "Error: a mask is missing for --reuse and --feather: give --mask\n")


def test_references_are_seen_and_not_kept(run_psctl: RunPsctl, folder: Path) -> None:
    save_tiny(folder / "klein", tiny_klein(), num_inference_steps=2, guidance_scale=1.0, max_sequence_length=16)
    where = {"PSCTL_MODEL": str(folder / "klein"), "PSCTL_DTYPE": "float32"}
    sizes = Resolution(70, 64), Resolution(96, 64)
    for name, size in zip(("room", "cat"), sizes, strict=True):
        Image.fromarray(image_of(size)).save(folder / f"{name}.png")
    edit = ("edit", folder / "room.png", "put the cat on the sofa", "--reference", folder / "cat.png")
    run = run_psctl(*edit, "-o", folder / "sofa.png", "--json", **where)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["references"], told["images"][0]["resolution"]) == (["64x64", "96x64"], "64x64")
    references = tuple(CROPPED.fitted(image_of(size), 16) for size in sizes)
    request = Request(0, "put the cat on the sofa", Resolution(64, 64), 2, 1.0, references=references)
    expected = np.asarray(plain_image(tiny_klein(), request, max_sequence_length=16)).astype(int)
    assert np.abs(np.asarray(Image.open(folder / "sofa.png")).astype(int) - expected).max() <= 1
    wide = run_psctl(*edit, "-r", "96x32", "-o", folder / "wide.png", **where)
    assert wide.returncode == 0, wide.stderr
    assert Image.open(folder / "wide.png").size == (96, 32)
    square, box = image_of(Resolution(64, 64), 3), mask_of(Resolution(64, 64))
    for name, array in (("square", square), ("box", box.astype(np.uint8) * 255)):
        Image.fromarray(array).save(folder / f"{name}.png")
    masked = ("edit", folder / "square.png", "a hat", "--mask", folder / "box.png", *edit[3:], "-o", folder / "m.png")
    run = run_psctl(*masked, "--json", **where)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["references"] == ["64x64", "96x64"]
    seen = CROPPED.beside(square, references[1:])
    request = Request(0, "a hat", Resolution(64, 64), 2, 1.0, edit=EditSpec(square, box), references=seen)
    expected = np.asarray(plain_edit(tiny_klein(), request, "pil", max_sequence_length=16)).astype(int)
    found = np.asarray(Image.open(folder / "m.png")).astype(int)
    assert np.abs(found - expected)[box].max() <= 1
    assert (found[~box] == square[~box]).all()
    alone = (*masked[:5], "-o", folder / "alone.png", "--parallel", "virtual:2")
    run = run_psctl(*alone, "--json", **where)
    assert run.returncode == 0, run.stderr
    assert "The model sees its text alone: " in run.stderr
    assert "which sees its image, does not work with --parallel" in run.stderr
    assert "references" not in json.loads(run.stdout)
    for words, message in (
        ((*edit, "--strength", "0.5"), "--reference is of images that follow others: give a --mask, or no --strength"),
        ((*edit[:3], "-r", "64", "--strength", "0.5"), "--resolution is for images that are drawn from references"),
        ((*edit, *(["--reference", folder / "cat.png"] * 9)), "11 references are given, but"),
        ((*edit, "--parallel", "virtual:2"), "--reference does not work with --parallel"),
        (
            (*edit[:3], "--cache", "accumulated", "--cache-threshold", "1"),
            "which sees its image, does not work with --cache accumulated: ",
        ),
        (
            (*edit, "--mask", folder / "mask.png", "--reuse"),
            "--reference does not work with --reuse: records are of passes that see no references",
        ),
        ((*edit[:4], folder / "none.png"), "none.png"),
    ):
        run = run_psctl(*words, "-o", folder / "no.png", **where)
        assert (run.returncode in (1, 2), len(run.stderr.splitlines())) == (True, 1), run.stderr
        assert message in run.stderr
    run = run_psctl(*edit, "-o", folder / "no.png", PSCTL_MODEL=str(folder / "sdxl"))
    assert run.returncode == 2
    assert run.stderr.endswith("sdxl takes no references\n")


@pytest.mark.exhaustive
def test_template_is_recorded_once_and_read_by_edits(run_psctl: RunPsctl, folder: Path) -> None:
    where = {"PSCTL_MODEL": str(folder / "sdxl"), "PSCTL_WORKSPACE": str(folder / "space")}
    Image.fromarray(image_of(Resolution(64, 64))).save(folder / "room.png")
    mask = np.zeros((64, 64), bool)
    mask[:32, :32] = True
    Image.fromarray(mask).save(folder / "mask.png")
    added = run_psctl("templates", "add", folder / "room.png", "--template-seed", "3", "--json", **where)
    assert added.returncode == 0, added.stderr
    template = json.loads(added.stdout)
    assert template["is_new"]
    again = run_psctl("templates", "add", folder / "room.png", "--template-seed", "3", "--json", **where)
    assert json.loads(again.stdout) == template | {"is_new": False}
    edit = ("edit", folder / "room.png", "a hat", "--mask", folder / "mask.png", "--reuse", "--template-seed", "3")
    run = run_psctl(*edit, "-o", folder / "one.png", **where)
    assert run.returncode == 0, run.stderr
    assert "template:" in added.stderr
    assert "template:" not in run.stderr
    exact = run_psctl(*edit[:5], "-o", folder / "two.png", **where)
    assert exact.returncode == 0, exact.stderr
    images = [np.asarray(Image.open(folder / name)).astype(int) for name in ("room.png", "one.png", "two.png")]
    for drawn in images[1:]:
        assert (drawn[~mask] == images[0][~mask]).all()
        assert (drawn[mask] != images[0][mask]).any()
    listed = json.loads(run_psctl("templates", "list", "--json", **where).stdout)
    assert [(each["id"], each["about"]["size"]) for each in listed] == [(template["id"], "64x64")]
    slow = run_psctl(*edit, "-o", folder / "slow.png", "--edit-link-mbps", "20", "--plan", "strawman", **where)
    assert slow.returncode == 0, slow.stderr
    assert (folder / "slow.png").read_bytes() == (folder / "one.png").read_bytes()
    from_files = run_psctl(*edit, "-o", folder / "files.png", "--template-memory-mb", "0", **where)
    assert from_files.returncode == 0, from_files.stderr
    assert (folder / "files.png").read_bytes() == (folder / "one.png").read_bytes()
    none = run_psctl(
        *edit, "-o", folder / "none.png", "--template-memory-mb", "0", "--template-staging-mb", "1e-3", **where
    )
    assert (none.returncode, len(none.stderr.splitlines()[-1:])) == (1, 1)
    assert "MB, and --template-staging-mb is 0.001" in none.stderr
    less = run_psctl(*edit, "-o", folder / "three.png", "--keep", "outputs", **where)
    assert less.returncode == 0, less.stderr
    assert "template:" in less.stderr
    assert [each["about"]["keep"] for each in json.loads(run_psctl("templates", "list", "--json", **where).stdout)] == [
        "outputs",
        "all",
    ]
    first, second = run_psctl("templates", "list", **where).stdout.splitlines()
    assert ("keeps outputs" in first, "keeps all" in second) == (True, True)
    assert run_psctl("templates", "remove", first.partition(":")[0], **where).returncode == 0
    assert run_psctl("templates", "check", **where).stdout.strip() == "1 templates are whole."
    step = next(Path(template["folder"]).glob("step-*.safetensors"))
    step.write_bytes(step.read_bytes()[:-8])
    checked = run_psctl("templates", "check", **where)
    assert checked.returncode == 1
    assert f"template {template['id']} is damaged" in checked.stdout
    wrong = run_psctl("templates", "remove", "nothing", **where)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert run_psctl("templates", "remove", template["id"], **where).returncode == 0
    assert json.loads(run_psctl("templates", "list", "--json", **where).stdout) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_generated_image_leaves_a_record_for_its_edits(run_psctl: RunPsctl, folder: Path) -> None:
    where = {"PSCTL_MODEL": str(folder / "sdxl"), "PSCTL_WORKSPACE": str(folder / "space"), "PSCTL_DTYPE": "float32"}
    words = ("generate", "a room", "-r", "64", "--seed", "4", "--save-template", "--keep", "kv", "--json")
    run = run_psctl(*words, "-o", folder / "drawn.png", **where)
    assert run.returncode == 0, run.stderr
    (told,) = json.loads(run.stdout)["images"]
    (listed,) = json.loads(run_psctl("templates", "list", "--json", **where).stdout)
    assert (listed["id"], listed["about"]["kind"], listed["about"]["keep"]) == (told["template"], "trajectory", "kv")
    assert "its generation" in run_psctl("templates", "list", **where).stdout
    plain = run_psctl(*words[:6], "-o", folder / "plain.png", **where)
    assert plain.returncode == 0, plain.stderr
    first, same = (np.asarray(Image.open(folder / name)).astype(int) for name in ("drawn.png", "plain.png"))
    assert np.abs(first - same).max() <= 1
    mask = np.zeros((64, 64), bool)
    mask[:32, :32] = True
    Image.fromarray(mask).save(folder / "quarter.png")
    edit = ("--mask", folder / "quarter.png", "--reuse", "--template-kind", "trajectory", "--overwrite")
    edited = (folder / "edited.png", folder / "drawn.png")
    for prompt, seed, least, most in (("a room", "4", 0, 1), ("a red hat", "5", 2, 255)):
        run = run_psctl(
            "edit", edited[1], prompt, *edit, "--seed", seed, "--keep", "kv", "-o", edited[0], "--no-paste", **where
        )
        assert run.returncode == 0, run.stderr
        assert least <= np.abs(np.asarray(Image.open(edited[0])).astype(int) - first)[:32, :32].max() <= most
    for weights in (folder / "sdxl").glob("*/*.safetensors"):
        weights.unlink()
    for command, message in (
        (("edit", edited[1], "a hat", *edit), "there is no record of the image's generation with 2 steps"),
        (("edit", folder / "room.png", "a hat", *edit), "the mask has 64x64 pixels"),
        (("edit", edited[1], "a hat", *edit, "--template-seed", "2"), "has its prompt and seed already"),
        (("generate", "a", "--save-template", "-o", folder / "a.jpg"), "must end in .png"),
        (("generate", "a", "--save-template", "-r", "72", "-o", folder / "a.png"), "must be multiples of 32"),
        (
            ("generate", "a", "--save-template", "--engine", "plain", "-o", folder / "a.png"),
            "--save-template does not work",
        ),
        (("generate", "a", "--keep", "kv", "-o", folder / "a.png"), "add --save-template"),
    ):
        run = run_psctl(*command, **where)
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
        assert message in run.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_edits_leave_complete_images_and_records(folder: Path) -> None:
    save_tiny(folder / "longer", tiny_sdxl(), num_inference_steps=8, guidance_scale=4.0)
    found = edit_and_kill(folder, folder / "longer", 5)
    assert (found.wrong_images, found.half_records, found.failed) == (0, 0, 0)
    assert sum(found.moments.values()) == 5


@pytest.mark.parametrize("option", [["--engine", "plain"], ["--cache", "interval"], ["--compile"]])
def test_reuse_is_refused_for_models_without_masked_passes(
    run_psctl: RunPsctl, folder: Path, option: list[str]
) -> None:
    run = run_psctl(
        "edit", folder / "room.png", "a hat", "--mask", folder / "mask.png", "--reuse", *option,
        PSCTL_MODEL=str(folder / "sdxl"),
    )  # fmt: skip
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
    assert f"--reuse does not work with {' '.join(option)}: " in run.stderr


def test_invalid_edits_give_a_one_line_error_before_loading(run_psctl: RunPsctl, folder: Path) -> None:
    thin = np.zeros((SIZE.height, SIZE.width), bool)
    thin[3] = True
    Image.fromarray(thin).save(folder / "thin.png")
    Image.fromarray(thin[:-8]).save(folder / "small.png")
    Image.fromarray(image_of(Resolution(60, 48))).save(folder / "odd.png")
    Image.fromarray(mask_of(Resolution(60, 48))).save(folder / "odd-mask.png")
    (folder / "half.png").write_bytes((folder / "room.png").read_bytes()[:200])
    for image, mask, options, message in (
        ("room.png", "thin.png", [], "the mask is too thin"),
        ("room.png", "small.png", [], "the mask has 64x40 pixels, but the image to edit has 64x48"),
        ("odd.png", "odd-mask.png", [], "must be a positive multiple of 8"),
        ("half.png", "mask.png", [], "half.png: damaged image"),
        ("no.png", "mask.png", [], "no.png: the image file is missing"),
        ("room.png", "mask.png", ["--strength", "0.4"], "with 2 steps it must be at least 0.5"),
        ("room.png", "mask.png", ["--strength", "2"], "strength is 2.0"),
        ("room.png", "mask.png", ["--template-seed", "2"], "only --reuse reads"),
        ("room.png", "mask.png", ["--keep", "kv"], "add --reuse"),
        ("room.png", "mask.png", ["--edit-dilate", "1"], "add --reuse"),
        ("room.png", "mask.png", ["--edit-link-mbps", "1"], "add --reuse"),
        ("room.png", "mask.png", ["--plan", "none"], "add --reuse"),
        ("room.png", "mask.png", ["--template-disk-mb", "1"], "are of records: add --reuse"),
        ("room.png", "mask.png", ["--reuse", "--template-staging-mb", "0"], "-staging-mb is 0, but it must be above 0"),
        ("room.png", "mask.png", ["--reuse", "--template-memory-mb", "-1"], "it must be 0 or more"),
        (
            "room.png",
            "mask.png",
            ["--reuse", "--edit-link-mbps", "9", "--cuda-graphs"],
            "not work with --cuda-graphs: it plans by",
        ),
        ("room.png", "mask.png", ["--reuse", "--plan", "none"], "say with --edit-link-mbps how fast it is"),
        ("room.png", "mask.png", ["--reuse", "--edit-link-mbps", "0"], "--edit-link-mbps is 0, but it must be above 0"),
        ("room.png", "mask.png", ["--reuse", "--edit-full-steps", "3"], "full_steps is 3, but the edit takes 2 steps"),
        ("room.png", "mask.png", ["--reuse", "--edit-dilate", "65"], "dilate is 65, but it must be a whole number"),
        ("room.png", "mask.png", ["-n", "2", "-o", folder / "x.png"], "there are 2 images: give a folder"),
    ):
        # A model without weights: it cannot be loaded.
        for weights in (folder / "sdxl").glob("*/*.safetensors"):
            weights.unlink()
        run = run_psctl(
            "edit", folder / image, "a hat", "--mask", folder / mask, *options, PSCTL_MODEL=str(folder / "sdxl")
        )
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
        assert message in run.stderr
    run = run_psctl("edit", folder / "room.png", " ", "--mask", folder / "mask.png", PSCTL_MODEL=str(folder / "sdxl"))
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
    assert "prompt is ' ', but it must say what to draw" in run.stderr


def test_unsupported_record_settings_are_refused_before_loading(run_psctl: RunPsctl, folder: Path) -> None:
    save_tiny(folder / "flux", tiny_flux())
    for weights in (folder / "flux").glob("*/*.safetensors"):
        weights.unlink()
    for words in (
        ("edit", folder / "room.png", "a hat", "--mask", folder / "mask.png", "--reuse"),
        ("templates", "add", folder / "room.png"),
        ("serve", "--http", "--reuse-templates"),
    ):
        run = run_psctl(*words, "--keep", "outputs", PSCTL_MODEL=str(folder / "flux"))
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
        assert (
            "--keep outputs does not work with a FluxPipeline: its blocks need more; give --keep kv or all"
            in run.stderr
        )
    for option, value in (("--keep", "kv"), ("--edit-link-mbps", "9"), ("--plan", "none")):
        run = run_psctl("serve", "--http", option, value, PSCTL_MODEL=str(folder / "flux"))
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
        assert f"{option} is of records that edits read: add --reuse-templates" in run.stderr


@pytest.mark.parametrize("make", [tiny_sd, tiny_sdxl, tiny_sd3])
def test_geometry_equals_that_of_the_loaded_model(make: object, tmp_path: Path) -> None:
    pipe = make()  # type: ignore[operator]
    assert read_geometry(save_tiny(tmp_path / "model", pipe)) == build_family(pipe).geometry
