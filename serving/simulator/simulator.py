"""The simulator: the engine's stages and the same policy objects on a virtual clock, on any number of GPUs.

Every GPU has its own three stages under a `Scheduler`, as in an `Engine`. Several GPUs serve in data parallel: on
arrival, a router sends a request to one GPU, where it stays. The default router chooses the GPU with the fewest
pixel-steps (pixels times remaining steps) of requests that were sent there and have not left the denoise stage
(PatchedServe section 8.1), and the first of equal GPUs. The same arguments always give the same result.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop

from ...data.checks import require_counts
from ...data.errors import UsageError
from ...data.requests import Request
from ...training.cache.schedule import CacheSchedule
from ..core.request_state import RequestRecord, RequestView
from ..core.step_row import StepRow
from ..editing.costs import EditCosts
from ..scheduling.policies import LearningPredictor, Policy, StepLatencyPredictor
from ..scheduling.routers import DEFAULT_ROUTER, make_router
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_latency import MemoisedLatency
from .distrifusion import DistriFusionLatency, Speedups
from .stage_times import StageTimes
from .step_durations import ProfiledSteps, StepDurations
from .worker import SimulatedWorker, SimulationClock


@dataclass(slots=True)
class SimulationResult:
    """Result of a simulation.

    Attributes:
        records: one record per request, by id, all in a final status.
        duration_s: seconds from 0 until the last request ended, on the virtual clock.
        steps: one row per denoising iteration of the first GPU, if `keep_steps` was set.
        gpu_of: GPU of each request, by id; 0 for all requests if each runs on all GPUs.
        busy_s: seconds of denoising on each GPU.
        num_steps: number of denoising iterations on all GPUs.
        max_prepared: largest number of prepared requests on one GPU at the same time, before decoding.
        num_decisions: number of decisions of the policy.
        decision_s: total seconds of these decisions on the real clock, the only field that differs between equal runs.
        num_keys, num_recordings, num_replays: different keys of passes, recorded passes and replayed passes of all
            GPUs, as in `RecordedPasses`; 0 if launching is not modelled.
    """

    records: list[RequestRecord]
    duration_s: float
    steps: list[StepRow]
    gpu_of: dict[int, int]
    busy_s: list[float]
    num_steps: int
    max_prepared: int
    num_decisions: int
    decision_s: float = field(compare=False)
    num_keys: int = 0
    num_recordings: int = 0
    num_replays: int = 0


def simulate(
    requests: Sequence[Request],
    policy: Policy,
    predictor: StepLatencyPredictor,
    *,
    max_batch_size: int = 16,
    num_gpus: int = 1,
    speedups: Speedups | None = None,
    times: StageTimes | None = None,
    durations: StepDurations | None = None,
    max_prepared_ahead: int | None = None,
    router: str = DEFAULT_ROUTER,
    edits: EditCosts | None = None,
    schedule: CacheSchedule | None = None,
    standalone_s: Callable[[Request], float | None] | None = None,
    keep_steps: bool = False,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> SimulationResult:
    """Serve a trace on the virtual clock.

    Args:
        requests: the trace, in order of arrival, with unique ids.
        policy, max_batch_size, max_prepared_ahead: as for `Scheduler`, on each GPU.
        predictor: predicts the seconds of one step of a batch on one GPU, for policies. It must not change during the
            simulation, unless it learns (`LearningPredictor`): then it receives every step, as in `Engine`.
        num_gpus: number of GPUs, all alike.
        speedups: speed-ups of all GPUs that draw one request together, as in DistriFusion; the policy must then run one
            request at a time. None: each GPU serves its own requests.
        times: seconds of the other stages; None if they take no time.
        router: name of the router (`scheduling.routers`).
        edits: edits of the trace that are computed in part, and their records; None: none.
        schedule: steps of requests that are computed; None: all.
        durations: actual durations of steps, if they differ from the predictions.
        standalone_s: returns the latency of a request when served alone, for policies that use it.
        keep_steps: whether the result holds the steps of the first GPU.
        on_finish: called with each record when it becomes final.

    Raises:
        UsageError: the trace is empty or repeats an id, a number is below 1, or the router is unknown.
        ValueError: the trace is not in order of arrival, or the predictor returns a number that is not positive.
    """
    if not requests:
        raise UsageError("the trace is empty, but it must hold at least one request")
    require_counts({"number of GPUs": num_gpus})
    # A learning predictor changes, so its predictions are not memoised.
    latency = predictor if isinstance(predictor, LearningPredictor) else MemoisedLatency(predictor)
    durations = durations or StepDurations(ProfiledSteps(latency))
    num_workers = num_gpus
    if speedups is not None:
        latency, num_workers = MemoisedLatency(DistriFusionLatency(predictor, num_gpus, speedups)), 1
        spanning = DistriFusionLatency(durations.steps.policy_latency, num_gpus, speedups)
        durations = replace(durations, steps=ProfiledSteps(spanning))
    clock = SimulationClock(on_finish)
    workers = [
        SimulatedWorker(
            index,
            clock,
            Scheduler(
                policy,
                latency,
                max_batch_size=max_batch_size,
                max_prepared_ahead=max_prepared_ahead,
                on_decision=clock.note_decision,
            ),
            durations,
            times or StageTimes(),
            edits=edits,
            keep_steps=keep_steps and index == 0,
        )
        for index in range(num_workers)
    ]
    routes = make_router(router, latency)
    gpu_of: dict[int, int] = {}
    events = clock.events
    place, last_s = 0, 0.0
    while place < len(requests) or events:
        now_s = requests[place].arrival_s if place < len(requests) else events[0][0]
        if events and events[0][0] < now_s:
            now_s = events[0][0]
        touched: set[int] = set()
        while place < len(requests) and requests[place].arrival_s <= now_s:
            request = requests[place]
            if request.arrival_s < last_s:
                raise ValueError(f"request {request.request_id} arrives before the one before it")
            if request.request_id in gpu_of:
                raise UsageError(f"request id {request.request_id} is used twice")
            last_s = request.arrival_s
            alone_s = None if standalone_s is None else standalone_s(request)
            share = 1.0 if edits is None else edits.share_of(request)
            num_computed = None if schedule is None else schedule.num_computed(request)
            view = RequestView.of(request, alone_s, share, num_computed)
            worker = workers[routes.choose(view, workers)]
            gpu_of[request.request_id] = worker.index
            worker.arrive(request, view, now_s)
            touched.add(worker.index)
            place += 1
        while events and events[0][0] <= now_s:
            _, what, index, number = heappop(events)
            if workers[index].handle_event(what, number, now_s):
                touched.add(index)
        for index in sorted(touched):
            workers[index].proceed(now_s)
    passes = [worker.passes for worker in workers if worker.passes is not None]
    return SimulationResult(
        records=sorted(clock.records, key=lambda record: record.request_id),
        duration_s=max(record.finish_s or 0.0 for record in clock.records),
        steps=workers[0].rows,
        gpu_of=gpu_of,
        busy_s=[worker.busy_s for worker in workers],
        num_steps=sum(worker.scheduler.num_steps for worker in workers),
        max_prepared=max(worker.scheduler.max_prepared for worker in workers),
        num_decisions=clock.num_decisions,
        decision_s=clock.decision_s,
        num_keys=len(set[Hashable]().union(*(each.keys for each in passes))),
        num_recordings=sum(each.num_recordings for each in passes),
        num_replays=sum(each.num_replays for each in passes),
    )
