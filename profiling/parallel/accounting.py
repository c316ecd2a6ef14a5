"""Figures of one model on several devices: by closed form, counted by torch, and as DistriFusion prints them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.resolution import Resolution
from ...data.tables.published import printed_figures
from ...serving.parallel.cost import Call, Share
from ...serving.parallel.latency_model import ParallelLatency
from ..report.table import Table
from ..report.words import DASH
from .plan import AccountingPlan

RESULT_KIND = "psctl-parallel-cost"
NUM_STEPS = 50
ELEMENT_BYTES = 2
"""Bytes of a float16 or bfloat16 element."""
QUANTITIES: Mapping[str, str] = {
    "macs_step_g": "MACs of a step, G",
    "macs_t": f"MACs of {NUM_STEPS} steps, T",
    "macs_naive_t": "naive patches: MACs of all devices, T",
    "macs_naive_device_t": "naive patches: MACs of a device, T",
    "macs_strips_t": "strips: MACs of all devices, T",
    "macs_strips_device_t": "strips: MACs of a device, T",
    "received_gathered_g": "elements received a step, halos gathered, G",
    "received_g": "elements received a step, halos of neighbours, G",
    "statistics_mb": "statistics of norms received a step, MB",
    "slots_gb": "keys and values kept by a device, GB",
    "slots_split_gb": "the same with split guidance, GB",
    "waiting_sync_ms": "waiting in a step, sync, ms",
    "waiting_displaced_ms": "waiting in a step, displaced, ms",
    "latency_nocomm_s": f"{NUM_STEPS} steps without communication, s",
    "latency_sync_s": f"{NUM_STEPS} steps, sync, s",
    "latency_displaced_s": f"{NUM_STEPS} steps, displaced, s",
    "speedup_displaced_x": "speed-up, displaced",
    "speedup_split_x": "speed-up, displaced, split guidance",
    "displaced_saves": "share of sync that displaced saves",
}
"""Descriptions of the figures, in the order of the report."""

Place = tuple[str, str, int]
"""Key of a figure: quantity, resolution, number of devices."""
Row = tuple[str, int, float, float | None]
"""Quantity, number of devices, value by closed form or model, and value counted by torch."""


@dataclass(frozen=True, slots=True)
class AccountedFigure:
    """One figure.

    Attributes:
        quantity: a key of `QUANTITIES`.
        resolution: resolution of the image.
        num_ranks: number of devices that draw the image.
        ours: value by closed form or by the latency model.
        counted: the same value, counted by torch.
        paper: value that the paper prints.
    """

    quantity: str
    resolution: str
    num_ranks: int
    ours: float
    counted: float | None = None
    paper: float | None = None

    @property
    def difference(self) -> float | None:
        """Difference of `ours` from the paper's value, relative to the latter; None without one."""
        return None if self.paper is None else self.ours / self.paper - 1

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that can be serialized as JSON."""
        names = ("quantity", "resolution", "num_ranks", "ours", "counted", "paper", "difference")
        return {name: getattr(self, name) for name in names}


def account(plan: AccountingPlan, counted: Mapping[Call, int]) -> list[AccountedFigure]:
    """Return all figures of a plan. `counted` holds the MACs of its calls in the unmodified model, by torch."""
    printed = printed_by_place() if plan.is_paper_model else {}
    found = []
    for resolution in plan.resolutions:
        rows = (
            *_macs(plan, resolution, counted),
            *_exchange(plan, resolution),
            *latencies(plan, resolution, printed),
        )
        for quantity, num_ranks, ours, by_torch in rows:
            place = quantity, str(resolution), num_ranks
            found.append(AccountedFigure(*place, ours, by_torch, printed.get(place)))
    order = list(QUANTITIES)
    return sorted(found, key=lambda figure: order.index(figure.quantity))


def printed_by_place() -> dict[Place, float]:
    """Return the figures that DistriFusion prints."""
    return {(each.quantity, each.resolution, each.num_ranks): each.value for each in printed_figures("distrifusion")}


def _macs(plan: AccountingPlan, resolution: Resolution, counted: Mapping[Call, int]) -> Iterator[Row]:
    cost, whole = plan.cost, plan.call(resolution)
    ours, by_torch = cost.macs(whole), counted[whole]
    yield "macs_step_g", 1, ours / 1e9, by_torch / 1e9
    yield "macs_t", 1, NUM_STEPS * ours / 1e12, NUM_STEPS * by_torch / 1e12
    for num_ranks in plan.num_ranks:
        patches, strips = plan.naive(resolution, num_ranks), plan.strips(resolution, num_ranks)
        ours, by_torch = (
            [NUM_STEPS * of(patch) / 1e12 for patch in patches] for of in (cost.macs, counted.__getitem__)
        )
        yield "macs_naive_t", num_ranks, sum(ours), sum(by_torch)
        yield "macs_naive_device_t", num_ranks, max(ours), max(by_torch)
        # Each rank computes the text's keys and values once.
        ours = [
            (NUM_STEPS * cost.strip_macs(whole, Share(strips, place)) + cost.text_macs(whole)) / 1e12
            for place in range(num_ranks)
        ]
        yield "macs_strips_t", num_ranks, sum(ours), None
        yield "macs_strips_device_t", num_ranks, max(ours), None


def _exchange(plan: AccountingPlan, resolution: Resolution) -> Iterator[Row]:
    for num_ranks in plan.num_ranks:
        call = plan.call(resolution)
        gathered, ours = (plan.cost.max_received(call, num_ranks, halos) for halos in ("all", "neighbours"))
        yield "received_gathered_g", num_ranks, (gathered.key_values + gathered.halos) / 1e9, None
        yield "received_g", num_ranks, (ours.key_values + ours.halos) / 1e9, None
        yield "statistics_mb", num_ranks, 4 * ours.statistics / 1e6, None
        num_bytes = ours.num_bytes(ELEMENT_BYTES)
        yield "waiting_sync_ms", num_ranks, 1e3 * plan.link.waiting_s("sync", num_ranks, num_bytes), None
        yield "waiting_displaced_ms", num_ranks, 1e3 * plan.link.waiting_s("displaced", num_ranks, num_bytes), None
    # The same on any number of devices.
    for num_ranks in plan.num_ranks[-1:]:
        for name, rows in (("slots_gb", 2), ("slots_split_gb", 1)):
            yield name, num_ranks, ELEMENT_BYTES * plan.cost.slots(plan.call(resolution, rows=rows)) / 1e9, None


def latencies(plan: AccountingPlan, resolution: Resolution, printed: Mapping[Place, float]) -> Iterator[Row]:
    """Yield modelled latencies on the paper's devices. Yields nothing without printed ones for the resolution.

    The parameters a and b are fitted to the paper's latencies without communication, and halos are gathered.
    """
    alone = {
        num_ranks: value / NUM_STEPS
        for (quantity, size, num_ranks), value in printed.items()
        if quantity == "latency_nocomm_s" and size == str(resolution)
    }
    if not alone:
        return
    model = ParallelLatency.fit(alone, plan.link)
    alone_s = model.step_s("nocomm", 1, 0)

    def received_bytes(count: int, rows: int) -> int:
        received = plan.cost.max_received(plan.call(resolution, rows=rows), count, "all")
        return ELEMENT_BYTES * (received.key_values + received.halos)

    yield "latency_nocomm_s", 1, NUM_STEPS * alone_s, None
    for num_ranks in plan.num_ranks:
        num_bytes = received_bytes(num_ranks, 2)
        displaced_s = model.step_s("displaced", num_ranks, num_bytes)
        yield "latency_nocomm_s", num_ranks, NUM_STEPS * model.step_s("nocomm", num_ranks, num_bytes), None
        yield "latency_sync_s", num_ranks, NUM_STEPS * model.step_s("sync", num_ranks, num_bytes), None
        yield "latency_displaced_s", num_ranks, NUM_STEPS * displaced_s, None
        yield "speedup_displaced_x", num_ranks, alone_s / displaced_s, None
        yield "displaced_saves", num_ranks, model.displaced_saves(num_ranks, num_bytes), None
        if num_ranks % 2 == 0 and num_ranks > 2:
            split_s = model.step_s("displaced", num_ranks, received_bytes(num_ranks // 2, 1))
            yield "speedup_split_x", num_ranks, alone_s / split_s, None


def figures_tables(figures: Sequence[AccountedFigure]) -> list[Table]:
    """Return tables for display: the figures beside the paper's, if there are any, and all figures by device count."""
    counted = [abs(each.ours / each.counted - 1) for each in figures if each.counted is not None]
    note = f"By number of devices. MACs are by closed form; torch counts the same within {max(counted):.2%}."
    beside = [
        (QUANTITIES[each.quantity], each.resolution, str(each.num_ranks), *_texts(each))
        for each in figures
        if each.paper is not None
    ]
    counts = sorted({each.num_ranks for each in figures})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for each in figures:
        lines.setdefault((QUANTITIES[each.quantity], each.resolution), {})[each.num_ranks] = _texts(each)[0]
    every = [(*line, *(found.get(count, DASH) for count in counts)) for line, found in lines.items()]
    ours = Table("", ("what", "image", *map(str, counts)), every, num_words=2, note=note)
    columns = ("what", "image", "devices", "here", "paper", "difference")
    return [Table("Beside DistriFusion's paper", columns, beside, num_words=2), ours] if beside else [ours]


def _texts(figure: AccountedFigure) -> tuple[str, str, str]:
    """Return the texts of our value, the paper's, and the difference."""
    form = ",.1f" if figure.ours >= 100 else ".3g"
    if figure.paper is None or figure.difference is None:
        return format(figure.ours, form), DASH, DASH
    return format(figure.ours, form), f"{figure.paper:,g}", f"{figure.difference:+.1%}"
