"""Link through which records are read, in a thread of its own."""

import gc
import threading
from functools import partial

import pytest
import torch

from patchedserve.serving.editing.link import RecordLink
from patchedserve.serving.editing.uploads import LoadedUnit


@pytest.mark.parametrize("mbps", [None, 1e-9])
def test_thread_of_a_link_ends_with_it(mbps: float | None) -> None:
    before = set(threading.enumerate())
    link = RecordLink(mbps)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    if mbps is None:
        # The load holds a reference to the link, as steps of records do.
        read = partial(lambda link: LoadedUnit({0: {"operator": torch.zeros(8)}}), link)
        assert len(link.submit(read).result().take(0, "operator")) == 8
        del read
    else:
        loads = [link.submit(lambda: LoadedUnit({0: {"operator": torch.zeros(8)}})) for _ in range(2)]
        assert not loads[0].done()  # it takes hours
    del link
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_reading_thread_uses_one_compute_thread() -> None:
    """The reading thread computes alone: a second OpenMP team would put the denoise loop's to sleep at barriers."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        link = RecordLink()
        found = link.submit(
            lambda: LoadedUnit({0: {"threads": torch.ones(2048, 2048).add_(1).sum() * 0 + torch.get_num_threads()}})
        )
        assert found.result(60).take(0, "threads") == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
