"""`--stages processes`: images are bit-identical, and the engine survives the death of a process."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.families import build_family
from patchedserve.serving.models import stage_process
from patchedserve.serving.models.build import as_plain, with_engine
from patchedserve.serving.models.channel import Channel
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.parts import load_stage
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.models.stage_process import StageProcess, StageSettings
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.scheduling.policies import get_policy

from ...support.edits import edit_request
from ...support.engine_runs import serve_in_memory
from ...support.tiny_families import (
    tiny_aura,
    tiny_chroma,
    tiny_flux,
    tiny_flux2,
    tiny_klein,
    tiny_lumina2,
    tiny_pixart,
    tiny_z_image,
)
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl
from ...support.tiny_qwen import tiny_qwen
from ...support.waits import is_alive, kill_parent

BUILDS = (
    tiny_sd,
    tiny_sdxl,
    tiny_sd3,
    tiny_flux,
    tiny_flux2,
    tiny_klein,
    tiny_aura,
    tiny_chroma,
    tiny_pixart,
    tiny_lumina2,
    tiny_qwen,
    tiny_z_image,
)
REQUEST = Request(0, "a car", Resolution(64, 64), 2, guidance_scale=3.0, seed=1, negative_prompt="b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tiny_sdxl())


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ServedModel]:
    with closing(load_model(str(folder), "cpu", "float32", EngineOptions(stages="processes"))) as found:
        yield found


def mixed() -> list[Request]:
    sizes = (Resolution(32, 32), Resolution(64, 32), Resolution(32, 64))
    new = [Request(number, f"hat {number}", size, 3, 3.0, seed=number) for number, size in enumerate(sizes)]
    return [*new, edit_request(3, sizes[1], seed=7), edit_request(4, sizes[2])]


def same_images(one: InMemory, other: InMemory) -> bool:
    """Compare up to one grey level, as batches may differ between the runs."""
    assert {record.status for record in (*one.records, *other.records)} == {"completed"}
    assert one.images.keys() == other.images.keys()
    pairs = [(np.asarray(image, int), np.asarray(other.images[key], int)) for key, image in one.images.items()]
    return all(np.abs(ours - theirs).max() <= 1 for ours, theirs in pairs)


def test_processes_prepare_and_decode_bit_equal(model: ServedModel) -> None:
    threads = with_engine(model, replace(model.options, stages="threads"))
    assert threads.stages is None
    for request in mixed():
        found, expected = model.prepare(request), threads.prepare(request)
        assert found.conditioning.keys() == expected.conditioning.keys()
        assert all(torch.equal(found.conditioning[name], tensor) for name, tensor in expected.conditioning.items())
        assert torch.equal(found.latents, expected.latents)
        assert (found.known_area is None) is (request.edit is None)
        assert np.array_equal(np.asarray(model.decode(found.latents)), np.asarray(threads.decode(found.latents)))


def test_images_are_equal_for_all_stage_options(model: ServedModel) -> None:
    usual = serve_in_memory(with_engine(model, replace(model.options, stages="threads")), mixed())
    assert same_images(serve_in_memory(model, mixed()), usual)
    assert same_images(serve_in_memory(with_engine(model, replace(model.options, stages="inline")), mixed()), usual)


@pytest.mark.product(most=2)
@pytest.mark.parametrize("build", BUILDS)
def test_part_of_a_pipeline_equals_the_whole(build: Callable[[], Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, build())
    whole = load_model(str(folder), "cpu", "float32")
    family = build_family(whole.pipe)
    settings = StageSettings(str(folder), "cpu", "float32")
    with torch.inference_mode():
        pipe, prepare, _ = load_stage(settings)
        expected, found = (each.condition(REQUEST, not each.is_distilled) for each in (family, prepare))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        pixels = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)
        encoded = [each.encode(pixels, torch.Generator("cpu").manual_seed(3)) for each in (family, prepare)]
        assert torch.equal(*encoded)
        other, postprocess, _ = load_stage(replace(settings, part="postprocess"))
        latents = whole.prepare(REQUEST).latents
        images = [
            each.decode(latents, lambda scaled, pipe=pipe: pipe.vae.decode(scaled, return_dict=False)[0])[0]
            for each, pipe in ((family, whole.pipe), (postprocess, other))
        ]
        usual, ours = map(np.asarray, images)
        assert np.array_equal(usual, ours)
    for part, is_there in ((pipe, True), (other, False)):
        weights = [
            weight
            for name, each in part.components.items()
            if name in ("unet", "transformer")
            for weight in each.parameters()
        ]
        assert weights
        assert all(weight.numel() == 0 for weight in weights)
        assert (part.text_encoder is not None) is is_there


def test_models_of_the_same_weights_share_processes_or_have_none(model: ServedModel) -> None:
    assert as_plain(model).stages is None
    assert with_engine(model, replace(model.options, order="patch")).stages is model.stages


def reason_of_the_failed(found: InMemory, stage: str) -> str:
    """Return why the single failed request failed, which a process of this stage was working on."""
    failed = [record for record in found.records if record.status != "completed"]
    assert [record.status for record in failed] == ["failed"]
    assert failed[0].reason is not None
    assert failed[0].reason.startswith(f"{stage}: RunError: the process that ")
    return failed[0].reason


@pytest.mark.product(most=1)
@pytest.mark.parametrize(("part", "stage"), [("prepare", "preparing"), ("postprocess", "postprocessing")])
def test_killed_process_fails_its_request_and_is_replaced(model: ServedModel, part: Any, stage: str) -> None:
    assert model.stages is not None
    process = model.stages.of[part]
    before = process.process_id
    os.kill(before, signal.SIGKILL)
    assert "has died (SIGKILL)" in reason_of_the_failed(serve_in_memory(model, mixed()), stage)
    assert process.process_id != before
    assert same_images(
        serve_in_memory(model, mixed()),
        serve_in_memory(with_engine(model, replace(model.options, stages="threads")), mixed()),
    )


@pytest.mark.product(most=1)
@pytest.mark.parametrize(("part", "stage"), [("prepare", "preparing"), ("postprocess", "postprocessing")])
def test_hanging_process_fails_its_request_and_is_replaced(
    model: ServedModel, part: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.stages is not None
    serve_in_memory(model, mixed())  # the process has now measured how long calls take
    monkeypatch.setattr(stage_process, "CALL_S", 5.0)
    process = model.stages.of[part]
    before = process.process_id
    os.kill(before, signal.SIGSTOP)
    assert reason_of_the_failed(serve_in_memory(model, mixed()), stage).endswith("does not answer and was ended")
    assert not is_alive(before)
    assert process.process_id != before
    assert {record.status for record in serve_in_memory(model, mixed()).records} == {"completed"}


def test_aborting_a_hanging_process_fails_pending_calls(folder: Path) -> None:
    process = StageProcess(StageSettings(str(folder), "cpu", "float32"))
    with closing(process):
        process.wait()
        os.kill(process.process_id, signal.SIGSTOP)
        threading.Timer(0.5, process.abort).start()
        for _ in range(2):
            with pytest.raises(RunError, match="has died"):
                process.call("condition", REQUEST, True)
        process.close()
        assert process.call("condition", REQUEST, True)["text"].shape[0] == 2


def test_timeout_grows_with_the_size_of_a_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(Channel, "limit", lambda channel, seconds: limits.append(seconds))
    monkeypatch.setattr(stage_process, "CALL_S", 0.0)
    process = StageProcess(StageSettings(str(folder), "cpu", "float32", "postprocess"))
    with closing(process):
        process.wait()
        for side in (4, 4, 8):
            process.call("decode", torch.zeros(1, 4, side, side))
    small_s, large_s = limits[-2:]
    assert limits[0] is None, "nobody knows how long it takes to load"
    assert small_s is not None
    assert large_s is not None
    assert large_s >= 4 * small_s > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_stopped_call_does_not_extend_later_timeouts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    set_limit = Channel.limit
    monkeypatch.setattr(stage_process, "CALL_S", 20.0)
    monkeypatch.setattr(
        Channel, "limit", lambda channel, seconds: (limits.append(seconds), set_limit(channel, seconds))
    )
    process = StageProcess(StageSettings(str(folder), "cpu", "float32", "postprocess"))
    latents = torch.zeros(1, 4, 4, 4)
    with closing(process):
        process.wait()
        for _ in range(2):  # a first call takes longer
            process.call("decode", latents)
        before_s = limits[-1]
        os.kill(process.process_id, signal.SIGSTOP)
        threading.Timer(4.0, os.kill, (process.process_id, signal.SIGCONT)).start()
        process.call("decode", latents)
        process.call("decode", latents)
        assert limits[-1] <= 5 * before_s
        assert limits[-1] < stage_process.CALL_TIMES * 4.0, "as long as it was stopped, times 40"


def test_errors_are_reported_and_the_process_continues(model: ServedModel) -> None:
    assert model.stages is not None
    process = model.stages.of["prepare"]
    before = process.process_id
    with pytest.raises(RunError, match="condition: TypeError"):
        process.call("condition")
    assert process.call("condition", REQUEST, True)["text"].shape[0] == 2
    assert process.process_id == before


def test_load_failure_is_reported(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_sdxl())
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    process = StageProcess(StageSettings(str(folder), "cpu", "float32", "postprocess"))
    with closing(process), pytest.raises(RunError, match=r"vae.*cannot be loaded"):
        process.wait()


_ENGINE = """
import sys, time
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions

model = load_model(sys.argv[1], "cpu", "float32", EngineOptions(stages="processes"))
print(*(each.process_id for each in model.stages.of.values()), flush=True)
time.sleep(600)
"""


@pytest.mark.exhaustive
def test_no_process_outlives_the_engine(folder: Path) -> None:
    assert len(kill_parent(_ENGINE, str(folder))) == 2


@pytest.mark.parametrize(("stages", "is_main"), [("threads", False), ("inline", True)])
def test_stages_run_in_the_expected_threads(folder: Path, stages: Any, is_main: bool) -> None:
    model = load_model(str(folder), "cpu", "float32", EngineOptions(stages=stages))
    threads = []

    def note(*_: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())

    model.pipe.text_encoder.register_forward_hook(note)
    engine = Engine(model, get_policy("continuous"), on_image=note)
    engine.submit(REQUEST)
    engine.close()
    engine.run()
    assert len(threads) == 3  # the prompt, the negative prompt, the image
    assert set(threads) == {is_main}


def test_values_arrive_unchanged() -> None:
    here, there = map(Channel, socket.socketpair())
    values = {
        "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "turned": torch.arange(6).reshape(2, 3).T,
        "nothing": torch.empty(0, 4),
        "one": torch.tensor(True),
        "array": np.arange(7, dtype=np.uint8),
    }
    with closing(here), closing(there):
        here.send((values, "text", REQUEST))
        found, text, request = there.receive()
        assert (text, request) == ("text", REQUEST)
        assert found.keys() == values.keys()
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)
            else:
                assert np.array_equal(found[name], value)
        found["half"][0] = 1  # it is the receiver's own
        there.send(None)
        assert here.receive() is None
        there.close()
        with pytest.raises((EOFError, OSError)):
            here.receive()
        with pytest.raises(OSError, match="Broken pipe"):
            here.send(1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": ModelOptions(lora=["a.safetensors"])}, "--lora"),
        ({"model": ModelOptions(adapter=["a=a.safetensors"])}, "--adapter"),
        ({"offload": "text"}, "--offload text"),
        ({"engine": "parallel", "parallel": ParallelOptions("2", decode="strips")}, "--parallel-decode strips"),
    ],
)
def test_incompatible_options_are_refused(options: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"--stages processes does not work with {named}: its"):
        EngineOptions(stages="processes", **options)


def test_single_file_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((folder / "unet" / "diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(UsageError, match=r"--stages processes does not work with a single file .*: its processes load"):
        load_model(f"{file}@{folder}", "cpu", "float32", EngineOptions(stages="processes"))
