"""Choice of the router of a server's replicas and of its step latencies, from files, before any model is loaded."""

import shutil
from pathlib import Path

import pytest

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import parse, parse_list
from patchedserve.data.workspace import ModelWorkspace, Workspace
from patchedserve.psctl.app import main
from patchedserve.serving.options import EngineOptions, TemplateOptions
from patchedserve.serving.runs.http.engine import EngineRecipe
from patchedserve.serving.runs.http.routing import load_book
from patchedserve.serving.scheduling.routers import PREDICTING_ROUTERS, ROUTERS
from patchedserve.serving.scheduling.systems import get_system

from ....support.edits import image_of, mask_of
from ....support.http_server import small_model
from ....support.latency_tables import write_profiles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def place(tmp_path: Path) -> ModelWorkspace:
    place = ModelWorkspace(tmp_path)
    write_profiles(place.tables)
    return place


def recipe_of(
    model: Path, place: ModelWorkspace, templates: TemplateOptions | None, *, system: str = "patched-fcfs"
) -> EngineRecipe:
    sizes, options = tuple(parse_list("32,64x32")), EngineOptions()
    return EngineRecipe(
        "tiny", str(model), "cpu", "float32", options, place, get_system(system), sizes, templates=templates
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_uses_the_computed_share_of_edits(name: str, model: Path, place: ModelWorkspace) -> None:
    size, notes = parse("64x32"), list[str]()
    template, narrow = TemplateSpec(), mask_of(size, "all")
    narrow[:, 16:] = False
    edit = Request(1, "", size, edit=EditSpec(image_of(size), narrow, template=template))
    view = load_book(recipe_of(model, place, TemplateOptions()), name, None, on_note=notes.append).view_of(edit)
    assert view.active_share == 0.5
    assert view.record is not None
    assert len(notes) == (2 if name in PREDICTING_ROUTERS else 0)
    # Without records, edits are computed whole.
    view = load_book(recipe_of(model, place, None), name, None, on_note=notes.append).view_of(edit)
    assert (view.active_share, view.record) == (1.0, None)


def test_step_times_follow_the_engine_and_record_contents(model: Path, place: ModelWorkspace) -> None:
    def loaded(*, keep: str = "all", system: str = "patched-fcfs", file: Path | None = None) -> list[str]:
        notes = list[str]()
        templates = None if keep == "none" else TemplateOptions("never", keep)  # type: ignore[arg-type]
        load_book(recipe_of(model, place, templates, system=system), "mask-aware", file, on_note=notes.append)
        return [note.rpartition("/")[2] for note in notes]

    assert loaded() == ["latency-0.parquet", "edits-0.json"]
    assert loaded(keep="none") == ["latency-0.parquet"]
    with pytest.raises(UsageError, match="tells it of --keep kv: psctl profile edits makes one"):
        loaded(keep="kv")
    with pytest.raises(UsageError, match="tells it of the plain engine: psctl profile latency measures them"):
        loaded(keep="none", system="bucketed")
    other = ModelWorkspace(place.root / "other").tables
    write_profiles(other, keep="kv")
    with pytest.raises(UsageError, match="is of records with --keep kv, but --keep all is served"):
        loaded(file=other / "edits-0.json")
    # A newer profile does not match, so the older one is used.
    shutil.copy(other / "edits-0.json", place.tables / "edits-1.json")
    assert loaded() == ["latency-0.parquet", "edits-0.json"]
    assert loaded(keep="kv") == ["latency-0.parquet", "edits-1.json"]
    write_profiles(other, engine="plain")
    with pytest.raises(UsageError, match="the profile of edits does not go with the step latencies"):
        loaded(file=other / "edits-0.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "best"), "router is 'best', but it must be one of round-robin, least-requests"),
        (("--router", "mask-aware"), "no table in"),
        (("--router", "mask-aware-step", "--reuse-templates"), "no table in"),
        (
            ("--edit-profile", "f.json"),
            "is for --router mask-aware or mask-aware-step, but it is fewest",
        ),
        (("--router", "mask-aware", "--edit-profile", "f.json"), "add --reuse-templates, or leave it out"),
    ],
)
def test_invalid_options_give_a_one_line_error(
    options: tuple[str, ...], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--model", str(model), "--workspace", str(tmp_path), "--device", "cpu", "--port", "0", "--quiet")
    assert main(["serve", "--http", *where, "--num-replicas", "2", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert main(["serve", "--http", *where, *options]) == 2
    assert f"{options[0]} is of replicas: add --num-replicas, or leave it out\n" in capsys.readouterr().err
    assert main(["serve", "--model", str(model), *options]) == 2
    assert "is for servers: add --http" in capsys.readouterr().err


def test_table_without_a_profile_of_edits_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = Workspace(tmp_path).for_model(str(model), "cpu").tables
    write_profiles(tables)
    (tables / "edits-0.json").unlink()
    words = ("serve", "--http", "--model", str(model), "--workspace", str(tmp_path), "--device", "cpu", "--port", "0")
    assert main([*words, "--num-replicas", "2", "--reuse-templates", "--router", "mask-aware"]) == 2
    assert f"no profile in {tables} tells it of --keep all: psctl profile edits makes one" in capsys.readouterr().err
