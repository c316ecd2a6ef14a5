"""`psctl batch run`: draw a file of requests, as OpenAI's batches have them, without a server."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.errors import MissingExtraError, RunError
from ...data.files import require_places
from ...data.resolution import parse_list
from ..flags import flag, given_flags
from ..options.common import MaxBatchSize, Resolutions
from ..options.groups import EngineFlags
from ..options.replicas import ReplicaFlags
from ..options.system import with_cache_of
from ..options.target import Target
from ..output import Output
from .http_server import make_parts, recipe_of

if TYPE_CHECKING:
    from ...serving.server.batches.run import BatchRun

_SYSTEM = "patched-fcfs"


def batch_run(
    *,
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object a line: custom_id and body.", dir_okay=False)],
    output_dir: Annotated[
        Path, flag("--output-dir -o", "Where images, output.jsonl and errors.jsonl go.", file_okay=False)
    ] = Path("batch"),
    resolutions: Resolutions = None,
    max_batch_size: MaxBatchSize = 16,
    engine: EngineFlags,
    replicas: ReplicaFlags,
    target: Target,
    out: Output,
) -> None:
    """Draw every line of a file, and write down what has become of it.

    Lines are those of OpenAI's batches: {"custom_id": "a", "body": {"prompt": "a cat", "size": "256x256"}}. Whatever
    ends it, the same command goes on where it has stopped.

    Examples:

        psctl batch run requests.jsonl --output-dir drawn
        psctl batch run requests.jsonl --model emoji-3 --max-batch-size 8
        psctl batch run requests.jsonl --device cuda --num-replicas 8
    """
    try:
        from ...profiling.http.server import HttpSettings
        from ...serving.server.batches.file import BatchOutput, read_lines
        from ...serving.server.batches.run import BatchRun
        from ...serving.server.limits import Limits
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "http") from error
    from ...serving.models.served import MAX_TIMES_PIXELS
    from ...serving.scheduling.systems import get_system

    lines = read_lines(file)
    require_places(output_dir, target.workspace)
    output = BatchOutput(output_dir)
    left = [line for line in lines if line.custom_id not in output.done]
    if not left:
        out.note(f"All {len(lines)} lines are done: {output_dir}")
        _tell(out, len(lines), output.done.values(), output_dir)
        return
    system = get_system(_SYSTEM)
    engine = with_cache_of([system], engine, given_flags(context), target, out)
    sizes = target.defaults().resolutions if resolutions is None else tuple(parse_list(resolutions))
    limits = Limits(max_pixels=MAX_TIMES_PIXELS * max(size.pixels for size in sizes), max_steps=1000)
    recipe = recipe_of(system, sizes, max_batch_size, engine, target, needs_standalone=False)
    at_once = 2 * max_batch_size
    front_end = make_parts(
        recipe, HttpSettings(None, limits, is_quiet=True), replicas, at_once, 0.0, target, out
    ).front_end
    at_once *= replicas.num_replicas or replicas.max_replicas or 1
    with out.phases() as start:
        phase = start("lines", len(lines), done=len(lines) - len(left))
        run = BatchRun(front_end, lines, output, at_once, on_line=lambda is_good: phase())
        asyncio.run(_draw(run))
    _tell(out, len(lines), output.done.values(), output_dir)
    if not any(output.done.values()):
        raise RunError(f"no line could be drawn: {output_dir / 'errors.jsonl'} says why")


async def _draw(run: "BatchRun") -> None:
    await run.front_end.backend.start()
    try:
        await run.run()
    finally:
        await run.front_end.drain(0)


def _tell(out: Output, total: int, done: Iterable[bool], output_dir: Path) -> None:
    good = list(done)
    found = {
        "total": total,
        "completed": sum(good),
        "failed": len(good) - sum(good),
        "output_dir": str(output_dir),
    }
    out.data(found)
