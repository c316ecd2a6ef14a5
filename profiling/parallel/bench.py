"""Latency of a step on several ranks against one, interleaved in one run, by side and resolution.

Every side takes steps of the same requests, including guidance and sampler. A speed-up is the median of the repeats'
ratios to one rank, which has as many threads as each of several ranks. One process with all of the machine's threads is
measured beside them. `alone` is the computation of one rank: its strip, without sending or waiting for anything
(DistriFusion's "No Comm.").
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...data.resolution import Resolution
from ...data.statistics import Estimate, ratios_of
from ...serving.core.prepared import PreparedRequest
from ...serving.core.stepper import Stepper
from ...serving.models.build import build_plain, with_engine
from ...serving.models.served import ServedModel
from ...serving.options import EngineOptions
from ...serving.parallel.group import Message
from ...serving.parallel.options import ParallelOptions
from ...serving.parallel.processes import ProcessEnd
from ...serving.parallel.ranks import Ranks
from ...serving.parallel.stepper import ParallelStepper
from ...serving.parallel.strip_model import StripModel
from ...serving.plain.formats import PlainModels
from ...serving.runs.machine import run_facts
from ..experiment.experiment import Experiment
from ..experiment.rows import Row, row_of
from ..report.table import Table
from ..report.words import DASH
from ..steps.combinations import Combination
from ..steps.lanes import BenchSettings, Lane, time_lanes
from ..steps.sides import RequestPool, StepperSide, plain_side
from .ways import WAYS

RUN_KIND = "bench-parallel"
_ONE, _MACHINE, _ALONE = "one rank", "whole machine", "alone"
_SETTLED = 4
"""Number of steps after which a side is compared with one rank."""


class MeasuredSide:
    """A side that computes with a given number of threads and records how long each step waited for other ranks.

    Args:
        side: side that takes the steps.
        threads: number of threads; None leaves the current number.
        end: rank 0's end of the ranks' group; None for one process.
    """

    def __init__(self, side: StepperSide, threads: int | None = None, end: ProcessEnd | None = None) -> None:
        self._side, self._threads, self._end = side, threads, end
        self.waited_ms: list[float] = []

    @property
    def steps_left(self) -> int:
        """Number of steps until the requests finish."""
        return self._side.steps_left

    def begin(self) -> None:
        """Reset all requests to the middle of their schedules."""
        self._side.begin()

    def step(self) -> None:
        """Take one step of every request with this side's threads. Raises RunError."""
        before, waited_s = torch.get_num_threads(), 0.0 if self._end is None else self._end.waited_s
        torch.set_num_threads(self._threads or before)
        try:
            self._side.step()
        finally:
            torch.set_num_threads(before)
        if self._end is not None:
            self.waited_ms.append(1e3 * (self._end.waited_s - waited_s))


class ZeroFilledEnd:
    """Rank 0's end of a group whose other ranks do not exist: zeros replace what they would send, without any wait."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self._last_messages: dict[int, Message] = {}

    def __enter__(self) -> "ZeroFilledEnd":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def send(self, rank: int, message: Message) -> None:
        """Keep the message, from which `receive` derives the shape of the answer."""
        self._last_messages[rank] = message

    def receive(self, rank: int, *, is_idle: bool = False) -> Message:
        """Return a prediction of zeros in the shape of the rank's strip."""
        message = self._last_messages[rank]
        place, starts = list(message.facts["members"]).index(rank), message.facts["starts"]
        rows, channels, _, width = message.tensors["latents"].shape
        shape = (rows, channels, starts[place + 1] - starts[place], width)
        return Message("predicted", {}, {"prediction": message.tensors["latents"].new_zeros(shape)})

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> "PendingZeros":
        """Return zeros of the shapes that the other ranks would send."""
        return PendingZeros(shapes, next(iter(sends.values())).device, dtype)


class PendingZeros:
    """Zeros in place of tensors from other ranks, received as soon as they are awaited."""

    def __init__(self, shapes: Mapping[int, Sequence[int]], device: torch.device, dtype: torch.dtype) -> None:
        self._zeros = {rank: torch.zeros(tuple(shape), device=device, dtype=dtype) for rank, shape in shapes.items()}

    def wait(self) -> dict[int, Tensor]:
        """Return the zeros by rank, at once."""
        return self._zeros


class OneRank:
    """A `RankGroup` of which only rank 0 exists and computes."""

    losses: tuple[()] = ()
    decoder = None

    def __init__(self, model: torch.nn.Module, options: ParallelOptions) -> None:
        self.end = ZeroFilledEnd(options.count)
        self.ranks = Ranks(self.end, StripModel(model), options)

    def use(self, options: ParallelOptions) -> None:
        """Do nothing: a rank alone runs in one mode only."""

    def recover(self, error: Exception) -> Exception:
        """Return the error unchanged: no other rank can have caused it."""
        return error

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class ParallelBench:
    """All sides of one model on plain diffusers. `close` ends the ranks.

    Args:
        model: model on plain diffusers.
        options: options of the ranks; each side sets mode, warm-up and split of guidance.
        ways: names from `WAYS`.
        settings: numbers of repeats and warm-up rounds, and the seed.

    Raises:
        UsageError, RunError: as `build_stepper` does.
    """

    def __init__(
        self, model: ServedModel, options: ParallelOptions, ways: Sequence[str], settings: BenchSettings
    ) -> None:
        self.model, self.options, self.settings = model, options, settings
        self._threads = torch.get_num_threads()
        self._share = max(1, self._threads // options.count)
        self._stack = ExitStack()
        self._pool = RequestPool(model, settings.seed)
        self._plain = {form: PlainModels(model.denoiser, always=form) for form in PlainModels(model.denoiser).formats}
        self._reference = build_plain(model.pipe, model.family, self._plain["default"])
        self._alone = lone_rank_stepper(model, options)
        self._served: dict[str, tuple[ServedModel, RequestPool]] = {}
        try:
            for name in ways:
                engine = EngineOptions("parallel", parallel=replace(options, **WAYS[name]))
                served = self._stack.enter_context(closing(with_engine(model, engine)))
                self._served[name] = served, RequestPool(served, settings.seed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks."""
        self._stack.close()

    def check(self, resolution: Resolution) -> None:
        """Raise UsageError if a side cannot draw images of this resolution."""
        for pool in (self._pool, *(pool for _, pool in self._served.values())):
            pool.check(resolution)

    def measure(self, combination: Combination) -> Row:
        """Measure all sides and return the row."""
        requests = self._pool.take(combination)
        sides: dict[str, MeasuredSide] = {}
        for name, threads in ((_ONE, self._share), (_MACHINE, self._threads)):
            for form, models in self._plain.items():
                sides[f"{name}, {form}"] = MeasuredSide(plain_side(self.model, models, requests), threads)
        for name, (served, pool) in self._served.items():
            requests = pool.take(combination)
            sides[name] = MeasuredSide(StepperSide(served.stepper, requests), end=_process_end(served))
        # Requests prepared for any of the parallel steppers work here.
        sides[_ALONE] = MeasuredSide(StepperSide(self._alone, requests), self._share)
        lanes = {name: Lane(side, self.model.device) for name, side in sides.items()}
        time_lanes(lanes.values(), self.settings)
        # Both sides of one process use the memory format that is faster for them.
        for name in (_ONE, _MACHINE):
            forms = [key for key in lanes if key.startswith(f"{name}, ")]
            best = min(forms, key=lambda key: lanes[key].median_ms)
            lanes = {name: lanes[best]} | {key: lane for key, lane in lanes.items() if key not in forms}
        differences = self._differences(combination)
        found = {name: self._figures(lane, lanes) | differences.get(name, {}) for name, lane in lanes.items()}
        size = next(size for size, count in combination.by_resolution.items() if count)
        return {**combination.columns, "resolution": size, "sides": found, "repeats": self.settings.repeats}

    def _figures(self, lane: Lane, lanes: Mapping[str, Lane]) -> dict[str, Any]:
        """Return the figures of one side. Ratios are the times of one rank, the whole machine and sync to its time."""
        ratios = {
            name: Estimate.of_median(ratios_of(lanes[other].samples_ms, lane.samples_ms))
            for name, other in (("speedup", _ONE), ("over_machine", _MACHINE), ("over_sync", "sync"))
            if other in lanes
        }
        side = lane.side
        assert isinstance(side, MeasuredSide)
        return {
            "ms": lane.median_ms,
            **row_of(ratios),
            "waited_ms": statistics.median(side.waited_ms) if side.waited_ms else None,
        }

    def _differences(self, combination: Combination) -> dict[str, dict[str, float]]:
        return {
            name: {"difference": difference(self._reference, served.stepper, pool.take(combination))}
            for name, (served, pool) in self._served.items()
        }


def lone_rank_stepper(model: ServedModel, options: ParallelOptions) -> ParallelStepper:
    """Return the stepper of rank 0 in a group of `options.count` ranks, the others of which do not exist."""
    only = replace(options, mode="sync", cfg_split="off")
    plain = build_plain(model.pipe, model.family, PlainModels(model.denoiser))
    group = OneRank(model.denoiser, only)
    return ParallelStepper(group, only, plain.models, plain.conditions, plain.sampler, plain.alone)


def difference(one: Stepper, other: Stepper, requests: Sequence[PreparedRequest]) -> float:
    """Return the largest difference between the clean latents that two steppers predict for the first request after a
    few steps, relative to the largest value of `one`.
    """
    found = []
    for stepper in (one, other):
        side = StepperSide(stepper, requests)
        side.begin()
        for _ in range(_SETTLED):
            side.step()
        latents = stepper.peek(side.active[0])
        assert latents is not None
        found.append(latents)
    expected, drawn = found
    return float((drawn - expected).abs().max() / expected.abs().max())


def _process_end(served: ServedModel) -> ProcessEnd | None:
    assert isinstance(served.stepper, ParallelStepper)
    end = served.stepper.group.end
    return end if isinstance(end, ProcessEnd) else None


@contextmanager
def parallel_experiment(
    model: ServedModel,
    options: ParallelOptions,
    ways: Sequence[str],
    combinations: Sequence[Combination],
    settings: BenchSettings,
) -> Iterator[Experiment[Combination]]:
    """Yield the experiment whose cells are combinations; its ranks end with the context.

    Raises:
        UsageError, RunError: as `ParallelBench`, and if a resolution does not fit.
    """
    with closing(ParallelBench(model, options, ways, settings)) as bench:
        for resolution in combinations[0].resolutions:
            bench.check(resolution)
        facts = run_facts(model).to_json() | {
            "kind": RUN_KIND,
            "parallel": options.ranks,
            "gn": options.norms.mode,
            "text": options.text,
            "warmup": settings.warmup,
            "seed": settings.seed,
        }
        yield Experiment(
            RUN_KIND,
            "parallel",
            combinations,
            bench.measure,
            facts,
            lambda result: [parallel_table(result)],
            label=attrgetter("label"),
            unit="resolutions",
        )


def parallel_table(result: Mapping[str, Any]) -> Table:
    """Return the sides of every row as a table for display."""
    rows = [
        (
            row["resolution"],
            name,
            f"{side['ms']:.1f}",
            *_ratio_texts(side),
            _text(side["waited_ms"], ".1f"),
            _text(side.get("difference"), ".1e"),
        )
        for row in result["rows"]
        for name, side in row["sides"].items()
    ]
    columns = (
        "image",
        "side",
        "ms a step",
        "speed-up",
        "95 % interval",
        "of the machine",
        "of sync",
        "waited, ms",
        "difference",
    )
    note = (
        f"{result['parallel']} ranks. Speed-up: against one. Of the machine: against one process with all threads. "
        f"Difference: of the clean latents after {_SETTLED} steps, relative to the largest."
    )
    return Table("", columns, rows, num_words=2, note=note)


def _ratio_texts(side: Mapping[str, Any]) -> tuple[str, str, str, str]:
    low, high = side["intervals"].get("speedup") or (None, None)
    interval = DASH if low is None or high is None else f"{low:.2f} to {high:.2f}"
    texts = (_text(side.get(name), ".2f") for name in ("speedup", "over_machine", "over_sync"))
    speedup, machine, sync = texts
    return speedup, interval, machine, sync


def _text(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)
