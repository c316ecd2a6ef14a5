"""One strip of an image on one device, compared with the whole image."""

from collections.abc import Iterator
from functools import partial

from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.tests.benchmarks.strip_times import strip_rows

from ..context import Context, Row


def strips(context: Context) -> Iterator[Row]:
    """Yield a row for each size, with a line for each number of ranks; one rank computes the whole image."""
    model = with_engine(context.model, EngineOptions("plain", cuda_graphs=False))
    sides = context.scale.strip_sides
    yield from context.measured((f"{side} px", partial(_strips, context, model, side)) for side in sides)


def _strips(context: Context, model: ServedModel, side: int) -> Row:
    return {"strips": strip_rows(model, Resolution(side, side), context.scale.ranks, context.scale.repeats)}
