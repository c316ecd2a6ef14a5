"""Adapters by request: a batch that mixes them equals diffusers with each request's own adapters."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from patchedserve.data.adapters import Adapters
from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.layout.packing import Order
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineName, EngineOptions, ModelOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.stepper import ParallelStepper
from patchedserve.serving.parallel.virtual import VirtualRanks
from patchedserve.serving.plain.stepper import PlainStepper

from ...support.family_kit import BUILDS, PASS, STEPS, denoised, mixed
from ...support.patched_models import relative_error
from ...support.tape import Tape
from ...support.tiny_models import dequantise
from ...support.tools import need_tools

pytest.importorskip("peft", reason="the extra lora is not installed")
from ...support.adapters import EACH, adapted, saved, serving
from ...support.loras import alone, save_lora

_FAST = ("sd", "sd3", "flux")
_NAMES = [name for name in BUILDS if name not in ("ovis", "pixart", "z-image")]
"""Families with `--adapter`; `check_family` tests that the others refuse it."""


@pytest.mark.product(most=1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in _FAST else pytest.mark.slow) for n in _NAMES])
def test_batch_can_mix_adapters(name: str, tmp_path: Path) -> None:
    pipe, loras, folder = saved(name, tmp_path)
    one, few = adapted([1] * 4), adapted([6, 2, 3, 4])
    expected, expected_few = alone(pipe, loras, one), alone(pipe, {}, few)
    ways: list[dict[str, Any]] = [{"order": "image"}, {"order": "patch", "strategy": "stitch"}, {"engine": "plain"}]
    for options in ways:
        model = serving(folder, loras, **options)
        found, base = denoised(model, one), denoised(model, mixed([1] * 4))
        assert relative_error(found, expected) <= PASS, options
        for request, own, without in zip(one, found, base, strict=True):
            if request.adapters:
                assert relative_error([own], [without]) > 100 * PASS, "the adapters change the image"
            else:
                assert torch.equal(own, without), "who shares the batch changes nothing"
        assert relative_error(denoised(model, few, joins=[0, 1, 2, 2]), expected_few) <= STEPS, options


@pytest.mark.product(most=1)
@pytest.mark.parametrize("name", _FAST)
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_recorded_passes_apply_the_adapters_of_each_batch(name: str, engine: EngineName, tmp_path: Path) -> None:
    """The second batch has its adapters at other rows and scales than the one that was recorded."""
    _, loras, folder = saved(name, tmp_path)
    others: list[Adapters] = [(("toy", 0.3),), (), (("pixel", -0.4),), (("pixel", -1.0), ("toy", 0.2))]
    batches = [adapted([3] * 4), adapted([3] * 4, others)]
    options: dict[str, Any] = {"engine": engine} if engine == "plain" else {"order": "patch"}
    eager, recorded, tape = serving(folder, loras, **options), serving(folder, loras, **options), Tape()
    if isinstance(recorded.stepper, PlainStepper):
        recorded.stepper.models.captured = CapturedPasses(tape, patience=0)
    else:
        patched_stepper(recorded).model.use_graphs(tape, patience=0)
    for batch in batches:
        assert relative_error(denoised(recorded, batch), denoised(eager, batch)) <= 10 * PASS
    num_sizes = len({request.resolution for request in batches[0]})
    assert tape.recorded == (num_sizes if engine == "plain" else 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in _FAST else pytest.mark.slow) for n in _NAMES])
def test_ranks_apply_the_adapters_of_their_rows(name: str, tmp_path: Path) -> None:
    """In strips, also of two teams with a row each of guided requests, and as whole images of all sizes."""
    pipe, loras, folder = saved(name, tmp_path)
    one, few = adapted([1] * 4), adapted([6, 2, 3, 4])
    expected, expected_few = alone(pipe, loras, one), alone(pipe, {}, few)
    for options in (
        ParallelOptions("virtual:2", cfg_split="off", may_use_fewer=True),
        ParallelOptions("virtual:4", may_use_fewer=True),
        ParallelOptions("virtual:2", from_pixels="1000000"),
    ):
        with closing(serving(folder, loras, engine="parallel", parallel=options)) as model:
            assert relative_error(denoised(model, one), expected) <= PASS, options
            found = denoised(model, few, joins=[0, 1, 2, 2])
            assert relative_error(found, expected_few) <= STEPS, options
            assert relative_error(denoised(model, mixed([6, 2, 3, 4])), found) > 100 * PASS


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", _FAST)
def test_recorded_strips_apply_the_adapters_of_each_batch(name: str, tmp_path: Path) -> None:
    """Batches have their adapters at other rows and scales than the one that was recorded."""
    pipe, loras, folder = saved(name, tmp_path)
    options, tape = ParallelOptions("virtual:2", may_use_fewer=True), Tape()
    batches = [
        adapted([8] * 4, [(("pixel", scale),), (), (), (("pixel", 0.3),)][::order])
        for scale, order in ((1.0, 1), (-0.5, -1))
    ]
    expected = [alone(pipe, loras, batches[0]), alone(pipe, {}, batches[1])]
    with closing(serving(folder, loras, engine="parallel", parallel=options)) as model:
        assert isinstance(model.stepper, ParallelStepper)
        model.stepper.group.close()
        model.stepper.group = VirtualRanks(model.denoiser, options, recorder=tape)
        for batch, wanted in zip(batches, expected, strict=True):
            assert relative_error(denoised(model, batch), wanted) <= STEPS
        assert model.stepper.recording_failure is None
    assert tape.played > tape.recorded > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", _FAST)
def test_cached_requests_keep_their_adapters(name: str, tmp_path: Path) -> None:
    """Requests are computed in batches of their own, recorded or not; each is drawn as it is alone."""
    _, loras, folder = saved(name, tmp_path)
    requests = adapted([8, 6, 7, 5])
    uncached = serving(folder, loras)
    patch_size, _ = uncached.family.geometry.latent_size(requests[0].resolution)
    cache = CacheOptions("accumulated", 1e9, warmup_steps=1, max_reuse=2, patch_size=patch_size)
    cached = serving(folder, loras, cache=cache)
    expected = [denoised(cached, [request])[0] for request in requests]
    exact = denoised(uncached, requests)
    for order in get_args(Order):
        eager, recorded = (serving(folder, loras, cache=cache, order=order) for _ in range(2))
        tape = Tape()
        patched_stepper(recorded).model.use_graphs(tape, patience=0)
        for model in (eager, recorded):
            found = denoised(model, requests, joins=[0, 1, 1, 2])
            assert relative_error(found, expected) <= STEPS
            assert relative_error(found, exact) > 10 * STEPS, "nothing was reused"
        assert tape.played > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", _FAST)
def test_compiled_blocks_serve_batches_without_adapters_only(name: str, tmp_path: Path) -> None:
    _, loras, folder = saved(name, tmp_path)
    eager, compiled = serving(folder, loras), serving(folder, loras)
    patched_stepper(compiled).model.compile(backend="eager")
    graphs = []
    for requests in (adapted([1] * 4), mixed([1] * 4), adapted([2] * 4), mixed([2] * 4)):
        assert relative_error(denoised(compiled, requests), denoised(eager, requests)) <= PASS
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 == graphs[0] < graphs[1] == graphs[2] == graphs[3]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_models_with_compiled_blocks_load_adapters(engine: EngineName, tmp_path: Path) -> None:
    need_tools("g++")
    pipe, loras, folder = saved("sd3", tmp_path)
    requests = adapted([1] * 4)
    model = serving(folder, loras, engine=engine, compile=True)
    assert relative_error(denoised(model, requests), alone(pipe, loras, requests)) <= PASS
    assert relative_error(denoised(model, mixed([1] * 4)), alone(pipe, {}, mixed([1] * 4))) <= PASS


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", _FAST)
def test_adapters_change_layers_with_eight_bit_weights(name: str, tmp_path: Path) -> None:
    """The pipeline has the same weights, as float32."""
    pytest.importorskip("torchao", reason="the extra quantize is not installed")
    pipe, loras, folder = saved(name, tmp_path)
    requests = adapted([1] * 4)
    patched, plain = (
        serving(folder, loras, quantize="int8", **options) for options in ({"order": "patch"}, {"engine": "plain"})
    )
    dequantise(denoiser_of(pipe), plain.denoiser)
    expected = alone(pipe, loras, requests)
    for model in (patched, plain):
        assert relative_error(denoised(model, requests), expected) <= PASS


def test_adapters_are_added_to_fused_ones(tmp_path: Path) -> None:
    pipe, loras, folder = saved("sd3", tmp_path)
    requests = adapted([2] * 4, [(), (("toy", 0.5),), (), (("toy", 2.0),)])
    model = load_model(
        str(folder),
        "cpu",
        "float32",
        EngineOptions(model=ModelOptions(lora=[f"{loras['pixel']}:0.5"], adapter=[f"toy={loras['toy']}"])),
    )
    both = [replace(each, adapters=(("pixel", 0.5), *each.adapters)) for each in requests]
    assert relative_error(denoised(model, requests), alone(pipe, loras, both)) <= STEPS
    assert model.fingerprint != load_model(str(folder)).fingerprint
    assert serving(folder, loras).fingerprint == load_model(str(folder)).fingerprint, "weights are as they are"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_cached_texts_are_bound_to_their_adapters(tmp_path: Path) -> None:
    pipe, loras, folder = saved("sd", tmp_path)
    model = serving(folder, loras, prompt_cache_mb=1)
    first = mixed([2] * 4)[0]
    requests = [replace(first, request_id=index, adapters=EACH[index % 2]) for index in range(4)]
    assert relative_error(denoised(model, requests), alone(pipe, loras, requests)) <= STEPS
    assert model.prompts is not None
    assert (model.prompts.to_json()["hits"], model.prompts.to_json()["misses"]) == (4, 4), "each has two texts"


def test_edits_with_adapters_read_no_records(tmp_path: Path) -> None:
    from patchedserve.data.edits import EditSpec, TemplateSpec
    from patchedserve.serving.editing.templates import TemplateStore

    from ...support.edits import image_of, mask_of

    _, loras, folder = saved("sd3", tmp_path)
    model, size = serving(folder, loras), mixed([2] * 4)[1].resolution
    edit = EditSpec(image_of(size), mask_of(size, "line"), template=TemplateSpec())
    plain = Request(0, "a hat", size, 3, edit=edit)
    request = replace(plain, adapters=EACH[0])
    model.reuse.use_template(plain, tmp_path / "records", lambda count: None)
    assert isinstance(model.reuse.store, TemplateStore)
    assert model.prepare(plain).template is not None
    assert model.prepare(request).template is None
    exact = replace(request, edit=replace(edit, template=None))
    assert torch.equal(denoised(model, [request])[0], denoised(model, [exact])[0])
    with pytest.raises(UsageError, match="of the model without adapters"):
        model.reuse.use_template(request, tmp_path / "records", lambda count: None)


@pytest.mark.product(most=1)
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_bfloat16_is_as_accurate_as_the_pipeline(name: str, tmp_path: Path) -> None:
    _, loras, folder = saved(name, tmp_path)
    given = EngineOptions(model=ModelOptions(adapter=[f"{name}={path}" for name, path in loras.items()]))
    plain = replace(given, engine="plain")
    one = adapted([1] * 4)
    exact = denoised(load_model(str(folder), "cpu", "float32", plain), one)
    patched, alone_too = (denoised(load_model(str(folder), "cpu", "bfloat16", each), one) for each in (given, plain))
    assert relative_error(patched, exact) <= 1.5 * relative_error(alone_too, exact)


def test_adapters_unsupported_per_request_are_refused(tmp_path: Path) -> None:
    pipe, loras, folder = saved("sd3", tmp_path)
    embedding = save_lora(tmp_path / "embedding.safetensors", pipe, "transformer", layers=r"pos_embed\.proj")
    with pytest.raises(UsageError, match=r"--adapter a=.*embedding.safetensors changes the convolution pos_embed.proj"):
        serving(folder, {"a": embedding})
    dora = save_lora(tmp_path / "dora.safetensors", pipe, "transformer", use_dora=True)
    with pytest.raises(UsageError, match=r"--adapter a=.*dora.safetensors is no plain LoRA \("):
        serving(folder, {"a": dora})
    biased = save_lora(tmp_path / "biased.safetensors", pipe, "transformer", lora_bias=True)
    with pytest.raises(UsageError, match=r"--adapter a=.*biased.safetensors has a bias \("):
        serving(folder, {"a": biased})
    other = save_lora(tmp_path / "other.safetensors", BUILDS["sd"](), "unet")
    with pytest.raises(RunError, match=r"--adapter a=.*other.safetensors does not fit the model: "):
        serving(folder, {"a": other})
    with pytest.raises(UsageError, match=r"--adapter a.bin: there is no such file"):
        serving(folder, {"a": Path("a.bin")})
    model, request = serving(folder, loras), adapted([1] * 4)[0]
    with pytest.raises(UsageError, match="adapter other is unknown; there are pixel, toy"):
        model.check_request(replace(request, adapters=(("other", 1.0),)))
    with pytest.raises(UsageError, match="adapter pixel is unknown; none is served: see --adapter NAME=PATH"):
        load_model(str(folder)).check_request(request)


def test_adapter_with_norms_is_refused(tmp_path: Path) -> None:
    _, loras, folder = saved("flux", tmp_path)
    norm = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.norm_q.weight"
    save_file(load_file(loras["toy"]) | {f"transformer.{name}": norm[name] * 2}, tmp_path / "norms.safetensors")
    with pytest.raises(UsageError, match=r"--adapter a=.*norms.safetensors replaces norms or whole layers, which"):
        serving(folder, {"a": tmp_path / "norms.safetensors"})


@pytest.mark.parametrize(
    ("adapter", "options", "message"),
    [
        (["a"], {}, "--adapter a: give NAME=PATH"),
        (["a="], {}, "--adapter a=: give NAME=PATH"),
        (["a+b=c"], {}, r"adapter name 'a\+b' is not allowed"),
        (["a=b", "a=c"], {}, "--adapter a is given twice"),
        (["a=b"], {"cache": CacheOptions("patch", 0.1)}, "--adapter does not work with --cache patch: adapters"),
    ],
)
def test_bad_options_are_named(adapter: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        EngineOptions(**options, model=ModelOptions(adapter=adapter))
    assert "\n" not in str(caught.value)
