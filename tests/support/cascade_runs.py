"""Random small cascades on the virtual clock, and the invariants of all of them."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.allocators import Cluster
from patchedserve.serving.cascade.controller import Controller
from patchedserve.serving.cascade.deferral import deferral_curve
from patchedserve.serving.cascade.dispatcher import Dispatcher
from patchedserve.serving.cascade.legs import Leg
from patchedserve.serving.cascade.problem import ModelTimes
from patchedserve.serving.cascade.result import CascadeResult
from patchedserve.serving.cascade.simulation import CascadeModel, simulate_cascade
from patchedserve.serving.cascade.systems import CASCADE_SYSTEMS, CascadeKnobs
from patchedserve.serving.scheduling.routers import FewestPixels, RandomWorker
from patchedserve.serving.simulator.stage_times import StageTimes
from patchedserve.serving.simulator.step_durations import ProfiledSteps, StepDurations

_SIZES = (Resolution(128, 128), Resolution(256, 256))


class _Steps:
    """Step latencies: the time of the largest image, and a fraction of its own time for each further one."""

    def __init__(self, seconds: dict[Resolution, float], part: float) -> None:
        self._seconds, self._part = seconds, part

    def step_latency_s(self, active: Sequence[Any]) -> float:
        own = [self._seconds[each] for each in active]
        return max(own) + self._part * (sum(own) - max(own))


def _model(chance: random.Random, sizes: Sequence[Resolution], num_steps: int, step_s: float) -> CascadeModel:
    batches = (1, 2, 4, 8)[: chance.randint(1, 4)]
    steps = _Steps({size: step_s * (1 + place) for place, size in enumerate(sizes)}, chance.uniform(0.2, 1.0))
    decode_s = chance.choice((0.0, 0.01, 0.2))
    latency_s = {
        str(size): tuple(num_steps * steps.step_latency_s([size] * count) + count * decode_s for count in batches)
        for size in sizes
    }
    throughput = tuple(
        count / (sum(numbers[place] for numbers in latency_s.values()) / len(sizes))
        for place, count in enumerate(batches)
    )
    return CascadeModel(
        num_steps,
        4.0,
        ModelTimes(batches, throughput, latency_s),
        StepDurations(ProfiledSteps(steps)),
        StageTimes(dict.fromkeys(sizes, 0.001), dict.fromkeys(sizes, decode_s)),
        chance.choice((0.0, 0.1, 3.0)),
    )


def random_run(seed: int) -> tuple[list[Request], CascadeResult]:
    """Run a random system with random models, load and confidences; the demand may rise tenfold at once."""
    chance = random.Random(seed)
    sizes = _SIZES[: chance.randint(1, 2)]
    step_s = chance.uniform(0.02, 0.1)
    system = CASCADE_SYSTEMS[chance.choice(list(CASCADE_SYSTEMS))]
    # If both models are the same, they differ in their steps only.
    heavy_seed = chance.random()
    light_seed = heavy_seed if system.is_shared else chance.random()
    slower = 1.0 if system.is_shared else chance.uniform(0.5, 2)
    models: dict[Leg, CascadeModel] = {
        "light": _model(random.Random(light_seed), sizes, chance.randint(1, 4), step_s),
        "heavy": _model(random.Random(heavy_seed), sizes, chance.randint(5, 30), step_s * slower),
    }
    light, heavy = models["light"].batches, models["heavy"].batches
    slos_s = {
        str(size): chance.uniform(1.0, 4.0) * (light.latency_s[str(size)][0] + heavy.latency_s[str(size)][0])
        for size in sizes
    }
    rate = chance.uniform(0.1, 3.0) / heavy.mean_latency_s(0)
    burst_from = chance.choice((math.inf, chance.randrange(20)))
    now_s, requests = 0.0, list[Request]()
    for number in range(chance.randint(1, 60)):
        now_s += chance.expovariate(rate * (10 if number >= burst_from else 1))
        size = chance.choice(sizes)
        fallback = "never" if chance.random() < 0.05 else "light"
        slo_s = slos_s[str(size)]
        requests.append(
            Request(number, "a cat", size, 20, 4.0, number, arrival_s=now_s, slo_s=slo_s, fallback=fallback)
        )
    profiled = [chance.betavariate(2, 2) for _ in range(chance.randint(1, 50))]
    confidences = [math.nan if chance.random() < 0.02 else chance.choice(profiled) for _ in requests]
    costs = {str(size): (1.0, 2.0)[place] / (1.5 if len(sizes) > 1 else 1) for place, size in enumerate(sizes)}
    has_costs = chance.random() < 0.3
    profiled_costs = [chance.choice(list(costs.values())) for _ in profiled] if has_costs else None
    num_workers = chance.randint(1, 6)
    quality = chance.choice(((), ((0.0, 30.0), (0.6, 20.0), (1.0, 22.0))))
    cluster = Cluster(num_workers, light, heavy, slos_s)
    allocator = system.allocator(
        cluster, deferral_curve(profiled, costs=profiled_costs), rate, CascadeKnobs("enumerate", quality=quality)
    )
    dispatcher = Dispatcher(
        models,
        Controller(allocator, profiled, costs=profiled_costs, demand=rate, burst=chance.choice((None, 1.5))),
        chance.choice((FewestPixels(), RandomWorker(seed))),
        direct=lambda number: (number * 0.618) % 1,
        on_late=chance.choice(("discard", "light")),
        batching=system.batching,
        skip_light=chance.random() < 0.3,
        costs=costs if has_costs else None,
    )
    return requests, simulate_cascade(requests, models, dispatcher, confidences.__getitem__, num_workers)


def check_run(requests: Sequence[Request], result: CascadeResult) -> None:
    """Raise AssertionError unless every request has ended once, a light image was deferred if and only if its
    confidence was below the threshold, and no worker had both models at once, unless it shares batches between them.
    """
    assert [record.request_id for record in result.records] == [request.request_id for request in requests]
    assert all(record.status in ("completed", "discarded") for record in result.records)
    completed = {record.request_id for record in result.records if record.status == "completed"}
    served_by = result.served_by()
    assert completed == set(served_by)
    assert not any(request.fallback == "never" and served_by.get(request.request_id) == "light" for request in requests)
    drawn = Counter((row.request_id, row.leg) for row in result.legs if row.status == "completed")
    assert all(drawn[number, leg] == 1 for number, leg in served_by.items())
    assert not drawn or max(drawn.values()) == 1
    by_worker: dict[int, list[tuple[float, float, Leg]]] = defaultdict(list)
    for row in result.legs:
        by_worker[row.worker].append((row.start_s, row.end_s, row.leg))
        if row.threshold is not None:
            assert row.leg == "light"
            assert row.confidence is not None
            # A NaN score is below every threshold except 0.
            assert row.is_deferred == (row.threshold > 0 and not row.confidence >= row.threshold)
        else:
            assert not row.is_deferred
    for rows in [] if result.plans[0].plan.is_shared else by_worker.values():
        busy_until_s = 0.0
        for one, other in pairwise(sorted(rows)):
            busy_until_s = max(busy_until_s, one[1])
            if one[2] != other[2]:
                assert other[0] >= busy_until_s
