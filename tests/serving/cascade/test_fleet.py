"""Real worker processes draw the engine's images, switch models, die and restart."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.edits import EditSpec
from patchedserve.data.errors import RunError
from patchedserve.data.requests import Request, TracedEdit
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.allocators import Observations
from patchedserve.serving.cascade.backend import CascadeBackend
from patchedserve.serving.cascade.controller import Controller
from patchedserve.serving.cascade.dispatcher import Dispatcher
from patchedserve.serving.cascade.fleet import cascade_fleet
from patchedserve.serving.cascade.leg_model import LegModel
from patchedserve.serving.cascade.legs import LEGS, Leg
from patchedserve.serving.cascade.problem import AllocationPlan, ModelTimes
from patchedserve.serving.cascade.result import CascadeResult
from patchedserve.serving.cascade.worker import WorkerSettings, image_file, run_worker
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.engine import stages
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.fleet import processes, worker
from patchedserve.serving.fleet.messages import Alive, Begin, Draw, Ended, LimitBatchSize, Loaded, Stop
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.routers import FewestPixels
from patchedserve.serving.server.backend import Health
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.front_end import FrontEnd, Pricing
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import ModelFacts, parse_generation
from patchedserve.training.cascade.discriminator import Discriminator, DiscriminatorAbout, load_discriminator
from patchedserve.training.cascade.nets import new_net

from ...support.tiny_models import save_tiny, tiny_sdxl
from ...support.waits import until

SIZE = Resolution(64, 64)
STEPS: dict[Leg, int] = {"light": 2, "heavy": 6}
TIMES = ModelTimes((1, 2, 4), (5.0, 6.0, 7.0), {str(SIZE): (0.01, 0.01, 0.01)})
MODELS: dict[Leg, LegModel] = {leg: LegModel(steps, 3.0, TIMES) for leg, steps in STEPS.items()}
BOTH, LIGHT_ONLY = AllocationPlan(1, 1, 4, 2, 0.5, 0.5), AllocationPlan(2, 0, 4, 0, 0.0, 0.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    folder = tmp_path_factory.mktemp("cascade")
    model = str(save_tiny(folder / "model", tiny_sdxl(), num_inference_steps=4, guidance_scale=3.0, resolutions=["64"]))
    torch.manual_seed(0)
    about = DiscriminatorAbout("mbconv", "gt", {"model": "a"}, {"model": "b"}, temperature=0.02)
    Discriminator(new_net("mbconv"), about).save(folder / "discriminator.safetensors")
    names: dict[Leg, str] = {"light": model, "heavy": model}
    tables: dict[Leg, Path] = {"light": folder / "tables", "heavy": folder / "tables"}
    return WorkerSettings(
        names, MODELS, "cpu", "float32", folder / "discriminator.safetensors", tables, folder / "images"
    )


def trace(count: int, over_s: float) -> list[Request]:
    return [
        Request(number, f"a hat {number}", SIZE, 4, 3.0, seed=number, arrival_s=number * over_s / count, slo_s=60.0)
        for number in range(count)
    ]


def dispatcher(
    plans: list[AllocationPlan],
    models: Mapping[Leg, LegModel] = MODELS,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> Dispatcher:
    """Return a dispatcher with a plan per period, the last one from then on; a single worker serves light images."""
    made: list[AllocationPlan] = []

    def allocate(observed: Observations) -> AllocationPlan:
        if observed.num_workers == 1:
            return AllocationPlan(1, 0, 4, 0, 0.0, 0.0)
        made.append(plans[min(len(made), len(plans) - 1)])
        return made[-1]

    controller = Controller(allocate, [0.5])
    return Dispatcher(models, controller, FewestPixels(), lambda number: 0.0, "discard", "plan", on_end)


def served(template: WorkerSettings, num_workers: int, one: Dispatcher, requests: list[Request]) -> CascadeResult:
    cascade_fleet(template, num_workers, one).run(requests)
    return by_id(one.result)


def by_id(result: CascadeResult) -> CascadeResult:
    return replace(result, records=sorted(result.records, key=lambda record: record.request_id))


def median_threshold(template: WorkerSettings, requests: list[Request]) -> tuple[float, dict[int, float]]:
    """Return the median confidence of light images drawn in this process, and all confidences by request id."""
    images = drawn(template, requests, "light")
    judge = load_discriminator(template.discriminator)
    confidences = {number: judge.confidence(image) for number, image in images.items()}
    return float(np.median(list(confidences.values()))), confidences


def drawn(template: WorkerSettings, requests: list[Request], leg: Leg) -> dict[int, Image.Image]:
    """Return images that the engine draws in this process, one request at a time."""

    from patchedserve.serving.engine.collectors import InMemory

    model = load_model(template.names[leg], "cpu", "float32")
    model.tune([SIZE], template.tables[leg])
    collector = InMemory(keep_images=True)
    engine = Engine(model, get_policy("fcfs"), max_batch_size=1, collector=collector)
    for request in requests:
        engine.submit(replace(request, num_inference_steps=STEPS[leg], arrival_s=0.0, slo_s=None))
    engine.close()
    engine.run()
    return collector.images


def check(result: CascadeResult, requests: list[Request], confidences: dict[int, float]) -> None:
    assert [record.request_id for record in result.records] == [request.request_id for request in requests]
    assert {record.status for record in result.records} == {"completed"}
    for record in result.records:
        assert 0 < (record.finish_s or 0) - record.arrival_s < 60
        assert record.arrival_s == requests[record.request_id].arrival_s
    for row in result.legs:
        if row.confidence is not None:
            # Images of other batches may differ by one level.
            assert row.confidence == pytest.approx(confidences[row.request_id], abs=1e-3)
            assert row.is_deferred == (row.confidence < (row.threshold or 0.0))


def check_images(template: WorkerSettings, requests: list[Request], leg: Leg) -> None:
    """Check that images differ from the engine's by at most one level, as batches of another size round differently."""
    assert requests
    for number, image in drawn(template, requests, leg).items():
        with Image.open(image_file(template, number, leg)) as file:
            off = np.abs(np.asarray(file, dtype=int) - np.asarray(image, dtype=int))
        assert off.max() <= 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_workers_equal_the_engine_and_switch_models(template: WorkerSettings) -> None:
    requests = trace(36, 13.0)
    threshold, confidences = median_threshold(template, requests)
    plans = [AllocationPlan(1, 1, 4, 2, threshold, 0.5), LIGHT_ONLY, AllocationPlan(1, 1, 4, 2, threshold, 0.5)]
    fleet = cascade_fleet(template, 2, one := dispatcher(plans))
    parents: list[int] = []
    mapped: list[str] = []

    def look() -> None:
        pids = fleet.pids.values()
        parents.extend(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids)
        mapped.append(Path(f"/proc/{parents[0]}/maps").read_text())

    fleet.run(requests, look)
    result = by_id(one.result)
    assert len(parents) == 2
    assert len({*parents, os.getpid()}) == 2, "both are forked from one process, which is not this one"
    assert "libtorch" in mapped[0], "it has imported what they need"
    check(result, requests, confidences)
    assert result.num_switches >= 2
    served_by = result.served_by()
    served = list(served_by.values())
    assert served.count("heavy") > 3
    assert served.count("light") > 3
    assert one.num_open == 0
    for leg in LEGS:
        mine = [request for request in requests if served_by[request.request_id] == leg][:3]
        check_images(template, mine, leg)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_shared_worker_draws_light_and_heavy_images_in_one_batch(template: WorkerSettings) -> None:
    requests = [replace(request, arrival_s=0.0) for request in trace(16, 1.0)]
    threshold, _ = median_threshold(template, requests)
    plans = [AllocationPlan(1, 1, 4, 4, threshold, 0.5, is_shared=True)]
    sharing = dispatcher(plans, on_end=lambda record: fleet.post(ask_more))
    fleet, unasked = cascade_fleet(template, 1, sharing), deque(requests)

    def ask_more(now_s: float) -> None:
        # A few are open at once, however fast they are drawn.
        while unasked and sharing.num_open <= 2:
            sharing.arrive(unasked.popleft(), now_s)
        if not sharing.num_open:
            fleet.end()

    fleet.run(on_start=lambda: fleet.post(ask_more))
    result = by_id(sharing.result)
    # Confidences are of the written images: in mixed batches a value may differ by a level, and this discriminator is
    # sensitive to that.
    judge, confidences = load_discriminator(template.discriminator), dict[int, float]()
    for request in requests:
        with Image.open(image_file(template, request.request_id, "light")) as file:
            confidences[request.request_id] = judge.confidence(file.convert("RGB"))
    check(result, requests, confidences)
    served_by = result.served_by()
    assert min(Counter(served_by.values()).values()) >= 4
    assert result.num_switches == 0
    heavy, light = (
        [record for record in result.records if served_by[record.request_id] == leg] for leg in ("heavy", "light")
    )
    # Light images started while heavy ones were being drawn.
    assert any(
        (one.admitted_s or 0.0) < (other.admitted_s or 0.0) < (one.denoise_end_s or 0.0)
        for one in heavy
        for other in light
    )
    for leg in LEGS:
        mine = [request for request in requests if served_by[request.request_id] == leg][:3]
        check_images(template, mine, leg)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_heavy_images_start_from_light_ones(template: WorkerSettings) -> None:
    models: dict[Leg, LegModel] = {**MODELS, "heavy": replace(MODELS["heavy"], strength=0.5)}
    template = replace(template, models=models)
    requests = trace(8, 2.0)
    all_deferred = dispatcher([AllocationPlan(1, 1, 4, 2, 1.0, 1.0)], models)
    result = served(template, 2, all_deferred, requests)
    assert result.sides() == dict.fromkeys(range(8), "reused")
    edits = []
    for request in requests:
        with Image.open(image_file(template, request.request_id, "light")) as file:
            edits.append(replace(request, edit=EditSpec.of_whole_image(np.asarray(file), 0.5)))
    check_images(template, edits, "heavy")
    alone, again = (drawn(template, each[:1], "heavy")[0] for each in (requests, edits))
    assert np.abs(np.asarray(alone, dtype=int) - np.asarray(again, dtype=int)).max() > 10, "noise alone gives another"
    # A missing image file fails only its own request.
    lost = replace(requests[0], traced=TracedEdit("light", "all", 1.0, 0.5))
    image_file(template, 0, "light").unlink()
    told = served(template, 1, dispatcher([LIGHT_ONLY]), [lost, requests[1]])
    assert [record.status for record in told.records] == ["failed", "completed"]
    assert "the image file is missing" in (told.records[0].reason or "")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_worker_loses_no_request_and_restarts(template: WorkerSettings) -> None:
    requests = trace(60, 25.0)
    threshold, confidences = median_threshold(template, requests)
    notes: list[str] = []
    begun_s = time.monotonic()
    one = dispatcher([AllocationPlan(1, 1, 4, 2, threshold, 0.5)])
    fleet = cascade_fleet(template, 2, one, on_note=notes.append)

    def kill_later() -> None:
        # Starting a worker takes longer on a busy machine, and the trace must outlast a restart.
        requests[:] = trace(len(requests), 10 + 2.5 * (time.monotonic() - begun_s))

        def kill() -> None:
            # The worker is killed in the middle of its work, with some requests ended and others open.
            until(lambda: len(one.result.legs) >= 5 and bool(one.slots[0].assignments), 60)
            os.kill(fleet.pids[0], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()

    fleet.run(requests, kill_later)
    result = by_id(one.result)
    check(result, requests, confidences)
    assert result.num_lost == 1
    assert "its requests go to others" in notes[0]
    assert "Worker 0 serves again" in notes[-1]
    assert {row.observed.num_workers for row in result.plans} == {None, 1, 2}


def test_worker_with_a_hanging_step_sends_no_heartbeat(
    template: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, goes_on, step = threading.Event(), threading.Event(), PatchedStepper.step

    def waiting_step(self: PatchedStepper, batch: Any) -> Any:
        if any(prepared.request.prompt == "a cat" for prepared in batch):
            is_held.set()
            goes_on.wait(60)
        return step(self, batch)

    monkeypatch.setattr(PatchedStepper, "step", waiting_step)
    monkeypatch.setattr(worker, "ALIVE_EVERY_S", 0.05)
    ours, theirs = Pipe()
    settings = replace(template, threads=torch.get_num_threads())
    running = threading.Thread(target=run_worker, args=(settings, "light", theirs), daemon=True)
    running.start()
    assert ours.recv() == Loaded()
    for command in (Begin(time.perf_counter()), LimitBatchSize(1), Draw(Request(1, "a cat", SIZE, 2, 3.0))):
        ours.send(command)
    assert is_held.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "STALLED_S", 0.2)
        patch.setattr(stages, "STALLED_TIMES", 0.0)
        begun_s = time.monotonic()
        while ours.poll(2):
            assert isinstance(ours.recv(), Alive)
            assert time.monotonic() < begun_s + 60, "it says that it lives"
        goes_on.set()
        kinds: list[type] = []
        while Ended not in kinds or kinds[-1] is not Alive:
            kinds.append(type(ours.recv()))
    ours.send(Stop())
    running.join(60)
    assert not running.is_alive()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_hanging_workers_hold_no_places_and_restart(template: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    names: dict[Leg, str] = {"light": "light", "heavy": "heavy"}

    def make(on_end: Callable[[RequestRecord], None], result: CascadeResult) -> Dispatcher:
        controller = Controller(lambda observed: LIGHT_ONLY, [0.5])
        return Dispatcher(
            MODELS, controller, FewestPixels(), lambda number: 0.0, "discard", "plan", on_end=on_end, result=result
        )

    async def work() -> None:
        backend = CascadeBackend(template, 1, names, make, on_note=notes.append)
        await backend.start()
        facts = ModelFacts("tiny", ModelDefaults(STEPS["light"], 3.0, SIZE, (SIZE,)))
        limits = Limits(max_queue=3, request_timeout_s=2.0)
        front_end = FrontEnd(facts, limits, backend, Pricing(None, lambda _: None, lambda _: None))
        ask = parse_generation({"prompt": "a cat", "n": 3, "seed": 3}, facts, limits)
        try:
            stopped = backend.replicas[0].process_id
            os.kill(stopped, signal.SIGSTOP)
            while backend.health is not Health.STALLED:
                await asyncio.sleep(0.01)
            assert [each.health for each in backend.replicas] == [Health.STALLED]
            assert backend.trouble == "no worker has sent anything for 1 s"
            # The places of earlier requests are free, or these would be refused.
            for _ in range(2):
                ticket = await front_end.generate(ask, arrival_s=time.monotonic())
                with pytest.raises(ApiError, match="it took more than 2 s"):
                    await front_end.wait(ticket)
                await ticket.over.wait()
                assert (front_end.admission.num_images, front_end.open) == (0, {})
            while backend.health is not Health.RESTARTING:
                await asyncio.sleep(0.01)
            while not notes or "serves again" not in notes[-1]:
                await asyncio.sleep(0.05)
            assert (backend.health, backend.trouble) == (Health.READY, "")
            assert "has sent nothing for 5 s and is killed" in notes[0]
            assert backend.replicas[0].process_id != stopped
            limits = replace(limits, request_timeout_s=60.0)
            front_end.limits = limits
            ticket = await front_end.generate(ask, arrival_s=time.monotonic())
            await front_end.wait(ticket)
            assert ticket.status == "completed"
            goes_on = threading.Event()

            def hang(now_s: float) -> None:
                goes_on.wait(60)

            backend._fleet.post(hang)
            while backend.health is not Health.STALLED:
                await asyncio.sleep(0.01)
            assert backend.trouble == "the dispatcher has hung for 2 s"
            goes_on.set()
            while backend.health is not Health.READY:
                await asyncio.sleep(0.01)
        finally:
            await backend.stop()

    monkeypatch.setattr(processes, "STUCK_S", 2.0)
    monkeypatch.setattr(processes, "SILENT_S", 5.0)
    monkeypatch.setattr(processes, "STALLED_S", 1.0)
    asyncio.run(asyncio.wait_for(work(), 240))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_model_load_failures_give_a_one_line_error(template: WorkerSettings, tmp_path: Path) -> None:

    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    broken = replace(template, discriminator=tmp_path / "broken.safetensors")
    with pytest.raises(RunError, match=r"psctl-worker-0 cannot load its models: .*cannot be read as a discriminator"):
        served(broken, 1, dispatcher([LIGHT_ONLY]), trace(1, 1.0))
