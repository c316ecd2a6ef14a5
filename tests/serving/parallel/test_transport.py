"""Transports between ranks, here threads: they deliver all tensors, in order, up to the end of the connection."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patchedserve.serving.parallel.gloo import Gloo
from patchedserve.serving.parallel.group import GroupError
from patchedserve.serving.parallel.options import Backend
from patchedserve.serving.parallel.shared_memory import SharedMemory
from patchedserve.serving.parallel.transport import LOOPBACK, Transport, connect_ranks

SOON = timedelta(seconds=20)


def gloo(store: dist.Store, rank: int, size: int) -> Transport:
    return Gloo(store, rank, size, SOON, LOOPBACK)


def shared_memory(store: dist.Store, rank: int, size: int) -> Transport:
    return SharedMemory(store, rank, size, SOON)


@pytest.fixture(params=[gloo, shared_memory])
def connected(request: pytest.FixtureRequest) -> Callable[[int], list[Transport]]:
    def connect(size: int) -> list[Transport]:
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: request.param(store, rank, size), range(size)))

    return connect


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run each task in a thread of its own and return their results."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [task.result(60) for task in [pool.submit(task) for task in tasks]]


def test_every_kind_of_tensor_arrives_unchanged(connected: Callable[[int], list[Transport]]) -> None:
    one, other = connected(2)
    tensors = [
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randn(4, 6).T,
        torch.arange(7),
        torch.tensor(2.5),
        torch.randn(0, 3),
        torch.tensor([True, False]),
        torch.randn(1 << 20),
    ]

    def send() -> None:
        for tensor in tensors:
            one.send(1, tensor, 3).wait(SOON)

    def receive() -> list[torch.Tensor]:
        return [other.receive(0, tensor.shape, tensor.dtype, 3).wait(SOON) for tensor in tensors]

    _, found = together(send, receive)
    assert all(map(torch.equal, found, tensors))


def test_sent_tensors_may_change_and_tags_arrive_in_any_order(connected: Callable[[int], list[Transport]]) -> None:
    one, other = connected(2)

    def send() -> None:
        for tag in range(20):
            tensor = torch.full((5,), float(tag))
            one.send(1, tensor, tag).wait(SOON)
            tensor.fill_(-1)

    def receive() -> list[float]:
        awaited = {tag: other.receive(0, (5,), torch.float32, tag) for tag in range(20)}
        return [float(awaited[tag].wait(SOON).mean()) for tag in reversed(range(20))]

    assert together(send, receive)[1] == [float(tag) for tag in reversed(range(20))]


@pytest.mark.product(most=1)
def test_large_sends_before_any_receive_do_not_deadlock(connected: Callable[[int], list[Transport]]) -> None:
    """Ranks send more messages and bytes than a socket buffers, and none waits indefinitely for the others to read."""
    ends = connected(3)
    count, size = 600, 40_000

    def swap(rank: int) -> bool:
        others = [other for other in range(3) if other != rank]
        sent = []
        for number in range(count):
            sent += [ends[rank].send(other, torch.full((size,), float(number + rank)), 1 + number) for other in others]
        for number in range(count):
            for other in others:
                found = ends[rank].receive(other, (size,), torch.float32, 1 + number).wait(SOON)
                assert float(found[0]) == float(found[-1]) == number + other
        for each in sent:
            each.wait(SOON)
        return True

    assert all(together(*(lambda rank=rank: swap(rank) for rank in range(3))))


def test_transfers_work_across_inference_mode(connected: Callable[[int], list[Transport]]) -> None:
    """A transfer that starts in inference mode may be awaited outside of it, and the other way round."""
    one, other = connected(2)

    def swap(end: Transport, rank: int) -> list[float]:
        with torch.inference_mode():
            inside = end.receive(rank, (3,), torch.float32, 1)
            end.send(rank, torch.ones(3), 1).wait(SOON)
        outside = end.receive(rank, (3,), torch.float32, 2)
        end.send(rank, torch.ones(3), 2).wait(SOON)
        found = [float(inside.wait(SOON).sum())]
        with torch.inference_mode():
            return [*found, float(outside.wait(SOON).sum())]

    assert together(lambda: swap(one, 1), lambda: swap(other, 0)) == [[3, 3], [3, 3]]


def test_unresponsive_rank_is_named(connected: Callable[[int], list[Transport]]) -> None:
    one, other = connected(2)
    start_s = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 does not answer"):
        one.receive(1, (3,), torch.float32, 5).wait(timedelta(seconds=0.3))
    assert time.monotonic() - start_s >= 0.3
    del other


def test_pending_receives_fail_immediately_on_disconnect(connected: Callable[[int], list[Transport]]) -> None:
    ends = connected(3)
    timer = threading.Timer(0.3, ends[0].disconnect)
    timer.start()
    for end in (ends[1], ends[0]):
        start_s = time.monotonic()
        with pytest.raises(GroupError, match="rank"):
            end.receive(1 if end is ends[0] else 0, (3,), torch.float32, 5).wait(SOON)
        assert time.monotonic() - start_s < 5
    timer.join()


def test_data_sent_before_disconnect_is_still_received() -> None:
    store = dist.HashStore()
    one, other = together(lambda: shared_memory(store, 0, 2), lambda: shared_memory(store, 1, 2))
    one.send(1, torch.arange(3), 1)
    one.disconnect()
    assert other.receive(0, (3,), torch.int64, 1).wait(SOON).tolist() == [0, 1, 2]
    with pytest.raises(GroupError, match="rank 0 has gone"):
        other.receive(0, (3,), torch.int64, 2).wait(SOON)


def test_memory_is_reused() -> None:
    store = dist.HashStore()
    one, other = together(lambda: shared_memory(store, 0, 2), lambda: shared_memory(store, 1, 2))
    assert isinstance(one, SharedMemory)
    for number in range(200):
        one.send(1, torch.full((1 << 20,), float(number)), 1 + number)
        assert float(other.receive(0, (1 << 20,), torch.float32, 1 + number).wait(SOON)[-1]) == number
    one._peers[1].read_all()
    assert len(one._peers[1]._own) == 1
    assert not one._peers[1]._lent
    assert not other._peers[0].arrived


def test_disconnected_rank_is_detected_without_waiting() -> None:
    store = dist.HashStore()
    one, other = together(lambda: shared_memory(store, 0, 2), lambda: shared_memory(store, 1, 2))
    one.send(1, torch.arange(3), 1)
    other.check_peer(0)
    one.disconnect()
    with pytest.raises(GroupError, match="rank 0 has gone"):
        other.check_peer(0)
    assert other.receive(0, (3,), torch.int64, 1).wait(SOON).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("host", "backend", "kind"),
    [
        (LOOPBACK, "auto", SharedMemory),
        (LOOPBACK, "nccl", SharedMemory),
        (LOOPBACK, "gloo", Gloo),
        ("localhost", "auto", Gloo),
    ],
)
def test_only_ranks_of_one_machine_share_memory(host: str, backend: Backend, kind: type) -> None:
    come = partial(connect_ranks, dist.HashStore(), size=2, timeout=SOON, host=host, backend=backend)
    ends = together(partial(come, rank=0), partial(come, rank=1))
    assert all(isinstance(end, kind) for end in ends)


def test_rank_that_does_not_connect_is_reported() -> None:
    with pytest.raises(GroupError, match="ranks do not meet: rank 0 does not come"):
        SharedMemory(dist.HashStore(), 1, 2, timedelta(seconds=0.2))
    with pytest.raises(GroupError, match="ranks do not meet"):
        SharedMemory(dist.HashStore(), 0, 2, timedelta(seconds=0.2))
