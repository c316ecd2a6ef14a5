"""e(b) and T(b) of a model: the latency of batches, and the throughput of a worker in requests a second (DiffServe
section 3.3).

Batches run to completion and have one resolution, as on a cascade's workers, on the serving engine. Batches that arrive
at an idle worker give e(b). T(b) is measured in a closed loop: a new request arrives for every request that ends, so
that the next batch is prepared while one is drawn. Only the first steps of long requests are taken; the others are
assumed to last as long as their median.

On a CPU, the model is measured as workers run it: on one processor, with one thread.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ...data.edits import EditSpec
from ...data.errors import RunError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request, steps_taken
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...serving.cascade.policy import CascadePolicy
from ...serving.cascade.profile import LegProfile, SizeTimes
from ...serving.cascade.worker import WORKER_THREADS
from ...serving.engine.collectors import InMemory
from ...serving.engine.engine import Engine
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ...serving.simulator.stage_times import StageTimes

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
MAX_STEPS = 10
"""Maximum number of measured steps of a request; the others are assumed to last as long."""
_MAX_ALONE, _MAX_FOLLOWING, _MIN_FOLLOWING = 4, 12, 4
"""Measured batches of one request alone and in the loop, and the minimum in the loop. Larger batches are fewer."""
Score = Callable[[Image.Image], float]
"""Discriminator, which returns the confidence of an image."""
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of batches of one size and resolution.

    Attributes:
        latency_s, throughput: e(b) and T(b).
        prepare_s, step_s, postprocess_s: times of the stages while no other stage works; for a step of the batch, and
            for each request in the stages that take requests one by one.
    """

    latency_s: float
    throughput: float
    prepare_s: float
    step_s: float
    postprocess_s: float


def profile_leg(
    model: ServedModel,
    num_steps: int,
    resolutions: Sequence[Resolution],
    tables: Path,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    load_s: float = 0.0,
    score: Score | None = None,
    strength: float = 1.0,
    on_batch: Callable[[], None] = lambda: None,
) -> LegProfile:
    """Profile a model of a cascade.

    Args:
        model: model with the serving engine.
        num_steps: number of steps of every image.
        resolutions: resolutions that will be served.
        tables: folder of the workspace for the measurements of the engine at its start.
        batch_sizes: ascending batch sizes, from 1.
        load_s: seconds that loading the model took.
        score: discriminator of the light model; each image is scored as by a worker, before its record closes.
        strength: strength of the heavy model; below 1, images start from others, noised to this strength.
        on_batch: called after each batch size of each resolution.

    Raises:
        UsageError: the model cannot draw a resolution.
        RunError: a request fails.
        KeyboardInterrupt: on Ctrl-C.
    """
    for size in resolutions:
        model.check_resolution(size)
    sizes: dict[str, SizeTimes] = {}
    with _like_worker(model):
        model.tune(resolutions, tables)
        start_s = time.perf_counter()
        _batches(model, _example(model, max(resolutions, key=lambda size: size.pixels), _WARM_UP_STEPS), 1, 1, None)
        warm_up_s = time.perf_counter() - start_s
        for size in resolutions:
            found = []
            for count in batch_sizes:
                found.append(measure_batches(model, size, count, num_steps, score, strength))
                on_batch()
            sizes[str(size)] = SizeTimes(
                tuple(each.latency_s for each in found),
                tuple(each.throughput for each in found),
                tuple(each.step_s for each in found),
                found[0].prepare_s,
                found[0].postprocess_s,
            )
        return LegProfile(
            num_steps,
            model.defaults.guidance_scale,
            tuple(batch_sizes),
            sizes,
            _switch_s(model),
            load_s + warm_up_s,
            0.0 if score is None else _score_s(resolutions[-1], score),
            worker_facts(model),
            strength,
        )


def worker_facts(model: ServedModel) -> RunFacts:
    """Return the circumstances for which a profile of this model, taken on this machine, holds."""
    facts = run_facts(model)
    return replace(facts, threads=WORKER_THREADS) if model.device.type == "cpu" else facts


@contextmanager
def _like_worker(model: ServedModel) -> Iterator[None]:
    """Run the context as a worker does, on one processor, which threads inherit from the thread that starts them."""
    if model.device.type != "cpu":
        yield
        return
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(WORKER_THREADS)
    if cores is not None:
        os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def measure_batches(
    model: ServedModel,
    size: Resolution,
    count: int,
    num_steps: int,
    score: Score | None = None,
    strength: float = 1.0,
) -> BatchTimes:
    """Measure batches of `count` requests of one resolution, number of steps and strength. Raises as `profile_leg`."""
    wanted = steps_taken(num_steps, strength)
    example = _example(model, size, min(num_steps, math.ceil(MAX_STEPS / strength)), strength)
    taken = example.num_steps
    # The loop runs first, because its first batch, which is not counted, is also a warm-up.
    loop = _batches(model, example, count, max(_MIN_FOLLOWING, _MAX_FOLLOWING // count), score)
    alone = [_batches(model, example, count, 1, score) for _ in range(max(1, _MAX_ALONE // count))]
    ends = _ends(loop, count)
    # The last batch was prepared before it began, and no request arrived while it was drawn.
    step_s = statistics.median(row.duration_s for row in loop.steps if row.active == count and row.start_s >= ends[-2])
    rest_s = (wanted - taken) * step_s
    each_s = (ends[-2] - ends[0]) / (len(ends) - 2)
    latency_s = statistics.median(_ends(each, count)[0] for each in alone)
    stages = [StageTimes.measured(each.records) for each in alone]
    return BatchTimes(
        latency_s + rest_s,
        count / (each_s + rest_s),
        statistics.median(each.prepare_s[size] for each in stages),
        step_s,
        statistics.median(each.postprocess_s[size] for each in stages),
    )


def _ends(batches: InMemory, count: int) -> list[float]:
    """Return the times at which successive batches of `count` requests ended."""
    ended = sorted(record.finish_s or 0.0 for record in batches.records)
    return ended[count - 1 :: count]


def _example(model: ServedModel, size: Resolution, num_steps: int, strength: float = 1.0) -> Request:
    """Return a request; with a strength below 1 it starts from a gray image, which takes as long as any other."""
    edit = None
    if strength < 1:
        edit = EditSpec.of_whole_image(np.full((size.height, size.width, 3), 128, np.uint8), strength)
    return Request(0, "", size, num_steps, model.defaults.guidance_scale, edit=edit)


def _batches(model: ServedModel, example: Request, count: int, num_batches: int, score: Score | None) -> InMemory:
    """Serve batches in a closed loop: a request arrives for every one that ends, so that one batch always waits."""
    model.clear_cache()  # prompts of earlier batches come again
    collector = InMemory()
    prompts = list(islice(cycle(load_prompts(None)), count * num_batches))
    numbers = iter(range(len(prompts)))

    def submit_next() -> None:
        number = next(numbers, None)
        if number is None:
            engine.close()
            return
        engine.submit(
            replace(example, request_id=number, prompt=prompts[number], seed=number, arrival_s=engine.now_s())
        )

    engine = Engine(
        model,
        CascadePolicy(lambda resolution, batch: 0.0),
        max_batch_size=count,
        collector=collector,
        on_image=None if score is None else lambda request, image: score(image),
        on_finish=lambda record: submit_next() if record.status == "completed" else engine.close(),
    )
    engine.start()
    for _ in range(min(2, num_batches) * count):
        submit_next()
    if engine.run().was_interrupted:
        raise KeyboardInterrupt
    failed = [record for record in collector.records if record.status != "completed"]
    if failed:
        raise RunError(f"measuring {count} of {example.resolution} failed: {failed[0].reason}")
    return collector


def _switch_s(model: ServedModel) -> float:
    """Return the median seconds that a worker needs to switch to this model: one engine ends, and another starts."""
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        engine = Engine(model, CascadePolicy(lambda resolution, batch: 0.0))
        engine.start()
        engine.close()
        engine.run()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def _score_s(size: Resolution, score: Score) -> float:
    """Return the median seconds that scoring one image takes."""
    image, times_s = Image.new("RGB", size), []
    for _ in range(12):
        start_s = time.perf_counter()
        score(image)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])
