"""Traces that one server receives, or two by turns, and the paired differences of the two. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ...data.errors import RunError
from ...data.figures import write_figures
from ...data.requests import Request
from ...data.statistics import Estimate
from ...serving.core.request_state import RequestRecord
from ..experiment.turns import turns
from ..report.table import Table
from ..report.words import DASH, number
from .load import LoadResult, LoadSettings, send_load

SIDES = ("first", "second")
"""Names of two servers in figures."""
_LATENCIES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "latency_mean": fmean,
    "latency_p50": lambda latencies_s: float(np.percentile(latencies_s, 50)),
    "latency_p95": lambda latencies_s: float(np.percentile(latencies_s, 95)),
}
_RATES = {"slo_attainment": "slo_attainment_rate", "throughput": "throughput_qps", "goodput": "goodput_qps"}
_COUNTS = ("completed_requests", "failed_requests", "discarded_requests", "rejected_requests")


@dataclass(frozen=True, slots=True)
class LoadRound:
    """Results of the servers on one trace, and their summaries."""

    results: tuple[LoadResult, ...]
    summaries: tuple[dict[str, Any], ...]

    def pairs(self) -> list[tuple[RequestRecord, RequestRecord]]:
        """Return the records of the requests that both of two servers have completed."""
        one, other = (result.records for result in self.results)
        return [pair for pair in zip(one, other, strict=True) if all(each.status == "completed" for each in pair)]


def send_by_turns(
    traces: Sequence[Sequence[Request]],
    sides: Sequence[LoadSettings],
    *,
    slo_scale: float | None,
    models: Sequence[str],
    dataset: str,
    on_finish: Callable[[RequestRecord], None],
) -> list[LoadRound]:
    """Send every trace to each server, one after the other; the server that begins changes from trace to trace.

    Other load on a machine that they share, and its drift, thus affect all alike.

    Args:
        traces: the traces.
        sides: settings of the load of each server.
        slo_scale, dataset: as in `LoadResult.summary`.
        models: name of each server's model.
        on_finish: called after each request.

    Raises:
        RunError: a server does not answer.
        KeyboardInterrupt: on Ctrl-C.
    """
    found: dict[tuple[int, int], LoadResult] = {}
    for turn, side in turns(range(len(sides)), len(traces), num_warmups=0):
        found[turn, side] = send_load(traces[turn], sides[side], on_finish=on_finish)
    rounds = []
    for turn in range(len(traces)):
        results = tuple(found[turn, side] for side in range(len(sides)))
        summaries = tuple(
            result.summary(slo_scale=slo_scale, model=model, dataset=dataset)
            for result, model in zip(results, models, strict=True)
        )
        rounds.append(LoadRound(results, summaries))
    return rounds


def check_sender(rounds: Sequence[LoadRound]) -> None:
    """Raise RunError if the sender could not keep up with a trace."""
    results = [result for each in rounds for result in each.results]
    if not all(result.is_valid for result in results):
        lag_s = max(result.send_lag_p99 for result in results)
        raise RunError(
            f"the sender was {1e3 * lag_s:.0f} ms late (99th percentile): the machine is too busy to "
            "send this load, and the result says nothing"
        )


def two_servers(rounds: Sequence[LoadRound], servers: tuple[str, str]) -> dict[str, Any]:
    """Return the result of a comparison of two servers as JSON, with figures that gates read.

    Figures are those of both servers, as `first.latency_p95`, and the second less the first, as
    `latency_p95.difference`: means over the traces with Student's interval, because traces are independent of each
    other and requests of one trace are not. Latencies are those of the requests that both have completed. Numbers of
    requests are totals.

    Raises RunError: both servers complete no request of a trace.
    """
    figures: dict[str, Estimate] = {}
    for name, one, other in _by_round(rounds):
        for side, values in zip(SIDES, (one, other), strict=True):
            figures[f"{side}.{name}"] = Estimate.of_mean(values)
        figures[f"{name}.difference"] = Estimate.of_mean([b - a for a, b in zip(one, other, strict=True)])
    for place, side in enumerate(SIDES):
        for name in _COUNTS:
            figures[f"{side}.{name}"] = Estimate.exact(sum(each.summaries[place][name] for each in rounds))
    content = {
        "servers": dict(zip(SIDES, servers, strict=True)),
        "traces": [dict(zip(SIDES, each.summaries, strict=True)) for each in rounds],
    }
    return write_figures(content, figures)


def _by_round(rounds: Sequence[LoadRound]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield the name of each figure, and its values on both sides in all rounds."""
    pairs = [each.pairs() for each in rounds]
    for place, each in enumerate(pairs):
        if not each:
            records = [record for result in rounds[place].results for record in result.records]
            reason = next((record.reason for record in records if record.status != "completed"), None)
            raise RunError(f"the servers complete no request of trace {place + 1} in common: {reason}")
    for name, statistic in _LATENCIES.items():
        one, other = ([statistic([each[place].latency_s or 0.0 for each in own]) for own in pairs] for place in (0, 1))
        yield name, one, other
    for name, key in _RATES.items():
        one, other = ([each.summaries[place][key] for each in rounds] for place in (0, 1))
        if None not in (*one, *other):
            yield name, one, other


def two_servers_table(summary: Mapping[str, Any]) -> Table:
    """Return the comparison of two servers, and of their images if there is one, for the terminal."""
    figures: dict[str, dict[str, Any]] = summary["figures"]
    rows = [
        (
            name.replace("_", " "),
            *(number(figures[f"{side}.{name}"]["value"]) for side in SIDES),
            *_with_interval(figures[f"{name}.difference"]),
        )
        for name in (*_LATENCIES, *_RATES)
        if f"{name}.difference" in figures
    ]
    rows += [
        (name.replace("_", " "), *(str(figures[f"{side}.{name}"]["value"]) for side in SIDES), "", "")
        for name in _COUNTS
    ]
    rows += [
        (f"{name.upper()} of images", "", "", *_with_interval(figures[name]))
        for name in ("psnr", "ssim")
        if name in figures
    ]
    servers = " and ".join(summary["servers"].values())
    columns = ("figure", *SIDES, "second - first", "95 % interval")
    return Table(f"{servers}, {len(summary['traces'])} traces", columns, rows)


def _with_interval(figure: Mapping[str, Any]) -> tuple[str, str]:
    ends = (figure["low"], figure["high"])
    return number(figure["value"]), DASH if None in ends else " to ".join(map(number, ends))
