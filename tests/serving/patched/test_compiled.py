"""`--compile`: the same results, and few graphs; which options go with it and with `--cuda-graphs`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineName, EngineOptions, ModelOptions
from patchedserve.serving.patched.stepper import PatchedStepper

from ...support.family_kit import denoised
from ...support.patched_cases import IMAGE, PATCH_STITCH, THREE_SIZES, TOLERANCE, TWO_SIZES, model_of
from ...support.patched_models import Way, draw_rows, relative_error, run_patched, run_plain
from ...support.plain import plain_latents
from ...support.tiny_models import dequantise, save_tiny, tiny_sd3, tiny_sdxl
from ...support.tools import need_tools


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("sdxl", IMAGE),
        ("sd3", PATCH_STITCH),
        ("flux", IMAGE),
        ("pixart", IMAGE),
    ],
    ids=str,
)
def test_graph_is_shared_by_batches_with_equal_numbers_of_resolutions(name: str, way: Way) -> None:
    graphs = graphs_after(name, way, [*TWO_SIZES, *THREE_SIZES])
    first, after_two, after_three = graphs[0], graphs[len(TWO_SIZES) - 1], graphs[len(TWO_SIZES)]
    assert first == after_two, "another batch of two resolutions needed another graph"
    assert graphs[-1] == after_three <= 2 * first <= 4


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("aura", IMAGE),
        ("chroma", IMAGE),
        ("flux2", PATCH_STITCH),
        ("lumina2", IMAGE),
        ("qwen", IMAGE),
        ("z-image", IMAGE),
    ],
    ids=str,
)
def test_a_graph_serves_all_batches_of_two_resolutions(name: str, way: Way) -> None:
    graphs = graphs_after(name, way, TWO_SIZES)
    assert len(set(graphs)) == 1, "another batch of two resolutions needed another graph"


def graphs_after(name: str, way: Way, batches: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Return the number of graphs after each of the batches, whose results are compared with plain diffusers."""
    model, symbols = model_of(name), set[str]()

    def note_symbols(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        given = [node.meta for node in graph.graph.find_nodes(op="placeholder")]
        numbers = [each for each in given if isinstance(each["example_value"], torch.SymInt)]
        symbols.update(each["grapharg"].source.name for each in numbers)
        assert not graph.graph.find_nodes(op="call_method", target="item"), "a float of the model is no constant"
        return graph.forward

    patched = way.build(model)
    assert patched.compile(backend=note_symbols) > 1
    graphs = []
    for sizes in batches:
        rows = draw_rows(model, [*sizes] * 2, seed=len(graphs))  # as with guidance, two or more of each size
        assert relative_error(run_patched(patched, rows), run_plain(model, rows)) <= TOLERANCE
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    of_blocks = [symbol for symbol in symbols if symbol.startswith("L['self']")]
    assert of_blocks
    assert all(".context." in symbol or ".text[" in symbol for symbol in of_blocks), "what a model fixes is no symbol"
    return graphs


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_kernels_equal_plain_diffusers(tmp_path: Path) -> None:
    """Compiled by inductor, batches of one resolution (the plain model) and of two (patches) equal plain diffusers."""
    need_tools("g++")
    pipe = tiny_sd3()
    compiled = build_model(pipe, name="tiny", options=EngineOptions(compile=True))
    compiled.tune([Resolution(32, 32), Resolution(64, 64)], tmp_path)
    assert counters["stats"]["unique_graphs"] >= 2
    made = counters["stats"]["unique_graphs"]
    requests = [Request(n, f"a cat {n}", Resolution(32 + 32 * (n % 2), 32 + 32 * (n % 2)), 3) for n in range(3)]
    for chosen in (requests[:1], requests):
        assert relative_error(denoised(compiled, chosen), [plain_latents(pipe, each) for each in chosen]) <= 1e-4
    assert counters["stats"]["unique_graphs"] == made, "tuning had not made all graphs"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_have_eight_bit_weights(tmp_path: Path) -> None:
    pipe, folder = eight_bits(tmp_path)
    model = load_model(str(folder), "cpu", "float32", EngineOptions(model=ModelOptions(quantize="int8")))
    patched_stepper(model).model.compile(backend="eager")
    assert_equal_with_float32(model, pipe)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_compiled_kernels_of_eight_bit_weights(engine: EngineName, tmp_path: Path) -> None:
    need_tools("g++")
    pipe, folder = eight_bits(tmp_path)
    options = EngineOptions(engine, compile=True, model=ModelOptions(quantize="int8"))
    assert_equal_with_float32(load_model(str(folder), "cpu", "float32", options), pipe)


def eight_bits(folder: Path) -> tuple[Any, Path]:
    """Return a pipeline and the folder where it is saved."""
    pytest.importorskip("torchao", reason="the extra quantize is not installed")
    pipe = tiny_sd3()
    return pipe, save_tiny(folder / "its", pipe)


def assert_equal_with_float32(model: ServedModel, pipe: Any) -> None:
    """Compare a model of 8-bit weights with plain diffusers that has the same weights as float32."""
    dequantise(pipe.transformer, model.denoiser)
    requests = [Request(n, f"a cat {n}", Resolution(32 + 32 * (n % 2), 32 + 32 * (n % 2)), 3) for n in range(3)]
    assert relative_error(denoised(model, requests), [plain_latents(pipe, each) for each in requests]) <= 1e-4
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_run_the_requests_that_a_cache_computes() -> None:
    pipe, cache = tiny_sd3(), CacheOptions("accumulated", 1e9, warmup_steps=1, max_reuse=2)
    eager, compiled = (build_model(pipe, name="tiny", options=EngineOptions(cache=cache)) for _ in range(2))
    assert isinstance(compiled.stepper, PatchedStepper)
    compiled.stepper.model.compile(backend="eager")
    sizes = [Resolution(32, 32), Resolution(64, 64), Resolution(32, 32)]
    requests = [Request(n, f"a cat {n}", size, 6 + n, seed=n) for n, size in enumerate(sizes)]
    found, expected = (denoised(model, requests, joins=[0, 1, 3]) for model in (compiled, eager))
    assert relative_error(found, expected) <= 1e-4
    assert counters["stats"]["unique_graphs"] > 0
    assert compiled.stepper.model.cache is not None
    assert compiled.stepper.model.cache.stats.skipped > 0


# Options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"compile": True, "cache": "patch"},
            "--compile does not work with --cache patch: it makes graphs of whole blocks",
        ),
        (
            {"cuda_graphs": True, "cache": "patch"},
            "--cuda-graphs does not work with --cache patch: it records whole passes",
        ),
    ],
)
def test_incompatible_options_are_refused(given: dict[str, Any], message: str) -> None:
    if "cache" in given:
        given = given | {"cache": CacheOptions(given["cache"], 0.1)}
    with pytest.raises(UsageError, match=message):
        EngineOptions(**given)


def test_cuda_graphs_need_a_gpu() -> None:
    with pytest.raises(UsageError, match="--cuda-graphs needs a CUDA device, but the model is on cpu"):
        build_model(tiny_sdxl(), name="tiny", options=EngineOptions(cuda_graphs=True))
