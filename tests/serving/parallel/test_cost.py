"""Closed-form costs against DistriFusion's figures, and against the work and the transfers of our leaves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from patchedserve.data.models.published import published_config
from patchedserve.serving.parallel.context import Pass, Team
from patchedserve.serving.parallel.cost import Call, Cost, Share
from patchedserve.serving.parallel.group import VirtualEnd
from patchedserve.serving.parallel.model_levels import levels_of
from patchedserve.serving.parallel.strip_model import StripModel, flat
from patchedserve.serving.parallel.strips import Strips

from ...support.patched_models import draw_rows, stack_conditions, to_dtype
from ...support.random_models import (
    flux2_transformer,
    flux_transformer,
    pixart_transformer,
    qwen_transformer,
    sd3_transformer,
    sd35_transformer,
)
from ...support.tiny_models import tiny_sd, tiny_sd3, tiny_sdxl
from ...support.virtual_ranks import on_ranks

SDXL = Cost.of(published_config("sdxl"))
BAR = 0.005


def sdxl(height: int, width: int | None = None, *, rows: int = 2) -> Call:
    """Return a call for an image of this size in pixels."""
    return Call(height // 8, (width or height) // 8, 77, rows)


def even(call: Call, count: int, place: int) -> Share:
    return Share(Strips.of(call.height, 4, (1.0,) * count), place)


def test_macs_equal_those_of_the_paper() -> None:
    step = SDXL.macs(sdxl(1024))
    assert step == pytest.approx(6763e9, rel=BAR)
    assert 50 * step == pytest.approx(338e12, rel=BAR)
    for count, printed in ((2, 322), (4, 318), (8, 324)):
        assert 50 * count * SDXL.macs(sdxl(1024 // count, 1024)) == pytest.approx(printed * 1e12, rel=BAR)
    # Figure 1, whichever side is cut.
    for size in ((1280, 1920), (1920, 1280)):
        assert 50 * SDXL.macs(sdxl(*size)) == pytest.approx(907e12, rel=BAR)
        assert 50 * SDXL.macs(sdxl(size[0] // 4, size[1])) == pytest.approx(190e12, rel=BAR)
        call = sdxl(*size)
        device = [50 * SDXL.strip_macs(call, even(call, 4, place)) + SDXL.text_macs(call) for place in range(4)]
        assert device == pytest.approx([227e12] * 4, rel=BAR)


def test_strips_compute_as_many_macs_as_the_image() -> None:
    # The exceptions are the text, which is computed once a request, and the timestep's layers, which every rank runs.
    call = sdxl(1024)
    for count in (2, 3, 8):
        strips = [SDXL.strip_macs(call, even(call, count, place)) for place in range(count)]
        again = (count - 1) * call.rows * SDXL.levels.per_row
        assert sum(strips) + SDXL.text_macs(call) == SDXL.macs(call) + again
    assert 50 * sum(strips) == pytest.approx(335.5e12, rel=1e-3)  # all ranks, against 338 T


@pytest.mark.parametrize(
    ("side", "gathered", "neighbours"),
    # The paper prints 0.42, 1.48 and 5.38: the figure for neighbours' halos at 2048, for gathered ones elsewhere.
    [(1024, 0.424, 0.375), (2048, 1.58, 1.484), (3840, 5.38, 5.191)],
)
def test_received_elements_equal_those_of_the_paper(side: int, gathered: float, neighbours: float) -> None:
    call = sdxl(side)
    for halos, wanted in (("all", gathered), ("neighbours", neighbours)):
        received = SDXL.received(call, even(call, 8, 3), halos)  # type: ignore[arg-type]
        assert received.key_values + received.halos == pytest.approx(wanted * 1e9, rel=BAR)
        # (n - 1) / n of all keys and values.
        assert received.key_values == SDXL.slots(call) * 7 / 8
    # The first strip has no neighbour above, the last none below.
    ends = [SDXL.received(call, even(call, 8, place)).halos for place in (0, 7)]
    middle = SDXL.received(call, even(call, 8, 3)).halos
    assert max(ends) < middle == sum(ends)


def test_slots_are_halved_with_split_guidance() -> None:
    for side, wanted in ((1024, 0.84), (2048, 3.36), (3840, 11.8)):
        assert 2 * SDXL.slots(sdxl(side)) == pytest.approx(wanted * 1e9, rel=BAR)
        assert 2 * SDXL.slots(sdxl(side, rows=1)) == SDXL.slots(sdxl(side))


class Macs(TorchDispatchMode):
    """Counter of multiply-adds like `FlopCounterMode`, which cannot be used in several threads."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, or the operations that it decomposes into."""
        given = kwargs or {}
        if func._overloadpacket not in flop_registry:
            with self:
                out = func.decompose(*args, **given)
            return func(*args, **given) if out is NotImplemented else out
        out = func(*args, **given)
        self.total += flop_registry[func._overloadpacket](*args, **given, out_val=out) // 2
        return out


class Recorded:
    """End of the group that counts the bytes sent and received."""

    def __init__(self, end: VirtualEnd) -> None:
        self.end, self.rank, self.size = end, end.rank, end.size
        self.sent, self.received = Counter[int](), 0

    def swap(self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype) -> Any:
        """Swap tensors through the wrapped end, and count their bytes."""
        for rank, tensor in sends.items():
            self.sent[rank] += tensor.nbytes
        self.received += sum(map(prod, shapes.values())) * dtype.itemsize
        return self.end.swap(sends, shapes, dtype)


@dataclass(frozen=True)
class RankWork:
    """Transfers and work of a rank, by call."""

    sent: list[Counter[int]]
    received: list[int]
    macs: list[int]
    text_macs: int


def run(model: Any, call: Call, strips: Strips, passes: Sequence[Mapping[str, Any]]) -> list[RankWork]:
    """Run calls of a model in bfloat16 for guided requests, one rank per strip; return what each rank did."""
    rows = [to_dtype(row, torch.bfloat16) for row in draw_rows(model, [(call.height, call.width)], num_each=call.rows)]
    names = tuple((0, index) for index in range(call.rows))
    model = model.to(torch.bfloat16)
    latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])

    def on_rank(end: VirtualEnd) -> RankWork:
        sent, received, macs = [], [], []
        strip_model = StripModel(model)
        with Macs() as text:
            strip_model.learn(names, flat(stack_conditions(rows)))
        halo = int(strip_model.reads_halo)
        start, stop = strips.starts[end.rank : end.rank + 2]
        own = latents[:, :, max(start - halo, 0) : stop + halo]
        for settings in passes:
            recorded = Recorded(end)
            team: Any = Team(recorded, tuple(range(strips.count)))  # type: ignore[arg-type]
            with Macs() as counted:
                strip_model.predict(Pass(team, strips, names, **settings), own, timesteps)
            sent.append(recorded.sent)
            received.append(recorded.received)
            macs.append(counted.total)
        return RankWork(sent, received, macs, text.total)

    # With this backend, attention is two products, which are counted.
    with sdpa_kernel(SDPBackend.MATH):
        return on_ranks(strips.count, on_rank)


MODELS = {
    "sdxl": lambda: tiny_sdxl().unet,
    "sd": lambda: tiny_sd().unet,
    "sd3": lambda: tiny_sd3().transformer,
    "sd35": sd35_transformer,
    "flux": flux_transformer,
    "flux2": flux2_transformer,
    "qwen": qwen_transformer,
    "pixart": pixart_transformer,
}
TEXT = 7
"""Number of text tokens that `draw_rows` draws."""


@pytest.mark.product
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("height", "shares"), [(30, (3, 1)), (29, (1, 3, 2))])
def test_leaves_compute_and_send_the_counted_amounts(name: str, height: int, shares: tuple[int, ...]) -> None:
    model = MODELS[name]()
    cost = Cost(levels_of(model))
    # Transformers need even sizes, and the tiny SD3 has positions for 12 rows only.
    is_unet = name in ("sdxl", "sd")
    call = Call(height, 13, TEXT) if is_unet else Call(min(height // 2 * 2, 24), 10, TEXT)
    strips = Strips.of(call.height, cost.levels.unit, shares)
    ran = run(model, call, strips, [{}])
    for place, one in enumerate(ran):
        share = Share(strips, place)
        assert one.received == [cost.received(call, share).num_bytes(2)]
        assert one.received == [sum(other.sent[0][place] for other in ran)]
        assert one.macs == [cost.strip_macs(call, share)]
        assert one.text_macs == cost.text_macs(call)


def test_split_text_stream_is_sent_and_computed_in_parts() -> None:
    call, model = Call(12, 10, TEXT), sd3_transformer()
    cost = Cost(levels_of(model))
    strips, text_starts = Strips.of(12, 2, (2, 1, 1)), (0, 3, 5, 7)
    for place, one in enumerate(run(model, call, strips, [{"text_starts": text_starts}])):
        share = Share(strips, place, text_starts)
        assert one.received == [cost.received(call, share).num_bytes(2)]
        assert one.macs == [cost.strip_macs(call, share)]


def test_displaced_request_receives_nothing_in_its_last_call() -> None:
    call, model = Call(12, 8, TEXT), tiny_sdxl().unet
    cost, strips = Cost(levels_of(model)), Strips.of(12, 4, (1, 1))
    more, displaced, end = {"is_last": (False, False)}, {"is_displaced": (True, True)}, {"is_last": (True, True)}
    for place, one in enumerate(run(model, call, strips, [more, more | displaced, displaced | end])):
        each = cost.received(call, Share(strips, place)).num_bytes(2)
        assert one.received == [each, each, 0]
