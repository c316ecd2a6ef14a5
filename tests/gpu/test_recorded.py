"""`--cuda-graphs` and `--compile` on a device: replayed and compiled passes give the results of eager passes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import Keep
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.plain.stepper import PlainStepper

from ..support.family_kit import BUILDS, denoised
from ..support.family_kit import mixed as tiny_requests
from ..support.family_kit import served as tiny
from ..support.patched_models import relative_error
from ..support.template_records import build_tiny, edits, with_records
from .cases import BUNDLED, EXACT, alone, mixed, served, served_together

EAGER = EngineOptions(cuda_graphs=False)
PLAYED = 1e-5
"""A recorded pass launches the kernels of the eager one; only kernels that sum in no fixed order may differ."""


def _passes_of(model: ServedModel) -> CapturedPasses:
    stepper = model.stepper
    passes = stepper.models.captured if isinstance(stepper, PlainStepper) else patched_stepper(model).model.captured
    assert passes is not None
    return passes


def _recorded(model: ServedModel, *batches: Sequence[Request]) -> list[list[Tensor]]:
    """Return the results of consecutive batches, in which each pass but the first is recorded or replayed."""
    passes = _passes_of(model)
    passes._patience = 1
    found = [denoised(model, batch) for batch in batches]
    assert passes.failure is None
    assert passes._recorded
    return found


@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("name", BUNDLED)
def test_replayed_passes_equal_eager_ones(name: str, order: Any, cuda: str) -> None:
    """Requests leave the batches one by one, and the same compositions recur with other requests."""
    first, second = mixed(), mixed((3, 5, 2, 6))
    eager = served(name, cuda, EngineOptions(order=order, cuda_graphs=False))
    recorded = served(name, cuda, EngineOptions(order=order, cuda_graphs=True))
    batches = (first, second, first, first[1:], second)
    for found, batch in zip(_recorded(recorded, *batches), batches, strict=True):
        assert relative_error(found, denoised(eager, batch)) <= PLAYED


@pytest.mark.parametrize("name", BUILDS)
def test_passes_of_all_families_can_be_recorded(name: str, cuda: str) -> None:
    pipe, requests = BUILDS[name]().to(cuda), tiny_requests([6, 2, 3, 4])
    expected = denoised(tiny(pipe, EAGER), requests)
    for found in _recorded(tiny(pipe, EngineOptions(cuda_graphs=True)), requests, requests):
        assert relative_error(found, expected) <= PLAYED


@pytest.mark.parametrize("name", [name for name in BUILDS if name not in ("chroma", "lumina2")])
def test_plain_passes_can_be_recorded(name: str, cuda: str) -> None:
    """All families are tested except Chroma, which copies a tensor to the device, and Lumina 2, which reads one on
    the host.
    """
    pipe, requests = BUILDS[name]().to(cuda), tiny_requests([6, 2, 3, 4])
    expected = denoised(tiny(pipe, EngineOptions("plain", cuda_graphs=False)), requests)
    for found in _recorded(tiny(pipe, EngineOptions("plain", cuda_graphs=True)), requests, requests):
        assert relative_error(found, expected) <= PLAYED


@pytest.mark.parametrize("name", BUILDS)
def test_mixes_of_a_bucket_share_a_recording(name: str, cuda: str) -> None:
    """Batches of other sizes replay the pass that the first batch has recorded."""
    pipe, small, large, wide = BUILDS[name]().to(cuda), Resolution(32, 32), Resolution(64, 64), Resolution(96, 32)
    mixes = [[small, large, small, wide], [large, wide, wide], [wide, small, large, small]]
    batches = [[Request(n, f"a hat {n}", size, 3, 2.0 + n, seed=n) for n, size in enumerate(sizes)] for sizes in mixes]
    eager, recorded = tiny(pipe, EAGER), tiny(pipe, EngineOptions(cuda_graphs=True))
    for found, batch in zip(_recorded(recorded, *batches), batches, strict=True):
        assert relative_error(found, denoised(eager, batch)) <= PLAYED
    assert len(_passes_of(recorded)._recorded) == 1


@pytest.mark.parametrize("name", BUILDS)
def test_requests_that_a_cache_computes_are_replayed(name: str, cuda: str) -> None:
    pipe, requests = BUILDS[name]().to(cuda), tiny_requests([9, 6, 7, 8])
    patch_size, _ = tiny(pipe, EAGER).family.geometry.latent_size(requests[0].resolution)
    cache = CacheOptions("accumulated", 1e9, warmup_steps=1, max_reuse=2, patch_size=patch_size)
    expected = denoised(tiny(pipe, EngineOptions(cache=cache, cuda_graphs=False)), requests)
    for found in _recorded(tiny(pipe, EngineOptions(cache=cache, cuda_graphs=True)), requests, requests):
        assert relative_error(found, expected) <= PLAYED


@pytest.mark.parametrize("engine", ["patched", "plain"])
@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_adapters_of_other_rows_and_scales_are_replayed(name: str, engine: Any, cuda: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ..support.adapters import adapted, saved, serving

    _, loras, folder = saved(name, tmp_path)
    batches = [adapted([3] * 4), adapted([3] * 4, [(("toy", 0.3),), (), (("pixel", -0.4),), (("toy", 0.2),)])]
    eager, recorded = (
        serving(folder, loras, device=cuda, engine=engine, cuda_graphs=cuda_graphs) for cuda_graphs in (False, True)
    )
    for found, batch in zip(_recorded(recorded, *batches), batches, strict=True):
        assert relative_error(found, denoised(eager, batch)) <= PLAYED


@pytest.mark.parametrize(("name", "keep"), [("sdxl", "all"), ("sdxl", "kv"), ("sd3", "all"), ("flux", "all")])
def test_edits_that_join_and_leave_share_recordings(name: str, keep: Keep, cuda: str, tmp_path: Path) -> None:
    """Edits of other masks, sizes and steps replay the passes that were recorded for others."""
    pipe, store = BUILDS[name]().to(cuda), TemplateStore(tmp_path)
    requests = [replace(each, num_inference_steps=each.num_inference_steps + 6) for each in edits()]
    eager, recorded = (
        with_records(build_tiny(pipe, options), store, requests, keep)
        for options in (EngineOptions(), EngineOptions(cuda_graphs=True))
    )
    requests.append(replace(requests[1], request_id=3, seed=9))
    stepper = recorded.stepper
    assert isinstance(stepper, PatchedStepper)
    assert stepper.masked.captured is not None
    stepper.masked.captured._patience = 1
    for joins in ([0, 5, 0, 5], [5, 0, 5, 0], [0, 5, 0, 5]):
        found = denoised(recorded, requests, joins)
        assert relative_error(found, denoised(eager, requests, joins)) <= PLAYED
    assert stepper.recording_failure is None
    assert 1 <= len(stepper.masked.captured._recorded) <= 8


def test_passes_are_recorded_while_other_threads_encode_and_decode(cuda: str) -> None:
    model = served("emoji-xl", cuda, EngineOptions(cuda_graphs=True))
    passes = patched_stepper(model).model.captured
    assert passes is not None
    passes._patience = 1
    requests = [Request(n, f"a hat {n}", each.resolution, 4, 3.0, seed=n) for n, each in enumerate(mixed() * 6)]
    result = served_together(model, requests)
    assert passes.failure is None
    found = [result.latents[request.request_id][0] for request in requests]
    assert relative_error(found, alone(model, requests)) <= EXACT


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("name", BUNDLED)
def test_compiled_blocks_equal_eager_ones(name: str, cuda_graphs: bool, device: str) -> None:
    if cuda_graphs and device == "cpu":
        pytest.skip("CUDA graphs need a CUDA device")
    # The test loads its own model because compiling changes it.
    model = load_model(name, device, "float32", EngineOptions(compile=True, cuda_graphs=cuda_graphs))
    requests = mixed((3, 3, 3, 3))
    found = [denoised(model, requests) for _ in range(3)][-1]
    passes = patched_stepper(model).model.captured
    assert passes is None or passes.failure is None
    assert relative_error(found, alone(served(name, device), requests)) <= 1e-3
