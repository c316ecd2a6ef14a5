"""What a GPU is asked for in a step of each family and batch, counted on a fake device.

`FILE` is the committed table: family -> batch -> phase -> `COUNTED` -> number. The phases are a `step` of a batch that
stays the same; a `join`, what the step in which the last request of the batch joins asks beyond that; a `leave`, what
the step after the last request has left asks beyond a step of the others; a `replay`, a step whose pass has been
recorded, in bfloat16; and an `exchange`, what the step in which another request replaces the last asks beyond a replay.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.core.captured import Pause, Results
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.layout import packing
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.stepper import PatchedStepper

from .fake_device import Event, FakeDevice, fake_device
from .family_kit import BUILDS, Build, served
from .plain import short_texts

FILE = Path(__file__).parents[1] / "serving" / "patched" / "launches.json"
COUNTED = {"launch": "launches", "wait": "waits", "copy": "copies"}
"""Column of the table by kind of event."""
SEGMENT = Event("launch", "graph")
"""Launch of a recorded segment of a pass, between two of which work runs eagerly; column `segments` of a `replay`."""
BATCHES = {
    "one image": (Resolution(64, 64),),
    "four of one size": (Resolution(32, 32),) * 4,
    "three sizes": (Resolution(32, 32), Resolution(96, 32), Resolution(64, 64)),
}
_NUM_STEPS = 20
Counts = dict[str, dict[str, int]]
"""Numbers by phase and column."""


def requests_of(sizes: Sequence[Resolution]) -> list[Request]:
    """Return guided requests with different texts, of which none finishes while it is counted."""
    texts = ("a red apple", "a car in the rain, at night", "two birds", "")
    return [Request(index, texts[index], size, _NUM_STEPS, 3.5, seed=index) for index, size in enumerate(sizes)]


def events_of(build: Build, sizes: Sequence[Resolution]) -> dict[str, list[Event]]:
    """Return the events of each phase; those of a join and a leave include the step itself.

    `rest` is a step of the others after the last request has left. The model has served all of them before, but their
    batches are new to it.
    """
    with stepper_on_device(build) as (device, host, stepper):
        active = [on_device(device, host.prepare(request)) for request in requests_of(sizes)]
        others = active[:-1]

        def events(batch: list[PreparedRequest]) -> list[Event]:
            device.events.clear()
            failures = stepper.step(batch)
            assert not failures, failures
            return device.events.copy()

        for batch in (active, others):
            events(batch)
        packing._pack_rows.cache_clear()
        events(others)
        return {"join": events(active), "step": events(active), "leave": events(others), "rest": events(others)}


@contextmanager
def stepper_on_device(build: Build) -> Iterator[tuple[FakeDevice, ServedModel, PatchedStepper]]:
    """Yield a fake device, a model on the host that prepares requests, and the same model's stepper on the device."""
    pipe = build()
    texts = short_texts(pipe)
    host = served(pipe, **texts)
    with fake_device() as device:
        pipe = build()
        device.move(denoiser_of(pipe))
        try:
            options = EngineOptions(order="patch", strategy="stitch", cuda_graphs=False)
            yield device, host, patched_stepper(served(pipe, options, **texts))
        finally:
            # Its tensors are on this device.
            packing._pack_rows.cache_clear()


def on_device(device: FakeDevice, prepared: PreparedRequest) -> PreparedRequest:
    """Return a request that was prepared on the host as one prepared on the device."""
    return replace(
        prepared,
        latents=device.put(prepared.latents),
        conditioning={name: device.put(part) for name, part in prepared.conditioning.items()},
        state=replace(prepared.state, timesteps=device.put(prepared.state.timesteps)),
    )


def replay_events_of(build: Build, sizes: Sequence[Resolution]) -> dict[str, list[Event]]:
    """Return the events of a step whose pass is replayed, and of the step in which another request replaces the last.

    The other request has the same size, so that the batch has the same composition.
    """

    def halved() -> Any:
        return build().to(torch.bfloat16)

    with stepper_on_device(halved) as (device, host, stepper):
        stepper.model.use_graphs(SegmentRecorder(device), patience=1)
        requests = requests_of(sizes)
        requests.append(replace(requests[-1], request_id=len(requests), prompt="a hat", seed=9))
        *active, other = [on_device(device, host.prepare(request)) for request in requests]
        found: dict[str, list[Event]] = {}
        for phase in ("eager", "recorded", "replay", "exchange"):
            device.events.clear()
            failures = stepper.step([*active[:-1], other] if phase == "exchange" else active)
            assert not failures, failures
            assert stepper.recording_failure is None, stepper.recording_failure
            found[phase] = device.events.copy()
        return {phase: found[phase] for phase in ("replay", "exchange")}


class SegmentRecorder:
    """A recorder that counts what replaying asks of a fake device. Python runs again to compute the values.

    Raises AssertionError: a segment waits for the device or copies from the host, which a recording refuses.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._events = device.events

    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        result = self._run(work)

        def play() -> None:
            found = self._run(work)
            num_events = len(self._events)
            result.copy_(found)
            del self._events[num_events:]

        return play, result

    def _run(self, work: Callable[[Pause], Tensor]) -> Tensor:
        start = len(self._events)

        def end() -> None:
            others = [event for event in self._events[start:] if event.kind != "launch"]
            assert not others, f"a segment has {', '.join(map(str, others))}"
            self._events[start:] = [SEGMENT]

        def pause(run: Callable[..., Results], inputs: Sequence[Tensor]) -> Results:
            nonlocal start
            end()
            found = run(*inputs)
            start = len(self._events)
            return found

        found = work(pause)
        end()
        return found


def counts_of(events: dict[str, list[Event]]) -> Counts:
    """Return the numbers of each phase."""
    counted = {phase: Counter(event.kind for event in own) for phase, own in events.items()}
    none = Counter[str]()
    steady = {
        "step": none,
        "join": counted["step"],
        "leave": counted["rest"],
        "replay": none,
        "exchange": counted["replay"],
    }
    counts = {
        phase: {column: counted[phase][kind] - own[kind] for kind, column in COUNTED.items()}
        for phase, own in steady.items()
    }
    counts["replay"]["segments"] = events["replay"].count(SEGMENT)
    return counts


def batch_counts(family: str, batch: str) -> Counts:
    """Return the numbers of a family for a batch."""
    build, sizes = BUILDS[family], BATCHES[batch]
    return counts_of(events_of(build, sizes) | replay_events_of(build, sizes))


def read_table() -> dict[str, dict[str, Counts]]:
    """Return the committed table."""
    return json.loads(FILE.read_text())


def write_table(table: dict[str, dict[str, Counts]]) -> None:
    """Write the table to commit, with one line for each batch of a family."""
    families = []
    for family, batches in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in batches.items())
        families.append(f" {json.dumps(family)}: {{\n{lines}\n }}")
    FILE.write_text("{\n" + ",\n".join(families) + "\n}\n")
