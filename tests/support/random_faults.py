"""Random requests, batches and faults for a server below its HTTP layer, on a virtual clock.

The front end, its tickets, the batches and their files, the scheduler, its policies and their learning, the metrics,
the live page and the log are those of a server. Only the model is replaced: preparing, steps and decoding take time on
the clock, and fail now and then. The engine over the scheduler crashes, stalls, and withdraws waiting requests and adds
them again; calls of the disk fail; and the process is killed, or ends, and another one continues in its folder. After
every turn of the event loop all records must be consistent, and at the end each request, and each line of each batch,
must have ended exactly once.

`python -m patchedserve.tests.support.random_faults FIRST COUNT` runs these seeds, with `faulty_disk.preloaded` in its
environment.
"""

import asyncio
import contextlib
import gc
import io
import json
import logging
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from patchedserve.data.errors import RunError
from patchedserve.serving.server.batches import store
from patchedserve.serving.server.batches.folder import ENDED
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.protocol import Generation

from .fast_loop import FastLoop
from .faulty_disk import FaultyDisk
from .random_engine import MachineState
from .server_process import SIZES, Process

WHOLE_WITHIN_S = 30.0
_POLICIES = ("fcfs", "edf", "slack", "fair-fitting", "edf-drop")
_KEYS = ("", "a", "b")
_MODES = ("eio", "enospc", "torn")
_ACTS = {
    "ask": 30,
    "batch": 6,
    "break": 6,
    "cancel": 4,
    "leave": 4,
    "heal": 4,
    "take back": 4,
    "disk": 4,
    "look": 3,
    "slow": 3,
    "cancel batch": 2,
    "crash": 2,
    "stand still": 1,
    "delete": 1,
}
"""Events, with their relative frequencies."""


class KilledError(BaseException):
    """Raised where the process is killed."""


class RandomRun:
    """A run of several processes with random events; `go` raises AssertionError if an invariant is violated.

    Attributes:
        event_counts: counts of events.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.machine, self.folder = MachineState(self.rng), folder
        self.event_counts, self.disk = self.machine.event_counts, FaultyDisk(folder)
        self.policy = self.rng.choice(_POLICIES)
        self._loop: FastLoop | None = None
        self._inputs: dict[str, list[str]] = {}
        self._cancelled: set[str] = set()
        self._clients: set[asyncio.Task[None]] = set()

    @property
    def now_s(self) -> float:
        """Time on the clock of the current process, in seconds."""
        return 0.0 if self._loop is None else self._loop.now_s

    def go(self) -> None:
        """Run the processes one after another. Raises AssertionError."""
        now_s = 0.0
        for _ in range(self.rng.randint(0, 3)):
            now_s = self._process(now_s, self._live_through)
        self._process(now_s, self._recover)

    def _process(self, now_s: float, work: "Callable[[Process], Coroutine[Any, Any, None]]") -> float:
        """Run a process until its work is done or it is killed; returns the time."""
        loop, log = FastLoop(self.rng, now_s), io.StringIO()
        self._loop = loop
        reported: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: reported.append(context))
        self._clients = set()
        process = Process(self.machine, self.folder, self.policy)
        loop.after_turn = process.check
        with contextlib.redirect_stderr(log):
            try:
                loop.run_until_complete(work(process))
            except KilledError:
                self.event_counts["kills"] += 1
                _abandon(loop, process)
            else:
                left = [task for task in asyncio.all_tasks(loop) if not task.done()]
                assert not left, f"these go on for ever: {left}"
                lines = [line for line in log.getvalue().splitlines() if line.startswith("{")]
                process.check_end("\n".join(lines))
                assert "AssertionError" not in log.getvalue(), log.getvalue()
            finally:
                self.disk.fail_at(0, "count")
                loop.close()
        bad = [each for each in reported if not isinstance(each.get("exception"), (KilledError, OSError))]
        assert not bad, f"the event loop met {bad}"
        return loop.now_s

    async def _live_through(self, process: Process) -> None:
        await process.backend.start()
        await process.batches.start()
        for _ in range(self.rng.randint(5, 30)):
            self._act(process)
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.1, 0.5, 2.0)))
        if self.rng.random() < 0.5:
            raise KilledError
        await self._end(process)

    async def _end(self, process: Process) -> None:
        self.event_counts["drains"] += 1
        await process.front_end.drain(self.rng.choice((0.0, 5.0)))
        await process.batches.stop()
        await process.backend.stop()
        await asyncio.gather(*self._clients)
        await asyncio.sleep(1.0)
        assert not json.loads(process.live.state(""))["requests"]

    async def _recover(self, process: Process) -> None:
        """Remove all faults, and check that requests are in time again within `WHOLE_WITHIN_S` and all batches end."""
        loop = asyncio.get_running_loop()
        await process.backend.start()
        await process.batches.start()
        for _ in range(self.rng.randint(0, 20)):
            self._act(process)
            await asyncio.sleep(self.rng.choice((0.0, 0.1, 0.5)))
        self.machine.heal()
        self.disk.fail_at(0, "count")
        healed_s = loop.time()
        while True:
            # Judged by the default SLO.
            try:
                ticket = await process.front_end.generate(self._wanted(n=1), key="prober", arrival_s=loop.time())
                await process.front_end.wait(ticket)
                if ticket.records[0].slo_met:
                    break
            except ApiError as error:
                self.event_counts[f"not whole yet: {error.code}"] += 1
            assert loop.time() < healed_s + WHOLE_WITHIN_S, f"not served in time under {self.policy}"
            await asyncio.sleep(0.5)
        end_s = loop.time() + 3600
        while any(batch["status"] not in ENDED for batch in self._batches(process)):
            assert loop.time() < end_s, f"a batch never ends: {self._batches(process)}, {process.batches._tasks}"
            await asyncio.sleep(1.0)
        self._check_batches(process)
        await self._end(process)

    def _batches(self, process: Process) -> list[dict[str, Any]]:
        return [process.batches.batch(each, key) for key in _KEYS for each in self._batch_ids(process, key)]

    def _batch_ids(self, process: Process, key: str) -> list[str]:
        page = process.batches.batch_page(key, None, 1000)
        assert page is not None
        return page[0]

    def _check_batches(self, process: Process) -> None:
        """Check that each line of each batch has one answer, and its own image."""
        for batch in self._batches(process):
            wanted, where = self._inputs.get(batch["id"]), self.folder / "batches" / batch["id"]
            self.event_counts[f"batch {batch['status']}"] += 1
            if wanted is None:  # it was created, but its client did not receive the response
                continue
            found = Counter[str]()
            for name in ("output.jsonl", "errors.jsonl"):
                for line in (where / name).read_text().splitlines() if (where / name).exists() else []:
                    reported = json.loads(line)
                    found[reported["custom_id"]] += 1
                    for image in reported["response"]["body"].get("data", ()):
                        with Image.open(where / "images" / image["file"]) as drawn:
                            seed = int(reported["custom_id"].rpartition("-")[2])
                            assert drawn.getpixel((0, 0))[:2] == (seed % 256, seed // 256 % 256)  # type: ignore[index]
            assert not found or max(found.values()) == 1, f"a line has two answers: {batch}, {found}"
            counts = batch["request_counts"]
            assert counts["completed"] + counts["failed"] == len(found), f"{batch} of {found}, {self._cancelled}"
            if batch["status"] == "completed":
                assert sorted(found) == sorted(wanted), f"{batch} has only {sorted(found)} of {wanted}"
            elif batch["status"] == "cancelled":
                assert batch["id"] in self._cancelled
            else:
                assert batch["status"] == "failed"
                assert self.event_counts["disk"], batch["errors"]

    def _act(self, process: Process) -> None:
        """Make a random event happen."""
        rng, loop, engine = self.rng, asyncio.get_running_loop(), process.backend.engine
        what = rng.choices(list(_ACTS), list(_ACTS.values()))[0]
        self.event_counts[what] += 1
        if what == "ask":
            self._client(self._ask(process))
        elif what == "batch":
            self._client(self._begin_batch(process))
        elif what in ("cancel batch", "delete"):
            with contextlib.suppress(OSError):
                self._change(process, what)
        elif what == "cancel" and process.front_end.open:
            rng.choice(list(process.front_end.open.values())).cancel("its client has cancelled it")
        elif what == "leave" and self._clients:
            rng.choice(sorted(self._clients, key=lambda task: task.get_name())).cancel()
        elif what == "break":
            self.machine.broken[rng.choice(list(self.machine.broken))] = rng.choice((0.1, 0.5, 1.0))
        elif what == "heal":
            self.machine.heal()
        elif what == "slow":
            self.machine.slow = rng.choice((0.5, 3.0, 10.0))
        elif what == "stand still":
            assert isinstance(loop, FastLoop)
            loop.now_s += rng.choice((3.0, 20.0))
        elif what == "crash" and engine is not None:
            engine.crash(rng.choice((RunError("everything fails"), MemoryError())))
        elif what == "take back" and engine is not None:
            engine.withdraw_and_add_again()
        elif what == "disk":
            self.disk.fail_at(rng.randint(1, 30), rng.choice(_MODES))
        elif what == "look":
            process.live.state(rng.choice(_KEYS))
            process.metrics.exposition(rng.choice(_KEYS))

    def _client(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(f"client {len(self._clients):05}")
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    def _wanted(self, n: int) -> Generation:
        rng, seed = self.rng, self.rng.randrange(60_000)
        slo_s = rng.choice((None, None, 0.2, 2.0, 60.0)) if n > 1 else None
        return Generation(
            "a cat",
            rng.choice(SIZES),
            rng.randint(1, 6),
            3.0,
            tuple(range(seed, seed + n)),
            response_format=rng.choice(("b64_json", "url")),
            progress=rng.random() < 0.3,
            slo_s=slo_s,
            priority=rng.choice((0, 0, -1, 1)),
        )

    async def _ask(self, process: Process) -> None:
        front_end, wanted, key = process.front_end, self._wanted(self.rng.randint(1, 3)), self.rng.choice(_KEYS)
        streams, arrival_s = self.rng.random() < 0.3, asyncio.get_running_loop().time()
        request_id = self.rng.choice(("", "x", "y"))
        try:
            ticket = await front_end.generate(
                wanted, key=key, request_id=request_id, arrival_s=arrival_s, streams=streams
            )
            try:
                await front_end.wait(ticket)
            except asyncio.CancelledError:
                ticket.cancel("its client has left")
                raise
        except ApiError as error:
            self.event_counts[error.code] += 1
            return
        except asyncio.CancelledError:
            self.event_counts["left"] += 1
            return
        self.event_counts["drawn"] += 1
        assert sorted(ticket.drawn) == list(range(len(wanted.seeds)))
        for index, drawn in ticket.drawn.items():
            with Image.open(io.BytesIO(drawn.content)) as image:
                seed = wanted.seeds[index]
                assert image.getpixel((0, 0)) == (seed % 256, seed // 256 % 256, wanted.resolution.width)
        if ticket.events is not None:
            reported = [ticket.events.get_nowait() for _ in range(ticket.events.qsize())]
            assert reported.index(None) == len(reported) - 1

    async def _begin_batch(self, process: Process) -> None:
        rng, key, batches = self.rng, self.rng.choice(_KEYS), process.batches
        seeds = rng.sample(range(60_000), rng.randint(1, 6))
        lines = [
            {"custom_id": f"line-{seed}", "body": {"prompt": "a", "seed": seed, "size": "32x32"}} for seed in seeds
        ]
        if rng.random() < 0.3:
            lines[0]["body"]["size"] = "33x33"  # type: ignore[index]
        text = "\n".join(map(json.dumps, lines)).encode()
        try:
            file = batches.files.add("lines.jsonl", io.BytesIO(text), "batch", key)
            batch = batches.create(
                {"input_file_id": file["id"], "endpoint": "/v1/images/generations", "completion_window": "24h"}, key
            )
        except OSError:
            self.event_counts["no room for a file"] += 1
            return
        self._inputs[batch["id"]] = [str(line["custom_id"]) for line in lines]

    def _change(self, process: Process, what: str) -> None:
        key = self.rng.choice(_KEYS)
        if what == "delete":
            page = process.batches.files.page(key, None, 1)
            assert page is not None
            for each in page[0]:
                used = {batch["input_file_id"] for batch in self._batches(process)}
                if each not in used:
                    process.batches.files.delete(each, key)
            return
        ids = self._batch_ids(process, key)
        if ids:
            chosen = self.rng.choice(ids)
            self._cancelled.add(chosen)
            process.batches.cancel(chosen, key)


def _abandon(loop: FastLoop, process: Process) -> None:
    """Abandon all work of a killed process, without writing anything."""
    loop.after_turn = lambda: None
    for task in asyncio.all_tasks(loop):
        with contextlib.suppress(BaseException):
            task.get_coro().close()  # type: ignore[union-attr]
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    # Their locks are released with the last references to them.
    task = None
    process.batches._tasks.clear()
    loop._scheduled.clear()  # type: ignore[attr-defined]
    loop._ready.clear()  # type: ignore[attr-defined]
    gc.collect()


async def _at_once(work: Callable[..., Any], *given: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, partial(work, *given))


def run_seeds(seeds: Sequence[int]) -> Counter[str]:
    """Run these seeds and return counts of events.

    Raises AssertionError: an invariant is violated; the message names the seed.
    """
    event_counts, store.run_in_threadpool = Counter[str](), _at_once
    gc.collect()
    gc.freeze()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="psctl-faults-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            run = RandomRun(seed, folder)
            # Ids, and hence the order of batches, depend on the seed, too.
            secrets.token_hex = lambda nbytes=None: run.rng.randbytes(nbytes or 32).hex()  # noqa: B023
            time.time = lambda: 1.7e9 + run.now_s  # noqa: B023
            run.go()
            event_counts.update(run.event_counts)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return event_counts


if __name__ == "__main__":
    _first, _count = map(int, sys.argv[1:])
    try:
        json.dump(run_seeds(range(_first, _first + _count)), sys.stdout)
    except AssertionError:
        traceback.print_exc()
        sys.exit(1)
