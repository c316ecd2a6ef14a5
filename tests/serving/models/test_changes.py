"""Other samplers and fused adapters: the results are those of diffusers, and the fingerprint differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchedserve.data.errors import MissingExtraError, PsctlError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.samplers.names import SCHEDULERS

from ...support.joining import run_joining
from ...support.patched_models import relative_error
from ...support.plain import plain_latents, short_texts
from ...support.tiny_families import tiny_aura, tiny_flux
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl

REQUESTS = [
    Request(0, "a red apple", Resolution(32, 32), 4, guidance_scale=4.0, seed=10),
    Request(1, "a car", Resolution(64, 32), 6, guidance_scale=1.0, seed=11),
]
TOLERANCE = 1e-3


def changed(folder: Path, engine: Any = "patched", **options: Any) -> Any:
    return load_model(str(folder), "cpu", "float32", EngineOptions(engine, model=ModelOptions(**options)))


def alone(pipe: Any) -> list[torch.Tensor]:
    return [plain_latents(pipe, request, **short_texts(pipe)) for request in REQUESTS]


def errors(model: Any, pipe: Any) -> float:
    found, failures = run_joining(model, REQUESTS)
    assert failures == {}
    return relative_error([found[each.request_id] for each in REQUESTS], alone(pipe))


@pytest.fixture(scope="module")
def sd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "sd", tiny_sd())


@pytest.mark.product(most=2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "unipc" else pytest.mark.slow) for n in SCHEDULERS])
def test_replaced_sampler_equals_diffusers(name: Any, sd_dir: Path) -> None:
    import diffusers

    pipe: Any = diffusers.StableDiffusionPipeline.from_pretrained(sd_dir)
    kind, options = SCHEDULERS[name]
    pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config, **options)
    model = changed(sd_dir, sampler=name)
    assert errors(model, pipe) <= TOLERANCE
    assert model.fingerprint != load_model(str(sd_dir)).fingerprint


@pytest.mark.parametrize("name", ["euler", "lcm"])
def test_models_of_flows_keep_their_sampler(name: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "sd3", tiny_sd3())
    with pytest.raises(
        UsageError, match=f"--sampler {name} does not work with a model with FlowMatch.*: .*predict noise"
    ):
        changed(folder, sampler=name)


@pytest.mark.product(most=1)
@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (tiny_sd, ("unet", "text_encoder")),
        pytest.param(tiny_sdxl, ("unet",), marks=pytest.mark.slow),
        (tiny_sd3, ("transformer",)),
        pytest.param(tiny_flux, ("transformer",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("engine", ["patched", pytest.param("plain", marks=pytest.mark.slow)])
def test_adapters_equal_the_fused_pipeline(
    build: Callable[[], Any], parts: tuple[str, ...], engine: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import fused, save_lora

    pipe = build()
    folder = save_tiny(tmp_path / "model", pipe, **short_texts(pipe))
    first = save_lora(tmp_path / "first.safetensors", pipe, *parts)
    second = save_lora(tmp_path / "second.safetensors", pipe, parts[0], seed=1)
    model = changed(folder, engine, lora=[f"{first}:0.5", str(second)])
    assert errors(model, pipe) > 10 * TOLERANCE, "the adapters change the images"
    assert errors(model, fused(pipe, [(first, 0.5), (second, 1.0)])) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.slow
def test_dora_equals_the_fused_pipeline(sd_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import fused, save_lora

    pipe = tiny_sd()
    dora = save_lora(tmp_path / "dora.safetensors", pipe, "unet", use_dora=True)
    # A new DoRA has the magnitudes of the plain adapter, which would then give the same images.
    state = {name: 1.5 * value if "magnitude" in name else value for name, value in load_file(dora).items()}
    plain = {name: value for name, value in state.items() if "magnitude" not in name}
    assert len(plain) < len(state)
    save_file(state, dora)
    save_file(plain, tmp_path / "plain.safetensors")
    model = changed(save_tiny(tmp_path / "sd", pipe, **short_texts(pipe)), lora=[f"{dora}:0.5"])
    assert errors(model, fused(pipe, [(dora, 0.5)])) <= TOLERANCE
    assert errors(model, fused(tiny_sd(), [(tmp_path / "plain.safetensors", 0.5)])) > 10 * TOLERANCE


def of_kohya(lora: Path, path: Path, *, is_dora: bool) -> Path:
    """Write an adapter of a U-Net with the names that kohya's scripts use."""
    state: dict[str, torch.Tensor] = {}
    for name, value in load_file(lora).items():
        layer, _, which = name.removeprefix("unet.").partition(".lora_")
        layer = "lora_unet_" + layer.replace(".", "_")
        state[f"{layer}.lora_{'down' if which == 'A.weight' else 'up'}.weight"] = value
        if which == "A.weight":
            state[f"{layer}.alpha"] = torch.tensor(2.0)
        elif is_dora:
            state[f"{layer}.dora_scale"] = torch.ones(len(value), 1)
    save_file(state, path)
    return path


def test_kohya_dora_is_refused(sd_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    lora = save_lora(tmp_path / "lora.safetensors", tiny_sd(), "unet")
    plain = of_kohya(lora, tmp_path / "plain.safetensors", is_dora=False)
    dora = of_kohya(lora, tmp_path / "dora.safetensors", is_dora=True)
    num_layers = len(load_file(lora)) // 2
    assert changed(sd_dir, lora=[str(plain)]).fingerprint != load_model(str(sd_dir)).fingerprint
    assert capfd.readouterr().err == "", "all of its layers are there"
    for options in ({"lora": [str(dora)]}, {"adapter": [f"ink={dora}"]}):
        with pytest.raises(UsageError, match=rf"dora.safetensors: {num_layers} of its layers are DoRA") as caught:
            changed(sd_dir, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_layers_that_the_model_lacks_are_counted(
    sd_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    lora = save_lora(tmp_path / "lora.safetensors", tiny_sd(), "unet", "text_encoder")
    state, other = load_file(lora), "unet.down_blocks.9.attentions.0.transformer_blocks.0.attn1.to_q.lora"
    num_layers = len(state) // 2
    for name in (other, "transformer.transformer_blocks.0.attn.to_q.lora", "text_encoder.layers.99.q_proj.lora"):
        state |= {f"{name}_A.weight": torch.ones(4, 4), f"{name}_B.weight": torch.ones(4, 4)}
    for names in ("lora", "some"):
        for option in ("--lora ", "--adapter ink="):
            path = tmp_path / f"{names}.safetensors"
            changed(sd_dir, **({"lora": [str(path)]} if option == "--lora " else {"adapter": [f"ink={path}"]}))
            said = capfd.readouterr().err
            missing = f"3 of its {num_layers + 3} layers are not in the model, and have no effect"
            assert said == ("" if names == "lora" else f"Warning: {option}{path}: {missing}\n")
        save_file(state, tmp_path / "some.safetensors")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_cached_data_of_a_model_is_not_used_with_an_adapter(sd_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    first = save_lora(tmp_path / "first.safetensors", tiny_sd(), "unet")
    second = save_lora(tmp_path / "second.safetensors", tiny_sd(), "unet", seed=1)
    loras = [[], [f"{first}"], [f"{first}:0.5"], [f"{second}"], [f"{first}", f"{second}"]]
    marks = [changed(sd_dir, lora=each).fingerprint for each in loras]
    assert len(set(marks)) == len(marks)
    assert changed(sd_dir, lora=[f"{first}:1.0"]).fingerprint == marks[1]
    assert load_model(str(sd_dir)).fingerprint == marks[0]


def test_adapter_of_another_model_is_refused(sd_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    other = save_lora(tmp_path / "other.safetensors", tiny_sd3(), "transformer")
    with pytest.raises(PsctlError, match=r"--lora .*other.safetensors does not fit the model: ") as caught:
        changed(sd_dir, lora=[str(other)])
    assert "\n" not in str(caught.value)
    own = save_lora(tmp_path / "own.safetensors", tiny_sd(), "unet")
    wide = {name: torch.cat([value, value], dim=-1) for name, value in load_file(own).items()}
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(PsctlError, match=r"--lora .*wide.safetensors does not fit the model: ") as caught:
        changed(sd_dir, lora=[str(tmp_path / "wide.safetensors")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "scale", "message"),
    [
        ("a.safetensors", b"", ":big", "'big' is not a number; give PATH or PATH:SCALE"),
        ("a.safetensors", b"", ":nan", "the scale must be finite"),
        ("a.safetensors", None, "", "there is no such file; a .safetensors file is expected"),
        ("a.bin", b"pickle", ":0.5", "only .safetensors files are loaded, as pickled weights can run code"),
        ("a.safetensors", b"abc", "", "is truncated, corrupt or not a safetensors file"),
    ],
)
def test_bad_adapters_are_named(
    sd_dir: Path, tmp_path: Path, name: str, content: bytes | None, scale: str, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PsctlError, match=message) as caught:
        changed(sd_dir, lora=[f"{tmp_path / name}{scale}"])
    assert "\n" not in str(caught.value)


@pytest.mark.product(most=1)
@pytest.mark.parametrize(
    ("build", "part"),
    [(tiny_sd, "unet"), (tiny_sd3, "transformer"), (tiny_flux, "transformer"), (tiny_aura, "transformer")],
)
def test_eight_bit_weights_equal_diffusers(build: Callable[[], Any], part: str, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="the extra quantize is not installed")
    import diffusers

    pipe = build()
    folder = save_tiny(tmp_path / "its", pipe, **short_texts(pipe))
    exact, exact_latents = getattr(pipe, part), alone(pipe)
    config = torchao.Int8WeightOnlyConfig()
    quantised = type(exact).from_pretrained(
        folder, subfolder=part, quantization_config=diffusers.TorchAoConfig(config), dtype=torch.float32
    )
    pipe.register_modules(**{part: quantised})
    for engine in ("patched", "plain"):
        model = changed(folder, engine, quantize="int8")
        assert errors(model, pipe) <= TOLERANCE
        found, expected = model.denoiser.state_dict(), quantised.state_dict()
        assert all(torch.equal(found[key].dequantize(), expected[key].dequantize()) for key in quantised_keys(expected))
        assert len(quantised_keys(found)) == len(quantised_keys(expected)) > 10
    # Quantised weights are reported as inexact, and they are.
    assert relative_error(alone(pipe), exact_latents) > TOLERANCE
    assert model.fingerprint != load_model(str(folder)).fingerprint


def quantised_keys(weights: dict[str, Any]) -> list[str]:
    return [key for key, weight in weights.items() if type(weight).__name__ == "Int8Tensor"]


def test_adapter_with_eight_bit_weights(tmp_path: Path) -> None:
    """Adapters are fused into the weights before these are quantised."""
    pytest.importorskip("torchao", reason="the extra quantize is not installed")
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.loras import save_lora

    folder = save_tiny(tmp_path / "its", tiny_sd())
    adapter = [str(save_lora(tmp_path / "style.safetensors", tiny_sd(), "unet"))]
    both, fused = (changed(folder, lora=adapter, quantize=name).denoiser.state_dict() for name in ("int8", None))
    for key in quantised_keys(both):
        assert relative_error([both[key].dequantize()], [fused[key]]) < 0.01


def test_bad_number_of_bits_and_missing_torchao_are_refused(sd_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"quantize is 'int4', but it must be one of int8, fp8"):
        ModelOptions(quantize="int4")  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"torchao is not installed; .*psctl\[quantize\]"):
        changed(sd_dir, quantize="int8")
