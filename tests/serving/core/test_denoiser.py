"""Copies of models: modules of their own, the original's tensors, and otherwise what `copy.deepcopy` returns."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from patchedserve.serving.core.denoiser import copy_modules, denoiser_of

from ...support.tiny_families import tiny_flux
from ...support.tiny_models import tiny_sd3, tiny_sdxl
from ...support.tiny_qwen import tiny_qwen


def deep_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3, tiny_flux, tiny_qwen])
def test_copies_equal_deep_copies(build: Callable[[], Any]) -> None:
    model = denoiser_of(build())
    next(iter(model.children())).compile(backend="eager")
    copied, expected = copy_modules(model), deep_copy(model)
    original = dict(model.named_modules())
    found, wanted = dict(copied.named_modules()), dict(expected.named_modules())
    assert list(found) == list(wanted) == list(original)
    assert {id(module) for module in found.values()}.isdisjoint(map(id, original.values()))
    for name, module in found.items():
        assert type(module) is type(original[name])
        assert {key: type(value) for key, value in vars(module).items()} == {
            key: type(value) for key, value in vars(wanted[name]).items()
        }
    for name in ("named_parameters", "named_buffers"):
        tensors, shared = dict(getattr(copied, name)()), dict(getattr(model, name)())
        assert tensors.keys() == shared.keys()
        assert all(tensor is shared[key] for key, tensor in tensors.items())


class _Unusual(nn.Module):
    """A module with attributes beside those that PyTorch registers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.same = self.inner
        self.unregistered = [self.inner, nn.Linear(2, 2)]
        self.numbers = {"a": [1]}
        self.numbers_again = self.numbers
        self.angles = torch.ones(3)
        self.call = MethodType(_Unusual.forward, self)
        self.chosen = {"b"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> "_CopiesItself":
        memo[id(self)] = self
        return self


def test_unusual_attributes_are_copied() -> None:
    model: Any = nn.Sequential(_Unusual(), _CopiesItself(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    for copied in (copy_modules(model), deep_copy(model)):
        parts: list[Any] = [*copied.children()]
        own, given = parts[0], model[0]
        assert own.same is own.inner is own.unregistered[0] is not given.inner
        assert own.unregistered[1] is not given.unregistered[1]
        assert own.numbers is own.numbers_again is not given.numbers
        assert own.numbers["a"] == [1]
        assert own.numbers["a"] is not given.numbers["a"]
        assert torch.equal(own.angles, given.angles)
        assert own.angles is not given.angles
        assert own.call.__self__ is own
        assert own.chosen == {"b"}
        assert own.chosen is not given.chosen
        assert own._forward_hooks == given._forward_hooks
        assert own._forward_hooks is not given._forward_hooks
        assert parts[1] is model[1]
