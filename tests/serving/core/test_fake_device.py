"""The fake device lists launches, waits and copies from the host with their places, and computes what a CPU does."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchedserve.kernels.halo import halo_gather
from patchedserve.kernels.patch import patch_join, patch_split
from patchedserve.serving.core.attention import FusedLinear
from patchedserve.serving.core.timing import finish_stream, synchronize

from ...support.fake_device import DEVICE, Event, fake_device
from ...support.launches import BATCHES, on_device, requests_of, stepper_on_device
from ...support.patched_models import relative_error
from ...support.tiny_models import tiny_sdxl

HOST = torch.arange(6.0).reshape(2, 3)


def events_of(work: Callable[[Tensor], Any]) -> tuple[list[Event], Any]:
    """Return what work on a tensor on the device asks of it, and its result, on the host."""
    with fake_device() as device, torch.inference_mode():
        x = device.put(HOST)
        found = work(x)
        events = device.events.copy()
        return events, found.cpu() if isinstance(found, Tensor) else found


def kinds_of(work: Callable[[Tensor], Any]) -> list[str]:
    return [event.kind for event in events_of(work)[0]]


@pytest.mark.parametrize(
    ("work", "num_launches"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.mul_(2).add_(x), 2),
        (lambda x: F.linear(x, x.new_ones(4, 3), x.new_zeros(4)), 3),
        (lambda x: x.new_empty(4, 4), 0),
        (lambda x: x.t()[1:].view(2, 2).detach(), 0),
        (lambda x: x.t().reshape(6), 1),
        (lambda x: x.contiguous().float(), 0),
        (lambda x: x.half(), 1),
        (lambda x: torch.arange(3, device=x.device), 1),
        (lambda x: x[:, :0] * 2, 0),
        (lambda x: torch.arange(3) + 1, 0),
        (lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), 1),
        (lambda x: x * torch.tensor(2.0), 1),
    ],
)
def test_launches_are_counted(work: Callable[[Tensor], Tensor], num_launches: int) -> None:
    assert kinds_of(work) == ["launch"] * num_launches


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[0, 1].item(),
        lambda x: float(x[0, 1]),
        lambda x: bool((x > 2)[0, 0]),
        lambda x: 1 if x[0, 1] else 2,
        lambda x: x.tolist(),
        lambda x: x.cpu().numpy().sum(),
        lambda x: torch.equal(x, x),
        lambda x: HOST.clone().copy_(x),
        lambda x: synchronize(x.device),
        lambda x: finish_stream(x.device),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_waits_are_found(work: Callable[[Tensor], Any]) -> None:
    assert [kind for kind in kinds_of(work) if kind != "launch"] == ["wait"]


@pytest.mark.parametrize(
    "work", [lambda x: x.nonzero(), lambda x: x[x > 2], lambda x: x.masked_select(x > 2), lambda x: torch.unique(x)]
)
def test_sizes_that_depend_on_values_wait(work: Callable[[Tensor], Tensor]) -> None:
    events, found = events_of(work)
    assert [event.kind for event in events if event.kind != "launch"] == ["wait"]
    assert torch.equal(found, work(HOST))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device),
        lambda x: torch.tensor(1.0, device=x.device),
        lambda x: torch.from_numpy(HOST.numpy()).to(x.device),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.clone().copy_(HOST),
    ],
)
def test_copies_from_the_host_wait(work: Callable[[Tensor], Tensor]) -> None:
    assert [kind for kind in kinds_of(work) if kind != "launch"] == ["copy", "wait"]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: HOST.pin_memory().to(x.device, non_blocking=True),
        lambda x: torch.empty(3, pin_memory=True).to(x.device, non_blocking=True),
        lambda x: x.copy_(HOST, non_blocking=True),
    ],
)
def test_copies_that_do_not_block_do_not_wait(work: Callable[[Tensor], Tensor]) -> None:
    assert kinds_of(work) == ["copy"]


def test_places_are_those_of_the_code() -> None:
    def work(x: Tensor) -> float:
        return x.sum().item()

    (_, wait), _ = events_of(work)
    line = inspect.getsourcelines(work)[1] + 1
    assert str(wait) == f"wait aten._local_scalar_dense.default tests/serving/core/test_fake_device.py:{line}"
    (wait,), _ = events_of(lambda x: finish_stream(x.device))
    assert wait.place.startswith("serving/core/timing.py:")


def test_triton_launches_are_counted_and_have_values() -> None:
    images = [torch.randn(1, 4, 8, 8), torch.randn(2, 4, 4, 8)]
    neighbours = torch.tensor([[-1] * 8] * 8)
    expected = halo_gather(patch_split(images, 4), neighbours)
    with fake_device() as device, torch.inference_mode():
        patches = patch_split([device.put(image) for image in images], 4)
        padded = halo_gather(patches, device.put(neighbours))
        joined = patch_join(patches[:4], 2, 2)
        names = [event.name for event in device.events if "_kernel" in event.name]
        assert names == ["patch_move_kernel"] * 2 + ["halo_gather_kernel", "patch_move_kernel"]
        assert torch.equal(padded.cpu(), expected)
        assert torch.equal(joined.cpu(), images[0])


def test_parameters_are_on_the_device() -> None:
    layers = nn.Linear(3, 4), nn.Linear(3, 2)
    expected = torch.cat([layer(HOST) for layer in layers], 1).detach()
    with fake_device() as device, torch.inference_mode():
        device.move(nn.ModuleList(layers))
        fused = FusedLinear(*layers)
        assert isinstance(layers[0].weight, nn.Parameter)
        assert layers[0].weight.device == DEVICE
        x = device.put(HOST)
        fused(x)
        device.events.clear()
        found = fused(x)
        assert [event.kind for event in device.events] == ["launch"], "the layers run as one"
        assert torch.allclose(found.cpu(), expected)


def test_latents_are_those_of_the_cpu() -> None:
    """Patches, Triton kernels and the sampler take part, so what is counted is a step that works."""
    requests = requests_of(BATCHES["three sizes"])
    with stepper_on_device(tiny_sdxl) as (device, host, stepper), torch.inference_mode():
        on_host = [host.prepare(request) for request in requests]
        active = [on_device(device, host.prepare(request)) for request in requests]
        for batch in (active, active, []):
            assert stepper.step(batch) == {}
        found = [prepared.latents[0].cpu() for prepared in active]
    for batch in (on_host, on_host, []):
        assert host.stepper.step(batch) == {}
    assert relative_error(found, [prepared.latents[0] for prepared in on_host]) < 1e-4
