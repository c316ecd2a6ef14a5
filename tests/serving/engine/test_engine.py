"""The engine: stages, failures, drops, Ctrl-C, threads. Whether the images are right is in test_engine_exact."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.policy import CascadePolicy
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.engine.stages import StageThread
from patchedserve.serving.engine.watch import Watch
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.plain.stepper import group_by_resolution
from patchedserve.serving.scheduling.policies import Decision, get_policy
from patchedserve.serving.scheduling.policies.slack import TOO_LATE
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.simulator.simulator import simulate

from ...support.function_policy import FunctionPolicy
from ...support.tiny_models import largest_error, plain_latents, tiny_sd3, tiny_sdxl

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_sdxl()


@pytest.fixture
def model(pipe: Any) -> ServedModel:
    return build_model(pipe, name="tiny")


def requests_of(count: int, steps: int = 3) -> list[Request]:
    return [Request(i, f"prompt {i}", (SMALL, LARGE)[i % 2], steps, seed=i) for i in range(count)]


def serve(model: ServedModel, requests: Sequence[Request], policy: Any = None, **options: Any) -> RunResult:
    engine = Engine(model, policy or get_policy("continuous"), **options)
    for request in requests:
        engine.submit(request)
    engine.close()
    return engine.run()


@pytest.mark.slow
def test_records_tell_the_story_in_order(model: ServedModel, tmp_path: Path) -> None:
    finished: list[int] = []
    result = serve(
        model,
        requests_of(4),
        image_path=lambda request: tmp_path / "images" / f"{request.request_id}.png",
        on_finish=lambda record: finished.append(record.request_id),
    )
    assert sorted(finished) == [0, 1, 2, 3]
    assert not result.was_interrupted
    for record in result.records:
        assert record.status == "completed"
        times = (
            record.arrival_s,
            record.prepare_start_s,
            record.prepare_end_s,
            record.admitted_s,
            record.denoise_end_s,
            record.finish_s,
        )
        assert all(time_s is not None for time_s in times)
        assert list(times) == sorted(times)  # type: ignore[type-var]
        assert record.image_path is not None
        assert Image.open(record.image_path).size == record.resolution
    assert result.duration_s == max(record.finish_s or 0 for record in result.records)
    assert [file.name for file in sorted((tmp_path / "images").iterdir())] == ["0.png", "1.png", "2.png", "3.png"]


def test_steps_count_every_request_step(model: ServedModel) -> None:
    requests = [Request(0, "a", SMALL, 5), Request(1, "b", LARGE, 2), Request(2, "c", SMALL, 3)]
    result = serve(model, requests)
    assert [row.step for row in result.steps] == list(range(len(result.steps)))
    assert sum(row.active for row in result.steps) == 5 + 2 + 3
    assert sum(row.resolutions.get("32x32", 0) for row in result.steps) == 5 + 3
    assert sum(row.resolutions.get("64x32", 0) for row in result.steps) == 2
    assert all(after.start_s >= row.start_s + row.duration_s for row, after in pairwise(result.steps))


def test_requests_may_come_while_it_runs(model: ServedModel) -> None:
    engine = Engine(model, get_policy("continuous"))
    engine.submit(Request(0, "first", SMALL, 3))

    def submit_later() -> None:
        time.sleep(0.3)
        engine.submit(Request(1, "second", SMALL, 3, arrival_s=0.3))
        engine.close()

    thread = threading.Thread(target=submit_later)
    thread.start()
    cpu_before = time.thread_time()
    result = engine.run()
    thread.join()
    assert [record.status for record in result.records] == ["completed", "completed"]
    idle_s = (result.records[1].prepare_start_s or 0) - (result.records[0].finish_s or 0)
    # The loop sleeps while it has nothing to do: it may not have used the processor all the time.
    assert time.thread_time() - cpu_before < result.duration_s - idle_s / 2


def _fail_to_step(*_: Any, **__: Any) -> None:
    raise IndexError("step failed")


class _FailingModel(ServedModel):
    """The real model, but requests whose prompt says so fail in the stage that it names."""

    def prepare(self, request: Request) -> PreparedRequest:
        if request.prompt == "fail in prepare":
            raise RuntimeError("no words for it\nsecond line")
        prepared = super().prepare(request)
        if request.prompt == "not finite":
            prepared.latents = prepared.latents * float("nan")
        if request.prompt == "fail in forward":
            prepared.conditioning["text"] = prepared.conditioning["text"][..., :5]
        if request.prompt == "fail in step":
            prepared.state.scheduler.step = _fail_to_step  # the request's own copy
            prepared.state.coefficients = None  # of which there are none where the batched sampler does not know it
        return prepared

    def decode(self, latents: torch.Tensor) -> Any:
        if latents.shape[-1] == 12:
            raise RuntimeError("decode failed")
        return super().decode(latents)


@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_one_failing_request_takes_down_no_other(pipe: Any, engine: Any) -> None:
    good = [Request(i, f"good {i}", SMALL, 4, seed=i) for i in range(2)]
    bad = {
        10: ("fail in prepare", SMALL, "preparing: RuntimeError: no words for it"),
        11: ("not finite", SMALL, "denoising: latents are not finite"),
        12: ("fail in forward", SMALL, "denoising: RuntimeError: "),
        14: ("decode", Resolution(96, 32), "postprocessing: RuntimeError: decode failed"),
    }
    if engine == "plain":  # only there is a request advanced by itself, where its scheduler asks for it
        bad[13] = ("fail in step", SMALL, "denoising: IndexError: step failed")
    requests = [*good, *(Request(i, prompt, size, 3) for i, (prompt, size, _) in bad.items())]
    made = build_model(pipe, name="tiny", options=EngineOptions(engine=engine))
    about: dict[str, Any] = {name: getattr(made, name) for name in ("name", "fingerprint", "defaults", "options")}
    failing = _FailingModel(pipe, made.family, made.stepper, **about)
    result = serve(failing, requests, collector=InMemory(keep_latents=True))
    assert sorted(result.latents) == [0, 1]
    found = [result.latents[request.request_id][0] for request in good]
    assert largest_error(found, [plain_latents(pipe, request) for request in good]) < 1e-3
    for record in result.records:
        if record.request_id in bad:
            assert record.status == "failed"
            assert (record.reason or "").startswith(bad[record.request_id][2])
            assert "\n" not in (record.reason or "")
        else:
            assert record.status == "completed"


def test_image_that_cannot_be_saved_fails_alone(model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folders = {0: tmp_path / "file" / "0.png", 1: tmp_path / "1.png"}
    result = serve(model, requests_of(2), image_path=lambda request: folders[request.request_id])
    assert [record.status for record in result.records] == ["failed", "completed"]
    assert result.records[0].image_path is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.png", "file"]


def _drop_odd(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
    return Decision(
        admit=tuple(view.request_id for view in waiting if view.request_id % 2 == 0),
        drop=tuple((view.request_id, "odd") for view in waiting if view.request_id % 2),
    )


def test_policy_may_drop(model: ServedModel) -> None:
    result = serve(model, requests_of(5), FunctionPolicy(_drop_odd))
    assert [record.status for record in result.records] == ["completed", "discarded"] * 2 + ["completed"]
    assert result.records[1].reason == "odd"


def test_a_policy_may_wait_for_the_decoder(model: ServedModel) -> None:
    engine = Engine(model, CascadePolicy(lambda resolution, count: 0.0), max_batch_size=2, collector=InMemory())
    for request in requests_of(6):
        engine.submit(request)
    engine.close()
    results = list[RunResult]()
    # The end of an image must wake the loop: without that it would sleep for ever.
    thread = threading.Thread(target=lambda: results.append(engine.run()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "the engine still waits"
    # Ends of images of one batch, and when the next one began.
    records = sorted(results[0].records, key=lambda record: record.admitted_s or 0.0)
    assert [record.status for record in records] == ["completed"] * 6
    for earlier, later in pairwise(records[place : place + 2] for place in (0, 2, 4)):
        assert max(record.finish_s or 0.0 for record in earlier) <= min(record.admitted_s or 0.0 for record in later)


class _Learning:
    """Real step times, so that it can be seen what the engine tells a predictor."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Resolution, ...], float]] = []

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 1e-4 * len(active)

    def observe(self, active: Sequence[Any], measured_s: float) -> None:
        self.seen.append((tuple(active), measured_s))


def test_slack_asks_the_predictor_and_teaches_it(model: ServedModel) -> None:
    with pytest.raises(UsageError, match="policy slack looks ahead and needs step latencies"):
        Engine(model, get_policy("slack"))
    predictor = _Learning()
    requests = [replace(request, slo_s=(1e-6, 600.0)[i > 1]) for i, request in enumerate(requests_of(6))]
    result = serve(model, requests, get_policy("slack"), predictor=predictor)
    assert [record.status for record in result.records] == ["discarded"] * 2 + ["completed"] * 4
    assert {record.reason for record in result.records[:2]} == {TOO_LATE}
    assert [measured_s for _, measured_s in predictor.seen] == [row.duration_s for row in result.steps]
    assert [Counter(map(str, active)) for active, _ in predictor.seen] == [row.resolutions for row in result.steps]
    # What decisions cost is written down: each one, and with the step that it came before.
    assert len(result.decision_times_s) >= 1
    assert all(0 < time_s < 0.1 for time_s in result.decision_times_s)
    assert sum(row.schedule_s for row in result.steps) == pytest.approx(sum(result.decision_times_s))


def test_nirvana_draws_with_fewer_steps(model: ServedModel) -> None:
    nirvana = get_system("nirvana")
    requests = [nirvana.adapt(Request(0, "a", SMALL, 10, seed=3))]
    result = serve(model, requests, get_policy(nirvana.policy), collector=InMemory(keep_latents=True))
    assert (result.records[0].num_inference_steps, len(result.steps)) == (8, 8)
    expected = plain_latents(model.pipe, Request(0, "a", SMALL, 8, seed=3))
    assert largest_error([result.latents[0][0]], [expected]) < 1e-3


def test_what_is_checked_is_what_is_served() -> None:
    """The engine changes no request, so the model checks the steps that it is going to take."""
    from diffusers import DDIMScheduler

    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    nirvana = get_system("nirvana")
    engine = Engine(build_model(pipe, name="ddim"), get_policy(nirvana.policy))
    asked = Request(0, "a", SMALL, 1200)  # 948 with nirvana's share; DDIM takes at most 1000
    with pytest.raises(UsageError, match="cannot take 1200 steps"):
        engine.submit(asked)
    engine.submit(nirvana.adapt(asked))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continuous", "static", "edf"])
def test_few_are_prepared_however_many_wait(model: ServedModel, policy: str) -> None:
    # Far more than can be served: 2 places, 30 requests at once.
    # Deadlines lie apart by more than it may take to submit the next one.
    requests = [replace(request, slo_s=20.0 * (30 - i)) for i, request in enumerate(requests_of(30, steps=2))]
    result = serve(model, requests, get_policy(policy), max_batch_size=2, max_prepared_ahead=3)
    assert {record.status for record in result.records} == {"completed"}
    assert max(row.waiting for row in result.steps) >= 26
    assert result.max_prepared <= 2 + 3
    if policy == "edf":  # the last to come, which is far from prepared when it is admitted, leads
        # On a busy machine both of the first two are prepared before either is admitted, and are admitted together.
        admitted = sorted(result.records, key=lambda record: (record.admitted_s or 0.0, -record.request_id))
        assert [record.request_id for record in admitted][:2] == [29, 28]
    # A static batch takes its first step together, also where only one of it was prepared ahead.
    if policy == "static":
        assert [row.active for row in result.steps] == [2] * 28 + [1, 1, 1, 1]


def test_discarded_before_it_is_prepared_is_never_encoded(model: ServedModel) -> None:
    result = serve(model, requests_of(12, steps=1), FunctionPolicy(_drop_odd), max_batch_size=16, max_prepared_ahead=1)
    odd = [record for record in result.records if record.request_id % 2]
    assert {record.status for record in odd} == {"discarded"}
    # All but the one that was being encoded when the policy was asked.
    assert sum(record.prepare_start_s is not None for record in odd) <= 1


@pytest.mark.slow
def test_the_simulator_admits_in_the_engines_order(model: ServedModel) -> None:
    # All arrive at once or within the first step, so that the order is the policies' and not the clock's.
    requests = requests_of(9, steps=3)
    for name in ("fcfs", "static", "continuous"):
        real = serve(model, requests, get_policy(name), max_batch_size=3).records
        simulated = simulate(requests, get_policy(name), _Learning(), max_batch_size=3).records
        orders = [
            [record.request_id for record in sorted(records, key=lambda record: (record.admitted_s, record.request_id))]
            for records in (real, simulated)
        ]
        assert orders[0] == orders[1], name
        assert [record.num_inference_steps for record in real] == [record.num_inference_steps for record in simulated]


def test_a_faulty_policy_ends_the_run_with_its_error(model: ServedModel) -> None:
    faulty = FunctionPolicy(lambda now_s, waiting, active: Decision(admit=(99,)))
    with pytest.raises(RuntimeError, match="99"):
        serve(model, requests_of(2), faulty)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-")]


def test_a_model_that_prepares_nothing_ends_the_run(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def step(batch: Sequence[PreparedRequest]) -> dict[int, str]:
        steps.append(len(batch))
        if len(steps) == 10:
            raise RuntimeError("the engine takes steps of nothing for ever")
        return {}

    monkeypatch.setattr(model, "prepare", lambda request: None)
    monkeypatch.setattr(model.stepper, "step", step)
    with pytest.raises(AssertionError, match="the model has prepared nothing"):
        serve(model, requests_of(1))
    assert steps == []


def test_a_faulty_callback_ends_nothing(model: ServedModel, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError("callback")

    engine = Engine(model, get_policy("continuous"), on_finish=fail, on_step=fail)
    for request in requests_of(3):
        engine.submit(request, watch=Watch(num_partials=1, on_step=fail, on_partial=fail))
    engine.close()
    result = engine.run()
    assert [record.status for record in result.records] == ["completed"] * 3
    # Every step and every end, and what the watches were told: each step and a partial image of three requests.
    assert engine.callback_failures.count == len(result.steps) + 3 + 3 * (3 + 1)
    assert engine.callback_failures.first == "callback: ZeroDivisionError: callback"
    assert capfd.readouterr().err.count("Traceback") == 1


def test_interrupt_keeps_what_is_finished(model: ServedModel, tmp_path: Path) -> None:
    # Ctrl-C while the second request denoises: the first has its image, the second and third are cancelled.
    engine = Engine(
        model,
        get_policy("fcfs"),
        image_path=lambda request: tmp_path / f"{request.request_id}.png",
        on_finish=lambda record: os.kill(os.getpid(), signal.SIGINT) if record.request_id == 0 else None,
    )
    for request in (Request(0, "a", SMALL, 2), Request(1, "b", SMALL, 900), Request(2, "c", SMALL, 2)):
        engine.submit(request)
    engine.close()
    result = engine.run()
    assert result.was_interrupted
    assert [record.status for record in result.records] == ["completed", "cancelled", "cancelled"]
    assert [path.name for path in tmp_path.iterdir()] == ["0.png"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-")]


@pytest.mark.slow
def test_stage_threads_leave_the_callers_threads_alone(model: ServedModel) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        serve(model, requests_of(2))
        inherited: list[int] = []
        thread = threading.Thread(target=lambda: inherited.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 2
        assert inherited == [2]
    finally:
        torch.set_num_threads(before)


def test_stages_keep_to_one_thread(model: ServedModel) -> None:
    """With teams of their own, OpenMP would let the denoise loop's threads sleep at every barrier."""
    before, seen = torch.get_num_threads(), []

    def work(side: int) -> None:
        # A thread's first operator that could run in parallel sets its number to the process's.
        seen.append((int(torch.ones(side, side).add_(1).sum()), torch.get_num_threads()))

    torch.set_num_threads(2)
    try:
        stage = StageThread("psctl-test", work, device=model.device)
        stage.start()
        for side in (8, 2048):
            stage.put(side)
        stage.finish()
    finally:
        torch.set_num_threads(before)
    assert stage.error is None
    assert seen == [(2 * 64, 1), (2 * 2048**2, 1)]


@pytest.mark.parametrize(("engine", "expected"), [("plain", [6, 4]), ("patched", [])])
def test_forward_passes_of_the_plain_model(
    pipe: Any, engine: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(pipe, name="tiny", options=EngineOptions(engine=engine))
    prepared = [model.prepare(request) for request in requests_of(5)]
    assert [len(group) for group in group_by_resolution(prepared).values()] == [3, 2]
    rows: list[int] = []
    forward = type(pipe.unet).forward

    def counting(unet: Any, sample: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if unet is model.denoiser:
            rows.append(len(sample))
        return forward(unet, sample, *rest, **named)

    monkeypatch.setattr(type(pipe.unet), "forward", counting)
    assert model.stepper.step(prepared) == {}
    assert rows == expected  # guided: two rows each; the patch engine runs its own copy, once


def test_wrong_use(model: ServedModel) -> None:
    with pytest.raises(UsageError, match="max batch size is 0"):
        Engine(model, get_policy("fcfs"), max_batch_size=0)
    engine = Engine(model, get_policy("fcfs"))
    engine.submit(Request(0, "a", SMALL, 1))
    with pytest.raises(UsageError, match="used twice"):
        engine.submit(Request(0, "b", SMALL, 1))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Request(1, "c", SMALL, 1))
    engine.run()
    with pytest.raises(RuntimeError, match="runs once"):
        engine.start()


@pytest.mark.slow
def test_requests_that_the_model_cannot_serve(model: ServedModel) -> None:
    sd3 = build_model(tiny_sd3(), name="tiny-3")
    with pytest.raises(UsageError, match=r"40x32: .*multiples of 16 pixels"):
        sd3.check_request(Request(0, "a", Resolution(40, 32), 2))
    with pytest.raises(UsageError, match=r"208x32: .*at most 192 pixels"):
        sd3.check_request(Request(0, "a", Resolution(208, 32), 2))
    model.check_request(Request(0, "a", Resolution(40, 32), 2))
    from diffusers import DDIMScheduler

    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(UsageError, match="DDIMScheduler cannot take 1001 steps"):
        build_model(pipe, name="ddim").check_request(Request(0, "a", SMALL, 1001))
