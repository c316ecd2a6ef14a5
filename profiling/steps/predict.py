"""Predicted time of a denoising step on a named GPU, from a model's configuration alone.

Every operator of plain diffusers' step is listed on the meta device, with its floating-point operations and the bytes
that it reads and writes. Its time on a GPU is the largest of the time of its arithmetic, that of its traffic, and that
of the shortest kernel (a roofline by operator: Williams, Waterman, Patterson, 2009). A step takes the sum of these or,
if its launches are not recorded, the time in which the host launches them, whichever is longer.

The shares of a GPU's peaks that kernels reach were fitted to steps of SDXL on an H200; steps of SD3 on it were left
out. `tests/benchmarks/results/gpu-h200` has both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...data.resolution import RESOLUTION_MULTIPLE, Resolution
from ...serving.models.placement import quiet_libraries
from ...serving.parallel.cost import Call
from ..report.table import Table
from .cards import Card
from .combinations import Combination
from .counting import WholeAttention, meta_model, run_meta
from .model_config import TEXT_LENGTH

RUN_KIND = "psctl-step-prediction"
Kind = Literal["product", "convolution", "attention", "other"]
Bound = Literal["products", "convolutions", "attention", "memory", "kernels", "launches"]
_BOUNDS: Mapping[Kind, Bound] = {
    "product": "products",
    "convolution": "convolutions",
    "attention": "attention",
    "other": "products",
}
PEAK_SHARES: Mapping[Kind, float] = {"product": 0.6, "convolution": 0.3, "attention": 0.3, "other": 0.6}
"""Share of a GPU's dense 16-bit peak that each kind of operator reaches."""
BANDWIDTH_SHARE = 0.65
"""Share of a GPU's memory bandwidth that operators reach."""
KERNEL_S = 5e-6
"""Seconds of the shortest kernel, with the gap before the next."""
LAUNCH_S = 31e-6
"""Seconds in which the host of the H200 (a Xeon) launched an operator of an eager step."""
ATTENTION_LAUNCHES = 2
"""Launches of each attention for each further resolution of a mixed batch."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of a step: its kind, floating-point operations, and bytes read and written."""

    kind: Kind
    flops: float
    num_bytes: float

    def time(self, card: Card) -> tuple[float, Bound]:
        """Return its seconds on a GPU, and what bounds them."""
        arithmetic = self.flops / (PEAK_SHARES[self.kind] * card.flops)
        traffic = self.num_bytes / (BANDWIDTH_SHARE * card.bandwidth)
        return max((arithmetic, _BOUNDS[self.kind]), (traffic, "memory"), (KERNEL_S, "kernels"))


def ops_of(model: Any, resolution: Resolution, text_length: int, num_rows: int) -> list[Op]:
    """Return the operators of a pass over rows of one resolution, at least two; the model is on the meta device.

    With one row, some operators are others.
    """
    width, height = (side // RESOLUTION_MULTIPLE for side in resolution)
    listed = _Listed()
    with torch.no_grad(), WholeAttention(listed.on_attention), listed:
        run_meta(model, Call(height, width, text_length, num_rows))
    return listed.ops


def together(batches: Sequence[Sequence[Op]]) -> list[Op]:
    """Return the operators of one pass over several batches of the same model."""
    return [
        Op(parts[0].kind, sum(op.flops for op in parts), sum(op.num_bytes for op in parts))
        for parts in zip(*batches, strict=True)
    ]


def device_time(ops: Sequence[Op], card: Card) -> tuple[float, Bound]:
    """Return the seconds of a pass on a GPU, and what bounds most of them."""
    by_bound: dict[Bound, float] = {}
    for op in ops:
        seconds, bound = op.time(card)
        by_bound[bound] = by_bound.get(bound, 0.0) + seconds
    return sum(by_bound.values()), max(by_bound, key=lambda bound: by_bound[bound])


class StepModel:
    """Predicts steps of mixed batches of a model; each request has two rows, as with guidance.

    Args:
        model: denoising model on the meta device, in a 16-bit dtype.
        text_length: number of text tokens.
    """

    def __init__(self, model: Any, text_length: int) -> None:
        self._model, self._text_length = model, text_length
        self._known: dict[tuple[Resolution, int], list[Op]] = {}

    def row(self, combination: Combination, card: Card) -> dict[str, Any]:
        """Return the predicted milliseconds of a step on a GPU, eager and recorded, for one mixed batch and for batches
        of one resolution each.
        """
        batches = list(starmap(self.ops_of, combination.present.items()))
        mixed_s, bound = device_time(together(batches), card)
        num_attention = sum(op.kind == "attention" for op in batches[0])
        num_launches = len(batches[0]) + (len(batches) - 1) * ATTENTION_LAUNCHES * num_attention
        alone_s = [device_time(ops, card)[0] for ops in batches]
        eager_s = max(mixed_s, num_launches * LAUNCH_S)
        return combination.columns | {
            "same_resolution_ms": 1e3 * sum(max(each, len(batches[0]) * LAUNCH_S) for each in alone_s),
            "patched_ms": 1e3 * eager_s,
            "patched_bound": "launches" if eager_s > mixed_s else bound,
            "same_resolution_graphs_ms": 1e3 * sum(alone_s),
            "patched_graphs_ms": 1e3 * mixed_s,
            "patched_graphs_bound": bound,
        }

    def ops_of(self, resolution: Resolution, count: int) -> list[Op]:
        """Return the operators of a pass over requests of one resolution.

        Each further request adds the same arithmetic and traffic to every operator, so passes over one and two
        requests tell those of all.
        """
        if count > 2:
            return [
                Op(one.kind, _at(count, one.flops, two.flops), _at(count, one.num_bytes, two.num_bytes))
                for one, two in zip(self.ops_of(resolution, 1), self.ops_of(resolution, 2), strict=True)
            ]
        if (resolution, count) not in self._known:
            self._known[resolution, count] = ops_of(self._model, resolution, self._text_length, 2 * count)
        return self._known[resolution, count]


def _at(count: int, one: float, two: float) -> float:
    """Return the value of a straight line at `count` from those at 1 and 2."""
    return one + (count - 1) * (two - one)


def predicted(
    spec: str,
    config: Mapping[str, Any],
    card: Card,
    combinations: Sequence[Combination],
    on_row: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the predicted steps of mixed batches on a GPU, as `--json` prints them.

    Args:
        spec: name of the model.
        config: configuration of its denoising model, see `read_config`.
        card: the GPU.
        combinations: the batches.
        on_row: called after each of them.

    Raises UsageError: the model is neither a U-Net nor Stable Diffusion 3.
    """
    quiet_libraries()
    model = meta_model(config, spec, "--model").half()
    steps, rows = StepModel(model, TEXT_LENGTH[config["_class_name"]]), []
    for combination in combinations:
        rows.append(steps.row(combination, card))
        on_row()
    return {"kind": RUN_KIND, "version": 1, "model": spec, "gpu": card.name, "rows": rows}


def prediction_table(found: Mapping[str, Any]) -> Table:
    """Return the table of predicted steps."""
    title = f"Predicted step of {found['model']} on {found['gpu']}, float16"
    columns = (
        *("batch", "patched is bound by", "recorded: bound by"),
        *("by resolution, eager (ms)", "patched, eager (ms)", "by resolution, recorded (ms)", "patched, recorded (ms)"),
    )
    numbers = ("same_resolution_ms", "patched_ms", "same_resolution_graphs_ms", "patched_graphs_ms")
    cells = [
        [
            row["label"],
            row["patched_bound"],
            row["patched_graphs_bound"],
            *(f"{row[name]:.1f}" for name in numbers),
        ]
        for row in found["rows"]
    ]
    return Table(title, columns, cells, 3, "Predicted, not measured. A request has two rows, as with guidance.")


class _Listed(TorchDispatchMode):
    """Lists the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def on_attention(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """List an attention."""
        flops = 4 * query.numel() * key.shape[-2]
        self.ops.append(Op("attention", flops, 2 * query.nbytes + key.nbytes + value.nbytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        inputs, outputs = (
            [each for each in tree_leaves(values) if isinstance(each, Tensor)] for values in ((args, given), found)
        )
        name = func._schema.name
        if _is_view(func, inputs, outputs) or name.startswith(("aten::empty", "aten::new_empty")):
            return found
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **given, out_val=found)
        kind: Kind = "convolution" if "convolution" in name else "product" if flops else "other"
        self.ops.append(Op(kind, flops, sum(each.nbytes for each in (*inputs, *outputs))))
        return found


def _is_view(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    if func.is_view:
        return True
    places = {each.untyped_storage()._cdata for each in inputs}
    return not func._schema.is_mutable and any(each.untyped_storage()._cdata in places for each in outputs)
