"""Options made from dataclasses: fields define types and defaults; every command receives the options by name."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from patchedserve.data.errors import UsageError
from patchedserve.eval.options import EvalOptions
from patchedserve.psctl.flags import Flags, expanded, flag, given_flags, preset_flag
from patchedserve.psctl.options.groups import CACHE, DRAW, EDITED_TRACE, EDITS, ENGINE, PARALLEL, TRACE, JudgeFlags
from patchedserve.psctl.options.system import with_cache_of
from patchedserve.psctl.options.target import WHERE, Target
from patchedserve.psctl.output import Output
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.runs.trace_settings import TraceSettings
from patchedserve.serving.scheduling.systems import get_system


def run(command: Any, *arguments: str, **environment: str) -> None:
    app = typer.Typer(context_settings={"auto_envvar_prefix": "PSCTL"})
    app.callback()(lambda: None)
    app.command("try")(expanded(command))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        typer.main.get_command(app).main(["try", *arguments], standalone_mode=False)


@pytest.mark.parametrize("kind", [CACHE, ENGINE, PARALLEL, EDITED_TRACE, DRAW, WHERE, Flags.of(JudgeFlags)])
def test_defaults_equal_those_of_the_dataclass(kind: Flags) -> None:
    given = {parameter.name: parameter.default for parameter in kind.parameters()}
    assert kind.build(given) == kind.kind()
    assert given == {}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CACHE, {"full_above"}),
        (ENGINE, {"parallel", "model", "prompt_cache_mb", "offload", "stages", "decoder_dtype", "decode_batch"}),
        (PARALLEL, {"may_use_fewer"}),
        (TRACE, {"edits"}),
        (EDITED_TRACE, set()),
        (EDITS, set()),
        (DRAW, {"metrics"}),
        (WHERE, set()),
    ],
)
def test_every_field_has_an_option(kind: Flags, fields: set[str]) -> None:
    assert {each.name for each in dataclasses.fields(kind.kind)} - set(kind.options) == fields


def test_command_receives_given_values_by_name() -> None:
    seen: list[Any] = []

    def command(
        *,
        trace: Annotated[TraceSettings, TRACE.without("seed").using(num_prompts=flag("--count", "How many."))],
        engine: Annotated[EngineOptions, ENGINE],
        drawing: Annotated[EvalOptions, DRAW.only("max_bad", "seed").fixing(metrics=("clip",), num_prompts=1)],
        judges: JudgeFlags,
        target: Annotated[Target, WHERE.only("base")],
        files: Annotated[list[Path] | None, flag("--file", "Some.")] = None,
        amount: Annotated[int, flag("--amount -a", "Much.", is_shared=True)] = 3,
    ) -> None:
        seen.append((trace, engine, drawing, judges, target, files, amount))

    run(command)
    nothing = (TraceSettings(), EngineOptions(), EvalOptions(("clip",), num_prompts=1), JudgeFlags(), Target(), None, 3)
    assert seen.pop() == nothing
    options = ["--period", "5", "--count", "7", "--duration", "2", "--arrivals", "~/a.csv", "--order", "patch"]
    options += ["--cache", "interval", "--cache-interval", "6", "--cache-patch-size", "4", "--patch-size", "2"]
    options += ["--max-bad", "1", "--seed", "9", "--fid-weights", "w", "-m", "emoji-3", "--file", "~/x", "--file", "y"]
    run(command, *options, PSCTL_AMOUNT="4", PSCTL_TRY_CV="2.5", PSCTL_WARMUP_STEPS="8", PSCTL_CLIP_MODEL="judge")
    home = Path.home()
    assert seen.pop() == (
        TraceSettings(cv=2.5, period_s=5, num_prompts=7, duration_s=2, arrivals=home / "a.csv"),
        EngineOptions(
            order="patch", patch_size=2, cache=CacheOptions("interval", interval=6, patch_size=4, warmup_steps=8)
        ),
        EvalOptions(("clip",), num_prompts=1, max_bad=1, seed=9),
        JudgeFlags("judge", Path("w")),
        Target("emoji-3"),
        [home / "x", Path("y")],
        4,
    )
    with pytest.raises(UsageError, match="--order does not work with --engine plain: it is only for --engine patched"):
        run(command, "--engine", "plain", "--order", "patch")


def test_system_enables_its_cache_if_there_is_a_predictor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").touch()
    target = Target(str(tmp_path / "model"), device="cpu", workspace=tmp_path / "workspace")
    ours, plain = [get_system("patchedserve")], [get_system("bucketed")]
    assert with_cache_of(ours, EngineOptions(), {}, target, Output()) == EngineOptions()
    assert capsys.readouterr().err.startswith("Nothing is reused: neither workspace nor model has a cache predictor")
    file = target.with_cache_file(CacheOptions("patch")).predictor
    assert file is not None
    assert file.is_relative_to(tmp_path / "workspace")
    cached = EngineOptions(cache=CacheOptions("patch"))
    # The model's file is used, but that of the workspace takes precedence.
    shipped = tmp_path / "model" / "cache.safetensors"
    shipped.touch()
    assert target.with_cache_file(CacheOptions("patch")).predictor == shipped
    assert with_cache_of(ours, EngineOptions(), {}, target, Output()) == cached
    file.parent.mkdir(parents=True)
    file.touch()
    assert target.with_cache_file(CacheOptions("patch")).predictor == file
    assert with_cache_of(ours, EngineOptions(), {}, target, Output()) == cached
    for given in (CacheOptions("patch", 0.1), CacheOptions("interval"), CacheOptions("patch", predictor=shipped)):
        assert target.with_cache_file(given) == given
    # No cache is added if the user chooses otherwise, or if no system has a cache.
    for engine in (EngineOptions("plain"), EngineOptions(cache=CacheOptions("interval"))):
        assert with_cache_of(ours, engine, {}, target, Output()) == engine
    assert with_cache_of(ours, EngineOptions(), {"--cache": "off"}, target, Output()) == EngineOptions()
    assert with_cache_of(plain, EngineOptions(), {}, target, Output()) == EngineOptions()
    assert capsys.readouterr().err == ""
    compiled = EngineOptions(compile=True)
    assert with_cache_of(ours, compiled, {}, target, Output()) == replace(compiled, cache=CacheOptions("patch"))
    edits = with_cache_of(ours, EngineOptions(), {}, target, Output(), reuses_templates=True)
    assert edits == EngineOptions()
    assert "runs without its cache" in capsys.readouterr().err
    # A schedule supports options that other caches do not.
    of_steps = [get_system("patched-schedule")]
    (tmp_path / "model" / "cache-schedule.json").touch()
    assert with_cache_of(of_steps, compiled, {}, target, Output()).cache == CacheOptions("schedule")
    assert with_cache_of([*ours, *of_steps], EngineOptions(), {}, target, Output()) == cached
    plain = EngineOptions("plain")
    assert with_cache_of(of_steps, plain, {}, target, Output()).cache == CacheOptions("schedule")
    assert get_system("patched-schedule").overridden(engine="plain").cache == "schedule"


def test_given_flags_are_detected() -> None:
    seen: list[Any] = []

    def command(*, context: typer.Context, target: Target, depth: Annotated[int, flag("--depth", "Deep.")] = 1) -> None:
        seen.append(given_flags(context))

    run(command, "--depth", "1", PSCTL_DEVICE="cpu")
    assert seen == [{"--depth": 1}]


def test_preset_flag_changes_defaults() -> None:
    seen: list[tuple[int, int]] = []

    def command(
        *,
        first: Annotated[int, flag("--first", "One.")] = 10,
        second: Annotated[int, flag("--second", "Two.")] = 20,
        quick: Annotated[bool, preset_flag("--quick", "Less.", first=1, second=2)] = False,
    ) -> None:
        seen.append((first, second))

    run(command)
    run(command, "--second", "5", "--quick")
    run(command, "--quick", PSCTL_TRY_FIRST="7")
    assert seen == [(10, 20), (1, 5), (7, 2)]
