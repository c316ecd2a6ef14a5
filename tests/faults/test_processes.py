"""Each process of a server is stopped, slowed and killed under load: other requests are answered, the server recovers.

Workers of cascades and replicas are in `test_fleets.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from ..support.http_server import HttpServer, small_model
from ..support.server_faults import (
    FAULTS,
    GENERATION,
    STATUSES,
    WHOLE_WITHIN_S,
    Load,
    ask,
    check_books,
    descendants,
    is_whole,
    killed,
    probes,
    slowed,
)
from ..support.soak import Usage
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import is_alive, until

pytestmark = pytest.mark.slow
PROCESSES = {
    "prepare": "psctl-prepare",
    "postprocess": "psctl-postproce",
    "edits": "psctl-edits",
    "rank": "psctl-rank-1",
}
"""Process names by part; the system keeps 15 characters of a name."""
OPTIONS = {
    "prepare": ("--stages", "processes"),
    "postprocess": ("--stages", "processes"),
    "rank": ("--parallel", "2", "--parallel-timeout", "2"),
}
OF_RANKS = {**GENERATION, "size": "64x64"}
"""Smaller images are drawn by one rank alone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose images are large enough for two ranks."""
    folder = tmp_path_factory.mktemp("model") / "large"
    return save_tiny(folder, tiny_sdxl(), guidance_scale=3.0, resolutions=[OF_RANKS["size"]], num_inference_steps=4)


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[HttpServer]:
    # Latencies that were measured on an idle machine must not decide which requests a test serves.
    with HttpServer(model, folder, "--slo-scale", "1000", *options, start_s=180) as server:
        yield server


def processes_of(server: HttpServer, part: str) -> list[int]:
    """Return the process ids of a part: the server itself, or its children and grandchildren of that name."""
    if part == "server":
        return [server.process.pid]
    found, parents = [], {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(parent)
            if (folder / "comm").read_text().strip() == PROCESSES[part]:
                found.append(int(folder.name))
    ours = server.process.pid
    return [each for each in found if ours in (parents[each], parents.get(parents[each])) and is_alive(each)]


CASES = [
    pytest.param(
        part, fault, marks=pytest.mark.exhaustive if (part, fault) == ("prepare", "killed") else pytest.mark.faults
    )
    for part in ("server", *PROCESSES)
    for fault in FAULTS
    if (part, fault) != ("server", "killed")
]


@pytest.mark.parametrize(("part", "fault"), CASES)
def test_server_recovers_soon_after_a_fault(
    part: str, fault: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, body = ("large_model", OF_RANKS) if part == "rank" else ("model", GENERATION)
    with serving(request.getfixturevalue(model), tmp_path, *OPTIONS.get(part, ())) as server:
        assert ask(server.url, "before", edits=part == "edits", body=body).status_code == 200
        with Load(server.url, edits=part == "edits", body=body) as load:
            until(lambda: len(load.answers) >= 3)
            victims = processes_of(server, part)
            assert victims
            for victim in victims:
                FAULTS[fault](victim)
            assert probes(server.url)["/livez"] == 200
            until(lambda: is_whole(server.url, body), WHOLE_WITHIN_S)
            num_answered = len(load.answers)
            # The clients of the load receive responses, too, and not only errors.
            until(lambda: len(load.answers) >= num_answered + 6)
        answers = dict(load.answers)
        assert set(answers.values()) <= STATUSES
        assert [answers[name] for name in list(answers)[-3:]] == [200] * 3
        children = descendants(server)
        check_books(server, answers)
        if (part, fault) == ("rank", "killed"):
            assert any("its work is done without it" in line for line in server.lines)
    wait_until_ended(children)


@pytest.mark.faults
def test_requests_are_accepted_soon_after_a_slow_period(model: Path, tmp_path: Path) -> None:
    """What the predictor learns during a slow time must not make it refuse everything later by the tables' SLOs."""
    # Enough steps for a deadline that is long compared with the time that a request takes to reach the engine.
    body = {**GENERATION, "num_inference_steps": 50}
    with HttpServer(model, tmp_path, "--slo-scale", "3", start_s=180) as server:
        with Load(server.url, body=body) as load:
            until(lambda: len(load.answers) >= 3)
            slowed(server.process.pid, slices=100, stopped_s=0.15, running_s=0.05)
            num_slow = len(load.answers)
        assert set(load.answers.values()) <= {200, 503}
        until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])
        answers = dict(load.answers)

        def are_accepted() -> bool:
            names = [f"after-{len(answers)}-{number}" for number in range(10)]
            answers.update((name, ask(server.url, name, body=body).status_code) for name in names)
            return [answers[name] for name in names] == [200] * 10

        until(are_accepted, WHOLE_WITHIN_S)
        assert num_slow > 3
        check_books(server, answers)


@pytest.mark.faults
def test_killed_server_leaves_no_process_and_recovers_after_restart(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--stages", "processes") as server:
        assert ask(server.url, "before").status_code == 200
        children = descendants(server)
        assert children
        killed(server.process.pid)
    wait_until_ended(children)
    with serving(model, tmp_path) as server:
        assert is_whole(server.url)
        assert not any("damaged" in line for line in server.lines)
        assert server.stop() == 0


@pytest.mark.faults
def test_stage_is_replaced_without_the_process_that_forks_stages(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--stages", "processes") as server:
        assert ask(server.url, "before").status_code == 200
        children, [stage] = descendants(server), processes_of(server, "prepare")
        forking = int(Path(f"/proc/{stage}/stat").read_text().rpartition(")")[2].split()[1])
        assert forking in children
        killed(forking)
        assert is_whole(server.url), "no stage needs it"
        killed(stage)
        # Its successor imports torch again.
        until(lambda: is_whole(server.url), max(WHOLE_WITHIN_S, server.start_s))
        children |= descendants(server)
        assert server.stop() == 0
    wait_until_ended(children)


def wait_until_ended(children: set[int]) -> None:
    """Wait for the end of processes. Raises AssertionError, which names it, if one is still alive."""
    with suppress(AssertionError):
        until(lambda: not any(map(is_alive, children)), WHOLE_WITHIN_S)
    left = [Path(f"/proc/{each}/stat").read_text() for each in filter(is_alive, children)]
    assert not left, left


@pytest.mark.faults
def test_many_faults_leak_no_resources(model: Path, tmp_path: Path) -> None:
    """Repeatedly killed stages and disconnecting clients leave no files, threads, processes or memory behind."""
    with serving(model, tmp_path, "--stages", "processes") as server:

        def leave() -> None:
            body = {"prompt": "a cat", "num_inference_steps": 50, "stream": True, "progress": True}
            with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body, timeout=60) as stream:
                next(stream.iter_lines())

        def fault() -> None:
            for part in ("prepare", "postprocess"):
                [victim] = processes_of(server, part)
                killed(victim)
                ask(server.url, "")
                until(lambda: is_whole(server.url), WHOLE_WITHIN_S)
            for _ in range(5):
                leave()
            until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])

        def usage() -> tuple[int, int, int]:
            own = Usage.of(server.process.pid)
            return own.files, own.threads, len(descendants(server))

        for _ in range(3):
            fault()
        before, before_mb = usage(), Usage.of(server.process.pid).rss_mb
        for _ in range(6):
            fault()
        # A connection that has just ended may still be open.
        until(lambda: all(now <= then + 2 for now, then in zip(usage(), before, strict=True)))
        # 30 leaving clients and 12 killed stages; what allocators keep varies by some megabytes.
        assert Usage.of(server.process.pid).rss_mb < before_mb + 20
        assert server.stop() == 0
