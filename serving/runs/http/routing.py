"""Choice of a server's replicas: routers, with step times from the workspace's profiles. No model is loaded."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ....data.errors import UsageError
from ....data.resolution import Resolution
from ....data.tables.latency import TABLE_PATTERN, read_latencies
from ....training.cache.schedule import CacheSchedule
from ...editing.costs import MaskShares, profiled_edits
from ...editing.profile import PATTERN, EditProfile
from ...fleet.book import LoadBook
from ...scheduling.routers import PREDICTING_ROUTERS, check_router
from ..notes import Notify
from ..step_file import load_step_file
from ..step_latencies import measured_alone
from .engine import EngineRecipe


def load_book(recipe: EngineRecipe, router: str, edit_profile: Path | None, *, on_note: Notify) -> LoadBook:
    """Return the load book that chooses the replica of each request.

    Args:
        recipe: recipe of each replica's engine.
        router: name of one of `serving.scheduling.routers`. Routers that need step times get them from the newest table
            of the recipe's workspace that has its sizes and, if records are read, from the newest profile of edits.
        edit_profile: profile of edits in place of the workspace's.
        on_note: called with a line for each file that is read.

    Raises:
        UsageError: there is no such router, file or model, or a file is damaged; or `edit_profile` is given although
            the router needs no step times, or no records are read.
    """
    from ...models.loading import model_geometry
    from ...models.reuse import MASKED_UP_TO

    check_router(router)
    templates, max_batch_size = recipe.templates, recipe.max_batch_size
    if edit_profile is not None and router not in PREDICTING_ROUTERS:
        raise UsageError(f"--edit-profile is for --router {' or '.join(PREDICTING_ROUTERS)}, but it is {router}")
    if edit_profile is not None and templates is None:
        raise UsageError("--edit-profile is of edits that read records: add --reuse-templates, or leave it out")
    geometry = model_geometry(recipe.model)
    schedule = recipe.options.cache.schedule
    computed_of = None if schedule is None else CacheSchedule.load(schedule).num_computed
    book_of = partial(LoadBook, router, computed_of=computed_of, max_batch_size=max_batch_size)
    if router not in PREDICTING_ROUTERS:
        return book_of(share_of=None if templates is None else MaskShares(geometry, MASKED_UP_TO))
    steps = load_step_file(_table(recipe, router, on_note))
    if templates is None:
        return book_of(predictor=steps.of(recipe.system.engine).policy_latency)
    profile = _edit_profile(recipe, router, edit_profile, on_note)
    edits = profiled_edits(profile, geometry)
    predictor = steps.with_edits(profile).of(recipe.system.engine).policy_latency
    return book_of(predictor=predictor, share_of=edits.share_of, edits=edits)


def _table(recipe: EngineRecipe, router: str, on_note: Notify) -> Path:
    folder, engine = recipe.workspace.root / "tables", recipe.system.engine
    for path in recipe.workspace.newest_tables(TABLE_PATTERN):
        try:
            table = read_latencies(path)
        except UsageError as error:
            on_note(f"The table is not used: {error}")
            continue
        is_ours = table.circumstances is None or table.circumstances.engine == engine
        if is_ours and set(recipe.sizes) <= measured_alone(table):
            on_note(f"Step latencies for --router {router}: {path}")
            return path
    raise UsageError(
        f"--router {router} asks how long steps of {_named(recipe.sizes)} take, and no table in {folder} tells it of "
        f"the {engine} engine: psctl profile latency measures them"
    )


def _edit_profile(recipe: EngineRecipe, router: str, given: Path | None, on_note: Notify) -> EditProfile:
    assert recipe.templates is not None
    folder, keep = recipe.workspace.root / "tables", recipe.templates.keep
    for path in recipe.workspace.newest_tables(PATTERN) if given is None else [given]:
        try:
            profile = EditProfile.read(path)
        except UsageError as error:
            if given is not None:
                raise
            on_note(f"The profile is not used: {error}")
            continue
        if profile.keep == keep:
            on_note(f"Edits for --router {router}: {path}")
            return profile
        if given is not None:
            raise UsageError(f"{given} is of records with --keep {profile.keep}, but --keep {keep} is served")
    raise UsageError(
        f"--router {router} asks what edits take over records, and no profile in {folder} tells it of --keep {keep}: "
        "psctl profile edits makes one"
    )


def _named(sizes: Iterable[Resolution]) -> str:
    return ", ".join(map(str, sorted(sizes)))
