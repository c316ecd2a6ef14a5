"""ControlNets in mixed batches: each image equals that of diffusers' own ControlNet pipeline, which draws it alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import (
    ControlNetModel,
    HeunDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPipeline,
)
from PIL import Image
from torch import Tensor

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.controls import window
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.controls import ModelControls
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions, NamedFile
from patchedserve.serving.parallel.options import ParallelOptions

from ...support.adapters import saved
from ...support.controls import control, net_of, save
from ...support.edits import edit_request
from ...support.family_kit import PASS, STEPS, denoised
from ...support.patched_models import relative_error
from ...support.plain import plain_latents
from ...support.tape import Tape
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl

PIPES = {"sd": tiny_sd, "sdxl": tiny_sdxl}
CONTROLLED = {"sd": StableDiffusionControlNetPipeline, "sdxl": StableDiffusionXLControlNetPipeline}
ENGINES = {
    "image": EngineOptions(order="image"),
    "patch": EngineOptions(order="patch"),
    "plain": EngineOptions("plain"),
    "compiled": EngineOptions(order="patch", compile=True),
}
_SMALL, _WIDE = Resolution(64, 64), Resolution(96, 64)


def requests_of(num_steps: Sequence[int]) -> list[Request]:
    """Return requests with one control, with two of other strengths, and with none, of two sizes."""
    return [
        Request(0, "a cat", _SMALL, num_steps[0], 4.0, seed=1, controls=(control("canny", _SMALL, 0),)),
        Request(
            1,
            "a dog",
            _WIDE,
            num_steps[1],
            1.0,
            seed=2,
            controls=(control("pose", _WIDE, 1, 0.7, 0.0, 0.5), control("canny", _WIDE, 2, 0.4, 0.3)),
        ),
        Request(2, "a hat", _SMALL, num_steps[2], 3.0, seed=3, negative_prompt="blur"),
        Request(3, "", _SMALL, num_steps[3], 2.0, seed=4, controls=(control("pose", _SMALL, 3, 0.5),)),
    ]


def plain(pipe: Any, nets: Mapping[str, ControlNetModel], request: Request, family: str) -> Tensor:
    if not request.controls:
        return plain_latents(pipe, request)
    controls, extra = request.controls, {"requires_safety_checker": False} if family == "sd" else {}
    made: Any = CONTROLLED[family](**pipe.components, controlnet=[nets[each.name] for each in controls], **extra)
    return plain_latents(
        made,
        request,
        image=[Image.fromarray(each.image) for each in controls],
        controlnet_conditioning_scale=[each.scale for each in controls],
        control_guidance_start=[each.start for each in controls],
        control_guidance_end=[each.end for each in controls],
    )


class Tiny:
    """A pipeline with two nets, in memory and as folders, and diffusers' own images."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.pipe, self.folder = family, PIPES[family](), folder
        self.nets = {"canny": net_of(self.pipe, 1), "pose": net_of(self.pipe, 2)}
        self.options = save(folder, self.pipe, self.nets)

    def served(self, engine: EngineOptions) -> ServedModel:
        return load_model(str(self.folder / "model"), "cpu", "float32", replace(engine, model=self.options))

    def expected(self, requests: Sequence[Request]) -> list[Tensor]:
        return [plain(self.pipe, self.nets, request, self.family) for request in requests]


@pytest.fixture(scope="module", params=PIPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("controls"))


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny("sdxl", tmp_path_factory.mktemp("controls"))


@pytest.mark.parametrize("engine", ["image", "patch", "plain"])
def test_one_pass_equals_the_pipeline(tiny: Tiny, engine: str) -> None:
    requests = [replace(each, controls=each.controls[:1]) for each in requests_of([1] * 4)]
    requests[1] = replace(requests[1], controls=(control("canny", _WIDE, 2, 0.4), control("pose", _WIDE, 1, 0.7)))
    model = tiny.served(ENGINES[engine])
    found, expected = denoised(model, requests), tiny.expected(requests)
    assert relative_error(found, expected) <= PASS
    for index in (0, 1, 3):
        without = denoised(model, [replace(requests[index], controls=())])
        assert relative_error(without, expected[index : index + 1]) > STEPS, "the nets have an effect"


@pytest.mark.parametrize("engine", ["image", "patch", "plain", pytest.param("compiled", marks=pytest.mark.exhaustive)])
def test_requests_join_and_leave(tiny: Tiny, engine: str) -> None:
    requests = requests_of([20, 8, 5, 6])
    found = denoised(tiny.served(ENGINES[engine]), requests, joins=[0, 1, 2, 2])
    assert relative_error(found, tiny.expected(requests)) <= STEPS


def test_recorded_passes_read_controls(sdxl: Tiny) -> None:
    requests = requests_of([8, 8, 6, 7])
    model, recorder = sdxl.served(ENGINES["patch"]), Tape()
    patched_stepper(model).model.use_graphs(recorder, patience=1)
    for _ in range(2):
        found = denoised(model, requests, joins=[0, 0, 1, 1])
        assert relative_error(found, sdxl.expected(requests)) <= STEPS
    others = [replace(each, controls=tuple(replace(own, scale=0.2) for own in each.controls)) for each in requests]
    recorded, played = recorder.recorded, recorder.played
    assert relative_error(denoised(model, others, joins=[0, 0, 1, 1]), sdxl.expected(others)) <= STEPS
    assert recorder.recorded == recorded, "other strengths need no recording of their own"
    assert recorder.played > played


@pytest.mark.parametrize("engine", ["image", "patch", "plain"])
def test_a_net_runs_on_the_rows_that_name_it(sdxl: Tiny, engine: str) -> None:
    model, requests, seen = sdxl.served(ENGINES[engine]), requests_of([2] * 4), list[int]()
    stepper: Any = model.stepper
    nets = stepper.models.nets if engine == "plain" else stepper.model.nets.models
    nets["canny"].register_forward_pre_hook(lambda _, given: seen.append(given[0].numel() // 4))
    denoised(model, requests)
    # The first request has two rows, the second one; the others do not name it.
    whole = sum(each.resolution.pixels * rows for each, rows in zip(requests[:2], (2, 1), strict=True)) // 64
    assert sum(seen) == 2 * whole


def test_an_edit_by_a_mask_takes_controls(sdxl: Tiny) -> None:
    edit = edit_request(0, _WIDE, "box", 0.8, num_steps=6, seed=5)
    edit = replace(edit, controls=(control("canny", _WIDE, 2, 0.8),))
    assert edit.edit is not None
    made: Any = StableDiffusionXLControlNetInpaintPipeline(**sdxl.pipe.components, controlnet=sdxl.nets["canny"])
    expected = plain_latents(
        made,
        edit,
        image=Image.fromarray(edit.edit.image),
        mask_image=Image.fromarray(edit.edit.mask),
        control_image=Image.fromarray(edit.controls[0].image),
        controlnet_conditioning_scale=0.8,
        strength=edit.edit.strength,
    )
    found = denoised(sdxl.served(ENGINES["image"]), [edit, requests_of([4] * 4)[2]])
    assert relative_error(found[:1], [expected]) <= STEPS


def test_an_image_is_read_once(sdxl: Tiny) -> None:
    model, seen = sdxl.served(ENGINES["image"]), []
    assert model.controls is not None
    model.controls._readers["canny"].register_forward_hook(lambda *_: seen.append(1))
    request = requests_of([1] * 4)[0]
    for number in range(3):
        model.prepare(replace(request, request_id=number, seed=number))
    assert len(seen) == 1
    model.clear_cache()
    model.prepare(request)
    assert len(seen) == 2


def test_channels_in_the_order_of_bgr(sdxl: Tiny) -> None:
    net = net_of(sdxl.pipe, 1, controlnet_conditioning_channel_order="bgr")
    net.save_pretrained(sdxl.folder / "bgr")
    request = replace(requests_of([2] * 4)[0], controls=(control("bgr", _SMALL, 0),))
    controls = ModelControls(sdxl.pipe, [NamedFile("bgr", sdxl.folder / "bgr")])
    model = build_model(sdxl.pipe, name="tiny", controls=controls)
    assert relative_error(denoised(model, [request]), [plain(sdxl.pipe, {"bgr": net}, request, "sdxl")]) <= PASS


def test_wrong_controls_are_refused(sdxl: Tiny) -> None:
    model, request = sdxl.served(ENGINES["image"]), requests_of([4] * 4)[0]
    with pytest.raises(UsageError, match="ControlNet depth is unknown; there are canny, pose"):
        model.check_request(replace(request, controls=(control("depth", _SMALL, 0),)))
    plain_model = load_model(str(sdxl.folder / "model"), "cpu", "float32")
    with pytest.raises(UsageError, match="none is served: see --controlnet NAME=PATH"):
        plain_model.check_request(request)
    with pytest.raises(UsageError, match="has 96x64 pixels, but the one that is drawn has 64x64"):
        replace(request, controls=(control("canny", _WIDE, 0),))
    with pytest.raises(UsageError, match="control canny is given twice"):
        replace(request, controls=request.controls * 2)
    with pytest.raises(UsageError, match="scale of control canny is 11, but it must be a number from 0 to 10"):
        control("canny", _SMALL, 0, 11)
    with pytest.raises(UsageError, match=r"starts at 0.5, but it must end later, not at 0.5"):
        control("canny", _SMALL, 0, 1, 0.5, 0.5)


def test_options_that_exclude_nets(sdxl: Tiny) -> None:
    options = ModelOptions(controlnet=["canny=folder"])
    with pytest.raises(UsageError, match="ranks divide the model itself only"):
        EngineOptions("parallel", parallel=ParallelOptions("2"), model=options)
    with pytest.raises(UsageError, match="--cache schedule works"):
        EngineOptions(cache=CacheOptions("interval"), model=options)
    with pytest.raises(UsageError, match="each needs a name of its own"):
        ModelOptions(controlnet=["canny=one", "canny=other"])


def test_wrong_nets_are_refused(sdxl: Tiny, tmp_path: Path) -> None:
    def loaded(folder: Path) -> ModelControls:
        return ModelControls(sdxl.pipe, [NamedFile("own", folder)])

    with pytest.raises(UsageError, match="there is no such folder"):
        loaded(tmp_path / "missing")
    with pytest.raises(UsageError, match="is a UNet2DConditionModel, but it must be a ControlNetModel"):
        loaded(sdxl.folder / "model" / "unet")
    net_of(tiny_sd(), 1).save_pretrained(tmp_path / "sd")
    with pytest.raises(UsageError, match="is of another model: its cross_attention_dim is 32, the model's is 64"):
        loaded(tmp_path / "sd")
    net_of(sdxl.pipe, 1, global_pool_conditions=True).save_pretrained(tmp_path / "pooled")
    with pytest.raises(UsageError, match="global_pool_conditions"):
        loaded(tmp_path / "pooled")
    damaged = tmp_path / "pooled" / "diffusion_pytorch_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"--controlnet own=.*diffusion_pytorch_model\.safetensors cannot be loaded"):
        loaded(tmp_path / "pooled")
    save_tiny(tmp_path / "sd3", tiny_sd3())
    options = EngineOptions(model=ModelOptions(controlnet=[f"own={tmp_path / 'sd'}"]))
    with pytest.raises(UsageError, match="only ControlNets of U-Nets are served"):
        load_model(str(tmp_path / "sd3"), "cpu", "float32", options)


@pytest.mark.parametrize("total", [1, 2, 5, 7, 20, 30])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 0.5), (0.3, 1), (0.3, 0.31), (0.5, 0.8)])
def test_windows_are_those_of_diffusers(total: int, start: float, end: float) -> None:
    timesteps = [1000.0 - 30 * number for number in range(total)]
    kept = [not (number / total < start or (number + 1) / total > end) for number in range(total)]
    first, last = window(timesteps, start, end)
    assert [last <= timestep <= first for timestep in timesteps] == kept


def test_a_window_may_not_divide_a_step_of_second_order() -> None:
    scheduler: Any = HeunDiscreteScheduler()
    scheduler.set_timesteps(5)
    timesteps = scheduler.timesteps.tolist()
    assert window(timesteps, 0, 1) == (timesteps[0], timesteps[-1])
    with pytest.raises(UsageError, match="divides one step of this sampler in two"):
        window(timesteps, 0.2, 1)


def test_adapters_and_controls_share_a_batch(tmp_path: Path) -> None:
    pipe, loras, folder = saved("sdxl", tmp_path)
    net = net_of(pipe, 1)
    net.save_pretrained(tmp_path / "canny")
    given = ModelOptions(controlnet=[f"canny={tmp_path / 'canny'}"], adapter=[f"toy={loras['toy']}"])
    model = load_model(str(folder), "cpu", "float32", EngineOptions(order="patch", model=given))
    controlled, _, drawn, _ = requests_of([5, 5, 4, 4])
    adapted = replace(controlled, request_id=3, adapters=(("toy", -0.7),))
    found = denoised(model, [controlled, drawn, adapted])
    expected = [plain(pipe, {"canny": net}, request, "sdxl") for request in (controlled, drawn)]
    pipe.load_lora_weights(loras["toy"], adapter_name="toy")
    pipe.set_adapters(["toy"], [-0.7])
    assert relative_error(found, [*expected, plain(pipe, {"canny": net}, adapted, "sdxl")]) <= STEPS
    assert relative_error(found[2:], expected[:1]) > 10 * STEPS, "the adapter has an effect"
