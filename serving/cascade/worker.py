"""A worker process of a cascade, which holds both models and serves one of them, or both at once.

Each switch to the other model starts a new engine. Both models are served at once if they are one model with different
numbers of steps. Times count from the start of the trace, on the clock that all processes of a machine share.
"""

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...data.errors import PsctlError, RunError
from ...data.requests import Request
from ...data.resolution import Resolution, parse
from ..core.failures import MAX_FAILURES
from ..core.request_state import RequestRecord
from ..engine.collectors import Collector, InMemory
from ..fleet import messages
from ..fleet.worker import WorkerEnd
from .leg_model import LegModel, policy_for
from .legs import ENGINE, LEGS, Leg

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..engine.engine import Engine
    from ..engine.watch import Watch
    from ..models.served import ServedModel

WORKER_THREADS = 1
"""Number of torch threads in a worker on a CPU."""
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker.

    Attributes:
        names: names of both models, in the form that `load_model` accepts.
        models: steps and profiled times of both models.
        device, dtype: device and dtype of both models.
        discriminator: file of the discriminator that scores light images.
        tables: tables of both models in the workspace, for measurements that engines make at their start.
        image_dir: folder for images, which are named `ID-LEG.png`.
        reports_steps: whether the worker reports every step of every request.
        threads: number of torch threads.
        core: processor that the process is bound to; None for any.
    """

    names: Mapping[Leg, str]
    models: Mapping[Leg, LegModel]
    device: str
    dtype: str
    discriminator: Path
    tables: Mapping[Leg, Path]
    image_dir: Path
    reports_steps: bool = False
    threads: int = WORKER_THREADS
    core: int | None = None


def image_file(settings: WorkerSettings, request_id: int, leg: Leg) -> Path:
    """Return the path of the image that a model draws for a request."""
    return settings.image_dir / f"{request_id:06}-{leg}.png"


def run_worker(settings: WorkerSettings, leg: Leg | None, connection: Connection) -> None:
    """Entry point of the process: load the models, send `Loaded`, and serve until `Stop` arrives or the parent is gone.

    Args:
        settings: settings of the worker.
        leg: the model that it serves first; None for both at once.
        connection: connection to the parent.
    """
    if settings.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {settings.core})
    end = WorkerEnd(connection)
    try:
        worker = _WorkerProcess(settings, leg, end)
    except PsctlError as error:
        end.send(messages.Loaded(str(error)))
        return
    worker.serve()


class _WorkerProcess:
    """The engines of a worker, which run one after the other, and the thread that receives commands."""

    def __init__(self, settings: WorkerSettings, leg: Leg | None, end: WorkerEnd) -> None:
        import torch

        from ...training.cascade.discriminator import load_discriminator
        from ..models.loading import load_model

        torch.set_num_threads(settings.threads)
        self._settings, self._end = settings, end
        self._leg: Leg | None = leg
        self._models: dict[Leg, ServedModel] = {}
        for each in LEGS:
            if each == "heavy" and settings.names["heavy"] == settings.names["light"]:
                self._models[each] = self._models["light"]
                continue
            self._models[each] = load_model(settings.names[each], settings.device, settings.dtype, ENGINE)
            self._models[each].tune(self._sizes(each), settings.tables[each])
        self._discriminator = load_discriminator(settings.discriminator).to(self._models["light"].device)
        for each in LEGS:
            self._warm_up(each)
        # Guards the state that the listener and the engine's threads share.
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._offset_s = self._zero_s = 0.0
        self._next_leg: Leg | None = None
        self._is_stopped = False
        self._confidences: dict[int, float] = {}
        self._cancelled: set[int] = set()
        self._num_waiting, self._batch_size = 0, 1

    def _sizes(self, leg: Leg) -> list[Resolution]:
        return [parse(name) for name in self._settings.models[leg].batches.latency_s]

    def _warm_up(self, leg: Leg) -> None:
        """Draw an image of each size in a few steps and score it, so that the first request is as fast as the rest."""
        from ..engine.engine import Engine

        collector, settings = InMemory(), self._settings.models[leg]
        engine = Engine(
            self._models[leg],
            policy_for(leg, self._settings.models),
            collector=collector,
            on_image=lambda request, image: self._discriminator.confidence(image),
        )
        steps = min(_WARM_UP_STEPS, settings.num_steps)
        engine.start()
        for number, size in enumerate(self._sizes(leg)):
            engine.submit(Request(number, "", size, steps, settings.guidance_scale, seed=0))
        engine.close()
        engine.run()
        for record in collector.records:
            if record.status != "completed":
                raise RunError(f"warming up: {record.reason}")

    def serve(self) -> None:
        """Send `Loaded`, and serve until `Stop`."""
        threading.Thread(target=self._receive_commands, name="psctl-listen", daemon=True).start()
        self._end.send(messages.Loaded())
        threading.Thread(target=self._end.send_heartbeats, args=(self._beat,), name="psctl-live", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._zero_s or self._is_stopped)
        while not self._is_stopped:
            engine = self._new_engine()
            engine.run()
            if self._is_stopped:
                break
            with self._changed:
                assert self._next_leg is not None, "an engine ends when the worker is told to change or to stop"
                self._leg = self._next_leg
                self._next_leg = self._engine = None
                self._num_waiting = 0
            self._end.send(messages.Switched())
        for model in self._models.values():
            model.close()

    def _beat(self) -> messages.Alive | None:
        engine = self._engine
        # A stalled engine counts as dead, although this thread is alive.
        return None if engine is not None and engine.is_stalled else messages.Alive(self._num_waiting)

    def _new_engine(self) -> "Engine":
        from ..engine.engine import Engine

        engine = Engine(
            self._models[self._leg or "light"],
            policy_for(self._leg, self._settings.models),
            max_batch_size=self._batch_size,
            collector=_EndReporter(self),
            image_path=lambda request: image_file(self._settings, request.request_id, self._leg_of(request)),
            on_image=None if self._leg == "heavy" else self._score,
            on_step=lambda row: self._note_waiting(row.waiting),
            max_failures=MAX_FAILURES,
        )
        engine.start()
        self._cancelled.clear()
        with self._changed:
            self._offset_s = time.perf_counter() - self._zero_s - engine.now_s()
            self._engine = engine
            if self._is_stopped:  # `Stop` arrived before there was an engine to abort
                engine.abort()
            self._changed.notify_all()
        return engine

    def _receive_commands(self) -> None:
        while True:
            command = self._end.receive()
            with self._changed:
                match command:
                    case messages.Begin(zero_s):
                        self._zero_s = zero_s
                    case messages.LimitBatchSize(batch_size):
                        # The first limit arrives before there is an engine.
                        self._batch_size = batch_size
                    case messages.Draw() | messages.SwitchModel():
                        self._changed.wait_for(lambda: self._engine is not None or self._is_stopped)
                    case messages.Stop():
                        self._is_stopped = True
                self._changed.notify_all()
                engine = self._engine
            if engine is not None:
                self._execute(command, engine)
            if self._is_stopped:
                return

    def _execute(self, command: messages.Command, engine: "Engine") -> None:
        match command:
            case messages.Draw(request):
                self._draw(engine, request)
            case messages.Cancel(request_id, reason):
                self._cancelled.add(request_id)
                engine.cancel(request_id, reason)
            case messages.LimitBatchSize(batch_size):
                engine.max_batch_size = batch_size
            case messages.SwitchModel(model):
                with self._changed:
                    self._next_leg = cast(Leg, model)
                waiting = [request.request_id for request in engine.withdraw_waiting()]
                self._end.send(messages.Returned(waiting))
                engine.close()
            case messages.Stop():
                engine.abort()

    def _draw(self, engine: "Engine", request: Request) -> None:
        arrival_s = max(0.0, request.arrival_s - self._offset_s)
        slo_s = None
        if request.deadline_s is not None:
            slo_s = max(request.deadline_s - self._offset_s - arrival_s, 1e-9)
        try:
            own = self._from_light(request) if request.traced is not None else request
            engine.submit(replace(own, arrival_s=arrival_s, slo_s=slo_s), watch=self._watch(request))
        except PsctlError as error:
            record = RequestRecord.of(request)
            record.close("failed", time.perf_counter() - self._zero_s, str(error))
            self._end.send(messages.Ended(record))

    def _from_light(self, request: Request) -> Request:
        """Return the request as an edit of its light image, which a worker on this machine has written.

        Raises UsageError: the image cannot be read.
        """
        from ...data.datasets.decode import read_content
        from ...data.edits import EditSpec, read_image

        assert request.traced is not None
        file = image_file(self._settings, request.request_id, "light")
        image = read_image(read_content(file), file.name)
        return replace(request, traced=None, edit=EditSpec.of_whole_image(image, request.traced.strength))

    def _watch(self, request: Request) -> "Watch | None":
        if not self._settings.reports_steps:
            return None
        from ..engine.watch import Watch

        number = request.request_id
        return Watch(on_step=lambda steps_done: self._end.send(messages.Stepped(number, steps_done)), may_lag=True)

    def _score(self, request: Request, image: "Image") -> None:
        """Score a light image, in the postprocess thread before its record closes.

        If scoring fails, the confidence is NaN, so that the request is deferred.
        """
        if self._leg_of(request) == "heavy":
            return
        try:
            confidence = self._discriminator.confidence(image)
        except Exception:  # noqa: BLE001  a failed score must not cost the image
            confidence = math.nan
        self._confidences[request.request_id] = confidence

    def _leg_of(self, request: "Request | RequestRecord") -> Leg:
        """Return the model that draws a request; if both are served, the number of steps identifies it."""
        light = self._settings.models["light"].num_steps
        return self._leg or ("light" if request.num_inference_steps == light else "heavy")

    def _note_waiting(self, count: int) -> None:
        if count != self._num_waiting:
            self._num_waiting = count
            self._end.send(messages.Alive(count))

    def report_ended(self, record: RequestRecord) -> None:
        """Send the record of a request that has ended; delete the image if the request was cancelled."""
        if record.request_id in self._cancelled:
            self._cancelled.discard(record.request_id)
            image_file(self._settings, record.request_id, self._leg_of(record)).unlink(missing_ok=True)
        own = record.shifted(self._offset_s)
        own.confidence = self._confidences.pop(record.request_id, None)
        self._end.send(messages.Ended(own))


class _EndReporter(Collector):
    """Sends final records to the parent."""

    def __init__(self, worker: _WorkerProcess) -> None:
        self._worker = worker

    def on_finish(self, record: RequestRecord, image: Any, latents: Any) -> None:
        self._worker.report_ended(record)
