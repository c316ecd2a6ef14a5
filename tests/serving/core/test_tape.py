"""The tape freezes what a CUDA graph freezes, so that it fails where a graph would."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchedserve.serving.core.captured import Pause

from ...support.tape import Tape

X = torch.arange(6.0).reshape(2, 3)


@torch.inference_mode()
def test_replay_recomputes_in_place() -> None:
    x, weight, calls = X.clone(), torch.randn(3, 3), []

    def work() -> Tensor:
        calls.append(1)
        heads = (x @ weight).view(1, 2, 1, 3).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        out = torch.zeros(2, 3)
        out[:, 1:] = mixed[0, 0, :, 1:].contiguous()
        out.mul_(2).add_(x.t().reshape(2, 3))
        return torch.cat([out, x.flatten()[2:5][None]])

    tape = Tape()
    play, result = tape(lambda _: work())
    assert result.isnan().all(), "recording computes nothing"
    for scale in (1.0, -0.5):
        x.copy_(X * scale)
        play()
        assert torch.equal(result, work())
    assert (tape.recorded, tape.played, len(calls)) == (1, 2, 3)


def test_numbers_are_constants_of_the_recording() -> None:
    settings = {"scale": 2.0}
    play, result = Tape()(lambda _: X * settings["scale"])
    settings["scale"] = 3.0
    play()
    assert torch.equal(result, X * 2)


def test_outside_tensors_are_read_in_place_and_not_retained() -> None:
    outside = {"x": X.clone()}
    play, result = Tape()(lambda _: outside["x"] + 1)
    outside["x"].copy_(X * 5)
    play()
    assert torch.equal(result, X * 5 + 1)
    outside["x"] = X * 7
    with pytest.raises(AssertionError, match=r"a tensor \[2, 3\] that was made outside of the pass is gone"):
        play()


@pytest.mark.parametrize(
    "work",
    [
        lambda: X + X.sum().item(),
        lambda: X + len(X.nonzero()),
        lambda: X[X > 2],
        lambda: X * (2.0 if X.sum() > 3 else 1.0),
        lambda: X + torch.tensor([1.0, 2.0, 3.0]),
        lambda: X + torch.from_numpy(X.numpy()),
        lambda: X + torch.tensor(X.tolist()),
        lambda: X.cpu() + 1,
        lambda: X.repeat_interleave(torch.tensor(2)),
        lambda: torch.unique(X),
    ],
)
def test_transfers_with_the_host_are_refused(work: Callable[[], Tensor]) -> None:
    with pytest.raises(AssertionError, match="cannot be recorded"):
        Tape()(lambda _: work())
    assert work().numel(), "and only there"


def test_compiled_functions_are_recorded() -> None:
    x = X.clone()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(x)
    play, result = Tape()(lambda _: compiled(x))
    x.add_(1)
    play()
    assert torch.equal(result, compiled(x))


@torch.inference_mode()
def test_host_computations_run_once() -> None:
    calls = []

    def work() -> Tensor:
        calls.append(torch.tensor([1.0, 2.0]).sum() + 1)
        out = torch.zeros(2, 3)
        out[:, 1] = 4.0
        return out + X * calls[0]

    play, result = Tape()(lambda _: work())
    play()
    assert torch.equal(result, X * 4 + torch.tensor([0.0, 4.0, 0.0]))


@torch.inference_mode()
def test_paused_work_runs_again_and_may_read_values() -> None:
    """Its results depend on the state of the moment, and the segments around it read and write the same memory."""
    x, state = X.clone(), {"scale": 2.0}

    def work(pause: Pause) -> Tensor:
        doubled = x * 2
        (middle,) = pause(lambda each: (each * state["scale"] * float(each.max()),), (doubled,))
        return middle + 1

    tape = Tape()
    play, result = tape(work)
    assert result.isnan().all()
    for scale in (1.0, -3.0):
        x.copy_(X * scale)
        state["scale"] = scale
        play()
        doubled = X * scale * 2
        assert torch.equal(result, doubled * scale * float(doubled.max()) + 1)
