"""Loading: valid models equal those that diffusers loads, and invalid ones are refused in one line with the cause."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchedserve.data.errors import PsctlError, RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.loading import load_model, model_defaults

from ...support.plain import plain_latents
from ...support.tiny_families import tiny_flux, tiny_schnell
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl

UNET = Path("unet/diffusion_pytorch_model.safetensors")
TEXT = Path("text_encoder_2/model.safetensors")


@pytest.fixture(scope="module")
def sdxl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "sdxl", tiny_sdxl())


@pytest.fixture
def broken_dir(sdxl_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sdxl_dir, tmp_path / "broken"))


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_sd, tiny_sdxl, tiny_sd3])
def test_loaded_model_equals_the_saved_one(build: Callable, tmp_path: Path) -> None:
    pipe = build()
    request = Request(0, "a car", Resolution(32, 32), 2, seed=1)
    expected = plain_latents(pipe, request)
    model = load_model(str(save_tiny(tmp_path / "model", pipe)), device="cpu", dtype="float32")
    assert model.device.type == "cpu"
    assert model.dtype == torch.float32
    assert not model.pipe.vae.training
    assert torch.equal(plain_latents(model.pipe, request), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3])
def test_dtype_applies_to_every_component(build: Callable, tmp_path: Path, dtype: str) -> None:
    model = load_model(str(save_tiny(tmp_path / "model", build())), device="cpu", dtype=dtype)
    wanted = getattr(torch, dtype)
    assert {model.dtype, model.denoiser.dtype, model.pipe.text_encoder_2.dtype} == {wanted}
    assert {parameter.dtype for parameter in model.denoiser.parameters()} == {wanted}
    # SDXL's autoencoder overflows in float16; diffusers computes it in float32, and so do we.
    is_upcast = build is tiny_sdxl and dtype == "float16"
    assert model.pipe.vae.dtype == (torch.float32 if is_upcast else wanted)


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, tiny_sdxl(), num_inference_steps=7, guidance_scale=3, resolutions=["32", "48x64"])
    defaults = model_defaults(str(path))
    assert (defaults.num_inference_steps, defaults.guidance_scale) == (7, 3.0)
    assert defaults.resolutions == (Resolution(32, 32), Resolution(48, 64))
    assert load_model(str(path)).defaults == defaults


@pytest.mark.parametrize(("build", "settings"), [(tiny_flux, (28, 3.5)), (tiny_schnell, (4, 0.0))])
def test_flux_has_the_settings_of_its_cards(build: Callable, settings: tuple[int, float], tmp_path: Path) -> None:
    defaults = model_defaults(str(save_tiny(tmp_path / "its", build())))
    assert (defaults.num_inference_steps, defaults.guidance_scale) == settings
    assert defaults.default_resolution == Resolution(1024, 1024)
    (tmp_path / "its" / "psctl.json").write_text('{"num_inference_steps": 9, "default_resolution": "64x32"}')
    own = model_defaults(str(tmp_path / "its"))
    assert (own.num_inference_steps, own.default_resolution) == (9, Resolution(64, 32))


def test_too_long_flux_text_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "flux", tiny_flux(), max_sequence_length=513)
    with pytest.raises(UsageError, match="max_sequence_length is 513, but FluxPipeline takes 512 at most"):
        load_model(str(folder), "cpu", "float32")


@pytest.mark.slow
def test_fingerprint_changes_with_the_weights(broken_dir: Path, sdxl_dir: Path) -> None:
    before = load_model(str(sdxl_dir)).fingerprint
    (broken_dir / "figures.json").write_text('{"fid": 1}')
    assert load_model(str(broken_dir)).fingerprint == before, "what the pipeline does not read does not count"
    tensors = load_file(broken_dir / UNET)
    tensors["conv_in.bias"] += 1
    save_file(tensors, broken_dir / UNET, metadata={"format": "pt"})
    assert load_model(str(broken_dir)).fingerprint != before


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _spoil_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 4))


def _drop_tensor(path: Path, metadata: bool = True) -> None:
    tensors = load_file(path)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, path, metadata={"format": "pt"})


def _reshape_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors[sorted(tensors)[0]] = torch.zeros(3, 5)
    save_file(tensors, path, metadata={"format": "pt"})


# The file, the damage, and what the message must contain beside the file's name.
DAMAGES: dict[str, tuple[Path, Callable[[Path], object], str]] = {
    "truncated": (UNET, _truncate, "truncated.*not fully covered"),
    "not safetensors": (UNET, lambda path: path.write_bytes(b"hello, weights"), "not a safetensors file.*header too"),
    "header damaged": (UNET, _spoil_header, "corrupt.*invalid JSON in header"),
    "missing": (TEXT, Path.unlink, "missing weights"),
    "U-Net lacks a tensor": (UNET, _drop_tensor, "lacks tensor"),
    "text encoder lacks a tensor": (TEXT, _drop_tensor, "lacks tensor"),
    "U-Net shape": (UNET, _reshape_tensor, "another shape"),
    "text encoder shape": (TEXT, _reshape_tensor, "another shape"),
    "config": (Path("vae/config.json"), lambda path: path.write_text("{"), "not valid JSON"),
    "config missing": (Path("vae/config.json"), Path.unlink, "missing file"),
    "scheduler": (Path("scheduler/scheduler_config.json"), lambda path: path.write_text("[]"), "holds a list, but"),
    "tokenizer": (Path("tokenizer/tokenizer.json"), Path.unlink, "missing vocabulary"),
    "component": (Path("vae"), shutil.rmtree, "model_index.json names it"),
    "index": (Path("model_index.json"), lambda path: path.write_text("{}"), "_class_name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(broken_dir: Path, damage: str) -> None:
    file, spoil, reason = DAMAGES[damage]
    spoil(broken_dir / file)
    with pytest.raises(RunError, match=reason) as caught:
        load_model(str(broken_dir))
    message = str(caught.value)
    assert "\n" not in message
    assert file.parts[0] in message


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_variants_and_shards_load(tmp_path: Path, variant: str | None, *, shards: bool) -> None:
    pipe = tiny_sdxl()
    pipe.save_pretrained(tmp_path, variant=variant, max_shard_size="60KB" if shards else "1GB")
    mark = "" if variant is None else f".{variant}"
    name = (
        f"diffusion_pytorch_model.safetensors.index{mark}.json"
        if shards
        else f"diffusion_pytorch_model{mark}.safetensors"
    )
    assert (tmp_path / "unet" / name).is_file()
    loaded = load_model(str(tmp_path), "cpu", "float32").pipe
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        found, expected = getattr(loaded, part).state_dict(), getattr(pipe, part).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("dtype", "variant"), [("float32", None), ("bfloat16", None), ("float16", "fp16")])
def test_variant_of_the_requested_dtype_is_loaded(tmp_path: Path, dtype: str, variant: str | None) -> None:
    pipes: dict[str | None, Any] = {None: tiny_sdxl(0), "fp16": tiny_sdxl(1)}  # other weights, to tell them apart
    for mark, pipe in pipes.items():
        pipe.save_pretrained(tmp_path, variant=mark, max_shard_size="60KB" if mark is None else "1GB")
    loaded = load_model(str(tmp_path), "cpu", dtype).pipe
    for part in ("unet", "text_encoder", "text_encoder_2"):
        expected = getattr(pipes[variant], part).to(getattr(torch, dtype)).state_dict()
        found = getattr(loaded, part).state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected), part


def test_incomplete_download_names_the_missing_shard(tmp_path: Path) -> None:
    tiny_sdxl().save_pretrained(tmp_path, variant="fp16", max_shard_size="60KB")
    last = sorted((tmp_path / "unet").glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(RunError, match=f"missing file .*{last.name}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.ckpt", "pickled weights are not loaded, as they can run code"),
        ("model.bin", "pickled weights are not loaded, as they can run code"),
        ("model.pt@config", "pickled weights are not loaded, as they can run code"),
        (
            "model.gguf",
            "is a file; a .safetensors checkpoint, or a diffusers directory with model_index.json, is expec",
        ),
    ],
)
def test_weight_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name.partition("@")[0]).write_bytes(b"weights")
    with pytest.raises(UsageError, match=message) as caught:
        load_model(str(tmp_path / name))
    assert name.partition("@")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["bin", "pt"])
def test_pickled_weights_of_a_component_are_refused(broken_dir: Path, kind: str) -> None:
    (broken_dir / UNET).rename(broken_dir / UNET.with_suffix(f".{kind}"))
    with pytest.raises(RunError, match=f"diffusion_pytorch_model.{kind}: pickled weights are not loaded"):
        load_model(str(broken_dir))


def test_a_scheduler_that_needs_another_package_is_named(broken_dir: Path) -> None:
    if importlib.util.find_spec("torchsde") is not None:
        pytest.skip("torchsde is installed")
    for path, name in ((Path("model_index.json"), "scheduler"), (Path("scheduler/scheduler_config.json"), None)):
        content = json.loads((broken_dir / path).read_text())
        if name is None:
            content["_class_name"] = "DPMSolverSDEScheduler"
        else:
            content[name] = ["diffusers", "DPMSolverSDEScheduler"]
        (broken_dir / path).write_text(json.dumps(content))
    with pytest.raises(RunError, match="DPMSolverSDEScheduler requires the torchsde library") as caught:
        load_model(str(broken_dir))
    assert "\n" not in str(caught.value)


def test_unsupported_pipeline_class(broken_dir: Path) -> None:
    (broken_dir / "model_index.json").write_text(json.dumps({"_class_name": "FluxFillPipeline"}))
    with pytest.raises(
        UsageError, match=r"FluxFillPipeline .*StableDiffusionXLPipeline, StableDiffusion3Pipeline, Flux"
    ):
        load_model(str(broken_dir))


@pytest.mark.parametrize("spec", ["emoji-xxl", "./not/there", "/nowhere"])
def test_unknown_name_lists_the_bundled_models(spec: str) -> None:
    with pytest.raises(UsageError, match=r"emoji-xl.*emoji-3") as caught:
        load_model(spec)
    assert spec in str(caught.value)


def test_folder_without_index(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model_index\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("options", "named"), [({"device": "tpu"}, "tpu"), ({"dtype": "int8"}, "float32, bfloat16")])
def test_unknown_device_and_dtype(sdxl_dir: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        load_model(str(sdxl_dir), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_unavailable_cuda_is_refused(sdxl_dir: Path) -> None:
    with pytest.raises(UsageError, match="cuda is not there"):
        load_model(str(sdxl_dir), device="cuda")


@pytest.mark.parametrize("content", ["[]", "{", '{"steps": 3}', '{"num_inference_steps": 0}', '{"resolutions": 128}'])
def test_invalid_defaults_file_is_refused(broken_dir: Path, content: str) -> None:
    (broken_dir / "psctl.json").write_text(content)
    with pytest.raises(PsctlError, match=r"psctl\.json"):
        load_model(str(broken_dir))


def test_text_length_of_a_model_without_a_third_encoder(broken_dir: Path) -> None:
    (broken_dir / "psctl.json").write_text('{"max_sequence_length": 77}')
    with pytest.raises(UsageError, match=r"max_sequence_length is 77, .* with a transformer only, not to Stable"):
        load_model(str(broken_dir), device="cpu")


@pytest.mark.slow
def test_hub_id_while_offline_gives_advice() -> None:
    # A process of its own, because the hub client reads HF_HUB_OFFLINE once.
    code = (
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "from patchedserve.data.errors import RunError\n"
        "from patchedserve.serving.models.loading import load_model\n"
        "try: load_model('nobody-here/no-such-model')\n"
        "except RunError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "HF_HUB_OFFLINE is set" in run.stdout, run.stderr
    assert "hf download nobody-here/no-such-model" in run.stdout
    assert run.stderr == ""


def test_invalid_name_is_refused_before_importing_torch() -> None:
    code = (
        "import sys\n"
        "from patchedserve.data.errors import UsageError\n"
        "from patchedserve.serving.models.loading import load_model\n"
        "try: load_model('emoji-xxl')\n"
        "except UsageError: print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "False\n", run.stderr
