"""Recorded passes (`--cuda-graphs`): they read new inputs and are recorded for batches that recur.

CUDA graphs need a GPU. Elsewhere a recorder that simply runs the work again takes their place: it too reads and writes
only the memory that the pass was recorded with, which is where mistakes can occur.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.captured import CapturedPasses, PassBatch, Pause, Recorder
from patchedserve.serving.core.cuda_graphs import CudaRecorder
from patchedserve.serving.models.build import build_model
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.runs.summary import optional_figures

from ...support.family_kit import denoised
from ...support.patched_cases import IMAGE, PATCH_STITCH, TOLERANCE, TWO_SIZES, model_of
from ...support.patched_models import Way, call_patched, draw_rows, relative_error, run_patched, run_plain
from ...support.plain import plain_latents
from ...support.tape import Tape
from ...support.tiny_models import tiny_sd3, tiny_sdxl


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("way", [IMAGE, PATCH_STITCH], ids=str)
@pytest.mark.parametrize(
    "name", ["sdxl", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image"]
)
def test_recorded_passes_read_new_inputs(name: str, way: Way) -> None:
    model = model_of(name)
    patched, recorder = way.build(model), Tape()
    patched.use_graphs(recorder, patience=1)
    for seed, sizes in enumerate([TWO_SIZES[0], TWO_SIZES[1], TWO_SIZES[0], TWO_SIZES[0], TWO_SIZES[1]]):
        rows = draw_rows(model, sizes, seed=seed)
        outputs = [run_patched(patched, rows)]
        for timestep in (500.0, 20.0):
            rows = [replace(row, latents=row.latents * 0.9, timestep=timestep) for row in rows]
            outputs.append(call_patched(patched, rows))
            assert relative_error(outputs[-1], run_plain(model, rows)) <= TOLERANCE
        assert relative_error(outputs[1], outputs[2]) > 0.01, "a result has changed under its reader"
    # The first pass of each composition runs eagerly.
    assert (recorder.recorded, recorder.played) == (2, 13)


def test_text_lengths_and_repeats_are_recorded_separately() -> None:
    model = model_of("sd3")
    patched, recorder = IMAGE.build(model), Tape()
    patched.use_graphs(recorder, patience=1)
    rows = draw_rows(model, TWO_SIZES[0])
    for repeats in (1, 3, 1):
        run_patched(patched, rows, repeats=repeats)
        found = call_patched(patched, rows)
        expected = IMAGE.build(model)
        assert relative_error(found, run_patched(expected, rows, repeats=repeats)) <= TOLERANCE
    assert recorder.recorded == 2


def passes_of(passes: CapturedPasses, key: str, count: int) -> float:
    batch = PassBatch()
    for value in range(count):
        found = passes.run(batch, key, {}, lambda inputs, *_: inputs["x"] + 1, {"x": torch.tensor(float(value))})
    return float(found)


def test_passes_are_recorded_with_their_own_indices() -> None:
    """Indices of equal shape share memory; those of another pass would be out of range while this one is recorded."""
    passes = CapturedPasses(Tape(), patience=0)
    for length in (10, 2):
        given = {"index": torch.tensor([length - 1]), "values": torch.arange(float(length))}
        batch = PassBatch(is_complete=True)
        found = passes.run(batch, "any", {}, lambda each, *_: each["values"].index_select(0, each["index"]), given)
        assert found.tolist() == [length - 1]
    assert passes.failure is None


def test_batches_compute_values_for_passes_of_several_keys() -> None:
    """Passes of each key keep a value of their own, so that a new batch lacks one when a recorded pass first runs."""
    recorder = Tape()
    passes = CapturedPasses(recorder, patience=1)

    def run(batch: PassBatch, key: str, values: dict[str, Tensor], text: float) -> float:
        def forward(inputs: dict[str, Tensor], kept: dict[str, Tensor], _: object) -> Tensor:
            if key not in kept:
                kept[key] = torch.tensor(text)
            return inputs["x"] * kept[key]

        return float(passes.run(batch, key, values, forward, {"x": torch.tensor(2.0)}))

    for text in (3.0, 5.0, 7.0):
        batch, values = PassBatch(), dict[str, Tensor]()
        for key in "abbaba":
            assert run(batch, key, values, text) == 2 * text
    assert recorder.recorded == 2
    assert recorder.played > 8


def test_least_recently_used_pass_is_released() -> None:
    recorder = Tape()
    passes = CapturedPasses(recorder, patience=1, memory_bytes=12)  # one float in for both, and one out each
    assert [passes_of(passes, key, 2) for key in "abab"] == [2.0] * 4
    assert recorder.recorded == 2
    passes_of(passes, "c", 2)  # in place of a
    passes_of(passes, "b", 2)
    assert recorder.recorded == 3
    passes_of(passes, "a", 2)
    assert recorder.recorded == 4
    passes.clear()
    passes_of(passes, "a", 2)
    assert recorder.recorded == 5


def test_released_pass_must_recur_before_it_is_recorded_again() -> None:
    recorder = Tape()
    passes = CapturedPasses(recorder, patience=2, memory_bytes=8)  # one float in and one out
    for key in "abab":
        passes_of(passes, key, 2)
    assert recorder.recorded == 2
    passes_of(passes, "a", 2)
    assert recorder.recorded == 2, "a made room for b, and is a newcomer again"
    passes_of(passes, "b", 3)
    passes_of(passes, "a", 2)
    assert recorder.recorded == 3


def test_nothing_is_recorded_while_more_passes_are_dropped_than_replayed() -> None:
    recorder = Tape()
    passes = CapturedPasses(recorder, patience=1, memory_bytes=8)  # one float in and one out
    for number in range(10):
        passes_of(passes, f"{number}", 2)
    assert recorder.recorded == 2, "the second was recorded in place of the first"
    for _ in range(2):
        passes_of(passes, "1", 1)
        passes.run(PassBatch(is_complete=True), "1", {}, lambda inputs, *_: inputs["x"], {"x": torch.tensor(1.0)})
    passes_of(passes, "9", 2)
    assert recorder.recorded == 3, "replays outnumber what was dropped"


def test_replay_that_differs_is_not_used() -> None:
    """The recording reads a tensor that is not among its inputs."""
    passes, outside = CapturedPasses(Tape(), patience=1), [torch.tensor(5.0)]

    def forward(inputs: dict[str, Any], _: object, pause: Pause | None) -> Tensor:
        return inputs["x"] + (outside[0] if pause is None else inputs["x"])

    for value in (1.0, 2.0, 3.0):
        found = passes.run(PassBatch(is_complete=True), "key", {}, forward, {"x": torch.tensor(value)})
        assert float(found) == value + 5.0
    assert passes.failure == (
        "recording a pass: RuntimeError: its replay differs from the same pass run eagerly by 0.43 of the result"
    )


def test_recording_that_has_failed_is_tried_again() -> None:
    recorder = OnceNot()
    passes = CapturedPasses(recorder, patience=0)
    for count, recorded in ((1, 1), (60, 1), (10, 2), (10, 2)):
        passes_of_one_batch(passes, count)
        assert recorder.recorded == recorded
    assert recorder.played > 0


def passes_of_one_batch(passes: CapturedPasses, count: int) -> None:
    for value in range(count):
        x = torch.tensor(float(value))
        assert passes.run(PassBatch(is_complete=True), "key", {}, lambda inputs, *_: inputs["x"] + 1, {"x": x}) == x + 1


class OnceNot(Tape):
    """A device on which the first recording fails."""

    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if not self.recorded:
            self.recorded += 1
            raise RuntimeError("out of memory")
        return super().__call__(work)


def test_recurring_batches_are_recorded() -> None:
    recorder = Tape()
    passes = CapturedPasses(recorder, patience=3)
    assert passes_of(passes, "stays", 5) == 5.0
    assert (recorder.recorded, recorder.played) == (1, 2)
    for _ in range(2):
        passes_of(passes, "comes back", 2)
    assert recorder.recorded == 2
    for number in range(20):
        passes_of(passes, f"passes by {number}", 2)
    assert recorder.recorded == 2


class NotOnThisDevice(Tape):
    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.recorded += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_unrecordable_pass_runs_eagerly_with_a_warning() -> None:
    pipe = tiny_sdxl()
    recorded = build_model(pipe, name="tiny")
    assert isinstance(recorded.stepper, PatchedStepper)
    recorder = NotOnThisDevice()
    recorded.stepper.model.use_graphs(recorder, patience=1)
    requests = [Request(n, "a cat", Resolution(32, 32 * n + 32), 4, seed=n) for n in range(2)]
    assert relative_error(denoised(recorded, requests), [plain_latents(pipe, each) for each in requests]) <= 1e-4
    assert recorder.recorded == 1, "it is tried once"
    failure = optional_figures(recorded, None)["recording_failure"]
    assert failure == "recording a pass: RuntimeError: operation not permitted when stream is capturing"


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_served_images_equal_those_of_eager_passes(make: Callable[[], Any]) -> None:
    """This uses CUDA graphs if there is a GPU."""
    has_gpu = torch.cuda.is_available()
    pipe = make().to("cuda" if has_gpu else "cpu")
    eager, recorded = (build_model(pipe, name="tiny") for _ in range(2))
    assert isinstance(recorded.stepper, PatchedStepper)
    recorder: Recorder = CudaRecorder(pipe.device) if has_gpu else Tape()
    recorded.stepper.model.use_graphs(recorder, patience=1)
    sizes = [Resolution(32, 32), Resolution(64, 64), Resolution(32, 32)]
    requests = [Request(n, f"a cat {n}", size, 4, seed=n) for n, size in enumerate(sizes)]
    for chosen in (requests, requests[1:], requests[:1], requests):
        assert relative_error(denoised(recorded, chosen), denoised(eager, chosen)) <= 1e-4
