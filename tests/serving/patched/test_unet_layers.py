"""Layers of U-Nets, compared with the order in which real passes call them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchedserve.serving.patched.unet_layers import layers_of

from ...support.patched_cases import model_of
from ...support.patched_models import draw_rows, run_plain
from ...support.random_models import WITH_ALL_OPTIONS

UNETS = [name for name in WITH_ALL_OPTIONS if not name.startswith("sd3")]


@torch.no_grad()
@pytest.mark.parametrize("name", UNETS)
def test_layers_are_in_pass_order_with_their_skip_connections(name: str) -> None:
    unet = model_of(name)
    layers = layers_of(unet)
    place = {layer.module: number for number, layer in enumerate(layers)}
    called: list[int] = []
    # Tensors are held, so that no two have the same id.
    made: dict[int, tuple[int, Tensor]] = {}
    residuals: dict[nn.Module, list[tuple[int, int]]] = {}

    def note_made(module: nn.Module, given: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        made[id(out)] = place.get(module, -1), out

    def note_given(block: nn.Module, given: Any, named: dict[str, Any]) -> None:
        used = [place[each] for each in block.get_submodule("resnets").children()]
        tensors = named["res_hidden_states_tuple"]
        residuals[block] = [(made[id(each)][0], at) for each, at in zip(tensors, reversed(used), strict=True)]

    def note_called(module: nn.Module, given: Any) -> None:
        called.append(place[module])

    blocks = list(unet.get_submodule("up_blocks").children())
    handles = [
        *(each.register_forward_hook(note_made) for each in (unet.get_submodule("conv_in"), *place)),
        *(each.register_forward_pre_hook(note_called) for each in place),
        *(each.register_forward_pre_hook(note_given, with_kwargs=True) for each in blocks),
    ]
    try:
        run_plain(unet, draw_rows(unet, [(16, 16)], seed=1))
    finally:
        for handle in handles:
            handle.remove()
    assert called == list(range(len(layers)))
    for number, layer in enumerate(layers):
        passing = {
            block: tuple(begin < number < end for begin, end in own)
            for block, own in residuals.items()
            if any(begin < number < end for begin, end in own)
        }
        assert layer.bridging == passing
