"""`psctl batch run`: draws a file of requests in the format of OpenAI's batches, without a server."""

import asyncio
import hashlib
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ...data.errors import MissingExtraError, RunError
from ...data.files import require_places
from ...data.resolution import parse_list
from ..flags import flag, given_flags
from ..options.common import MaxBatchSize, Resolutions
from ..options.groups import ServedEngineFlags
from ..options.replicas import ReplicaFlags
from ..options.system import with_cache_of
from ..options.target import Target
from ..output import Output
from .http_server import make_parts, recipe_of

_SYSTEM = "patched-fcfs"


def batch_run(
    *,
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="File of requests, one JSON object per line: custom_id and body.", dir_okay=False)
    ],
    output_dir: Annotated[
        Path, flag("--output-dir -o", "Folder for images, output.jsonl and errors.jsonl.", file_okay=False)
    ] = Path("batch"),
    resolutions: Resolutions = None,
    max_batch_size: MaxBatchSize = 16,
    engine: ServedEngineFlags,
    replicas: ReplicaFlags,
    target: Target,
    out: Output,
) -> None:
    """Draw each line of a file of requests and write its result.

    Lines have the format of OpenAI's batches: {"custom_id": "a", "body": {"prompt": "a cat", "size": "256x256"}}. After
    an interruption, the same command continues where it stopped.

    Examples:

        psctl batch run requests.jsonl --output-dir drawn
        psctl batch run requests.jsonl --model emoji-3 --max-batch-size 8
        psctl batch run requests.jsonl --device cuda --num-replicas 8
    """
    try:
        from ...serving.runs.http.server import HttpSettings
        from ...serving.server.batches.file import BatchOutput, read_lines
        from ...serving.server.batches.places import FairPlaces
        from ...serving.server.batches.run import BatchRun
        from ...serving.server.limits import Limits
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "http") from error
    from ...serving.models.served import MAX_TIMES_PIXELS
    from ...serving.scheduling.systems import get_system

    lines = read_lines(file)
    require_places(output_dir, target.workspace)
    with closing(BatchOutput(output_dir)) as output:
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        output.keep_to({"file": sha256, "model": target.model, "dtype": target.dtype})
        num_left = sum(line.custom_id not in output.done for line in lines)
        if num_left:
            system = get_system(_SYSTEM)
            engine = with_cache_of([system], engine, given_flags(context), target, out)
            sizes = target.defaults().resolutions if resolutions is None else tuple(parse_list(resolutions))
            limits = Limits(max_pixels=MAX_TIMES_PIXELS * max(size.pixels for size in sizes), max_steps=1000)
            recipe = recipe_of(system, sizes, max_batch_size, engine, target, needs_standalone=False)
            settings, at_once = HttpSettings(None, limits), 2 * max_batch_size
            front_end = make_parts(recipe, settings, replicas, at_once, limits.request_timeout_s, target, out).front_end
            with out.phases() as start:
                phase = start("lines", len(lines), done=len(lines) - num_left)
                places = FairPlaces(at_once * replicas.most)
                run = BatchRun(front_end, lines, output, places, on_line=lambda is_good: phase())
                asyncio.run(run.run_alone())
        else:
            out.note(f"All {len(lines)} lines are done: {output_dir}")
        good = [output.done[line.custom_id] for line in lines]
    out.data(
        {
            "total": len(lines),
            "completed": sum(good),
            "failed": len(good) - sum(good),
            "output_dir": str(output_dir),
        }
    )
    if not any(good):
        raise RunError(f"no line could be drawn: {output_dir / 'errors.jsonl'} says why")
