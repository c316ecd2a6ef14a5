"""The table of options that do not work together: each pair is refused with its reason, other pairs are accepted."""

from collections.abc import Callable, Sequence
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from safetensors.numpy import save_file

from patchedserve.data.resolution import Resolution
from patchedserve.psctl.flags import expanded
from patchedserve.psctl.options.groups import ParallelEngineFlags
from patchedserve.serving.conflicts import CONFLICTS, Conflict, conflict_in
from patchedserve.serving.families.table import FAMILIES
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions

from ..support.edits import image_of, mask_of
from ..support.tiny_models import save_tiny, tiny_sd

_ENGINE = {
    "--engine patched": "--engine patched",
    "--engine plain": "--engine plain",
    "--parallel": "--parallel virtual:2",
    "--parallel-decode strips": "--parallel virtual:2 --parallel-decode strips",
    "--order": "--order patch",
    "--order image": "--order image",
    "--patch-size": "--patch-size 2",
    "--strategy": "--strategy stitch",
    "--kernels": "--kernels torch",
    "--kernels triton": "--kernels triton",
    "--cache": "--cache patch",
    "a cache of blocks": "--cache interval",
    "--compile": "--compile",
    "--cuda-graphs": "--cuda-graphs",
    "--sampler": "--sampler euler",
    "--lora": "--lora style.safetensors",
    "--adapter": "--adapter ink=style.safetensors",
    "--quantize": "--quantize int8",
    "--stages processes": "--stages processes",
    "--offload text": "--offload text",
    "--decoder-dtype": "--decoder-dtype bfloat16",
}
"""Words on the command line that use a feature of the engine."""
_OTHERS = {
    "--adapter": f"{_ENGINE['--adapter']} --use-adapter ink",
    "--use-adapter": f"{_ENGINE['--adapter']} --use-adapter ink",
    "--offload text on a CPU": "--offload text --device cpu",
    "--reuse": "--reuse",
    "--reference": "--reference room.png",
    "--controlnet": "--controlnet edges=net --control edges=room.png",
    "--control": "--controlnet edges=net --control edges=room.png",
    "--edit-link-mbps": "--reuse --edit-link-mbps 9",
    "--keep outputs": "--reuse --keep outputs",
    "--breakdown": "--breakdown",
    "a single file": "--model style.safetensors --model-config StableDiffusionPipeline",
    "a model that predicts a flow": "--model flow",
} | {name: f"--model {name}" for name in FAMILIES}
"""The same for features of a command or of a model."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with an image, its mask, an adapter, and models without weights: of each pipeline, and of flows."""
    Image.fromarray(image_of(Resolution(64, 64))).save(tmp_path / "room.png")
    Image.fromarray(mask_of(Resolution(64, 64))).save(tmp_path / "mask.png")
    save_file({"layer.lora_A.weight": np.zeros((2, 2), np.float32)}, tmp_path / "style.safetensors")
    for name in (*FAMILIES, "flow"):
        pipeline, sampler = (
            (name, "DDIM") if name in FAMILIES else ("StableDiffusion3Pipeline", "FlowMatchEulerDiscrete")
        )
        (tmp_path / name / "scheduler").mkdir(parents=True)
        (tmp_path / name / "model_index.json").write_text(f'{{"_class_name": "{pipeline}"}}')
        config = tmp_path / name / "scheduler" / "scheduler_config.json"
        config.write_text(f'{{"_class_name": "{sampler}Scheduler"}}')
    return tmp_path


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda each: f"{each.one} {each.other}")
def test_every_pair_is_refused_with_its_reason(conflict: Conflict, folder: Path, run_psctl: Callable[..., Any]) -> None:
    words = " ".join((_ENGINE | _OTHERS)[name] for name in (conflict.one, conflict.other)).split()
    command = ["bench", "steps"] if "--breakdown" in words else ["edit", "room.png", "a hat"]
    if command[0] == "edit" and "--reference" not in words:
        command += ["--mask", "mask.png"]
    done = run_psctl(*command, *words, "--quiet")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith(f": {conflict.reason}\n")
    assert " does not work with " in done.stderr


def options_of(features: Sequence[str]) -> EngineOptions:
    """Parse a command line that uses these features of the engine."""
    seen: list[EngineOptions] = []

    def command(*, engine: ParallelEngineFlags) -> None:
        seen.append(engine)

    app = typer.Typer()
    app.command()(expanded(command))
    words = " ".join(_ENGINE[name] for name in features).split()
    typer.main.get_command(app).main(words, standalone_mode=False)
    return seen.pop()


def test_other_pairs_of_the_engines_options_are_accepted() -> None:
    used = {name: dict.fromkeys(options_of([name]).features, "") for name in _ENGINE}
    del used["--engine patched"]  # the default, which other engines replace
    pairs = [(one, other) for one, other in combinations(used, 2) if not conflict_in(used[one] | used[other])]
    for pair in pairs:
        assert set(pair) <= options_of(pair).features.keys()
    assert len(pairs) > 80


def test_a_model_loads_with_options_that_work_together(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sd())
    options = options_of(("a cache of blocks", "--offload text", "--sampler", "--order", "--kernels"))
    model = load_model(str(folder), "cpu", "float32", options)
    assert {"--cache", "--offload text", "--sampler", "--order", "--kernels"} <= model.options.features.keys()


def test_table_equals_the_documented_one(repository: Path) -> None:
    def code(name: str) -> str:
        return f"`{name}`" if name.startswith("--") or name in FAMILIES else name

    section = (repository / "docs" / "families.md").read_text().partition("## Options that do not work together")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    expected = []
    for reason, group in groupby(CONFLICTS, key=lambda each: each.reason):
        pairs = [(each.one, each.other) for each in group]
        ones, others = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
        assert sorted(pairs) == sorted(product(ones, others))
        expected.append(f"| {', '.join(map(code, ones))} | {', '.join(map(code, others))} | {reason} |")
    assert rows == expected
