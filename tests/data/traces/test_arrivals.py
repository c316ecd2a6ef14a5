"""Diurnal and recorded arrivals: rates, shapes, files."""

import math
import re
from itertools import islice, pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.traces.arrivals import diurnal_arrivals, gamma_arrivals, read_arrivals, scaled_arrivals
from patchedserve.data.traces.traces import TraceConfig, generate_trace


def diurnal(
    count: int, amplitude: float = 0.8, seed: int = 0, rate: float = 5.0, period_s: float = 100.0
) -> np.ndarray:
    return np.array(list(islice(diurnal_arrivals(np.random.default_rng(seed), rate, amplitude, period_s), count)))


def test_diurnal_time_change_is_exact() -> None:
    # Exactness: the integral of the rate maps the arrivals to those of a Poisson process of rate 1.
    times = diurnal(2000)
    integral = 5.0 * (times + 0.8 * 100 / (2 * math.pi) * (1 - np.cos(2 * math.pi * times / 100)))
    unit = np.cumsum(np.random.default_rng(0).standard_exponential(2000))
    assert integral == pytest.approx(unit, rel=1e-9)
    assert (np.diff(times) > 0).all()


def test_diurnal_rate_has_the_requested_swing() -> None:
    times = diurnal(20_000)
    # 40 days of 100 s; the rate averages 5, and 5 * (1 +- 0.8 * 2 / pi) over the halves of a day.
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)
    busy = np.mean((times % 100) < 50)
    assert busy == pytest.approx((1 + 0.8 * 2 / math.pi) / 2, abs=0.01)


def test_diurnal_without_swing_is_poisson() -> None:
    rng = np.random.default_rng(3)
    assert diurnal(50, amplitude=0.0, seed=3) == pytest.approx(list(islice(gamma_arrivals(rng, 5.0, 1.0), 50)))


def test_recorded_arrivals_keep_their_shape_at_any_rate() -> None:
    recorded = [10.0, 10.5, 14.0, 14.0, 20.0]
    scaled = scaled_arrivals(recorded, 2.0)
    # 4 gaps in 10 s are 0.4 per second; the scaled trace is five times as fast.
    assert scaled == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    for arrivals in ([], [1.0], [3.0, 3.0]):
        with pytest.raises(UsageError, match=f"{len(arrivals)} recorded arrivals span no time"):
            scaled_arrivals(arrivals, 1.0)


def test_files_of_arrivals(tmp_path: Path) -> None:
    vidur, azure = tmp_path / "vidur.csv", tmp_path / "azure.csv"
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5.0,374,44\n9.314579,396,109\n")
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert read_arrivals(vidur) == pytest.approx((0.0, 4.314579))
    assert read_arrivals(azure) == (0.0, 4.314579)


def arrivals_at(folder: Path, *times: str) -> tuple[float, ...]:
    (folder / "a.csv").write_text("TIMESTAMP\n" + "".join(f'"{time}"\n' for time in times))
    return read_arrivals(folder / "a.csv")


DAYS = ("2024-05-10", "2024/05/10", "20240510", "2024-5-10")
CLOCKS = ("07", "07:05", "7:5", "0705", "07:05:03", "070503", "07:05:03.1", "07:05:03.123", "07:05:03.1234567")
CLOCKS = (*CLOCKS, "07:05:03.123456789", "070503.25", "07:05:03,5")
ZONES = ("", "Z", "z", " UTC", " GMT", "+02:00", " +02:00", "+0200", "+02", "-05:30", "-0330", "+14:00", "-23:59")


def test_timestamps_are_parsed_as_by_pandas(tmp_path: Path) -> None:
    """Compare gaps from a fixed earlier time; pandas' other parser for a few formats drops nanoseconds."""
    num_compared = 0
    for day, separator, clock, zone in product(DAYS, "T ", CLOCKS, ZONES):
        text = f"{day}{separator}{clock}{zone}"
        first = f"2024-05-08 01:02:03.000000001{'Z' if zone else ''}"
        try:
            known = re.sub("z| UTC| GMT", "Z", text).replace(",", ".")
            pair = pd.to_datetime([first, known], utc=True, format="ISO8601").as_unit("ns").astype("int64")
        except ValueError:
            continue
        num_compared += 1
        assert arrivals_at(tmp_path, first, text) == (0.0, (pair[1] - pair[0]) / 1e9), text
    assert num_compared > 1000


def test_iso_8601_forms_that_pandas_does_not_parse(tmp_path: Path) -> None:
    for text, gap_s in {
        "2024-W19-5T00:00:00": 0,
        "2024W195 000000": 0,
        "2024-05-10": 0,
        "2024-05-10T00.5": 1800,
        "20240510T0000,5": 30,
        "2024-05-10t00:00:01": 1,
    }.items():
        assert arrivals_at(tmp_path, "2024-05-09 23:00:00", text) == (0.0, 3600.0 + gap_s), text
    assert arrivals_at(tmp_path, "2024-05-10T00:00Z", "2024-05-10T00:00\u221201:30") == (0.0, 5400.0)


def test_gaps_across_time_zones_equal_pandas(tmp_path: Path) -> None:
    """Compare randomly mixed zones in order of time, and pandas' output across the change to winter time."""
    rng = np.random.default_rng(0)
    moments = pd.to_datetime(np.sort(rng.integers(0, 10**18, 200)), utc=True)
    zones = [f"{'+-'[minutes < 0]}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}" for minutes in range(-720, 841, 15)]
    mixed = [str(moment.tz_convert(zone)) for moment, zone in zip(moments, rng.choice(zones, 200), strict=True)]
    night = pd.date_range("2024-10-26 22:30", periods=20, freq="17min30s", tz="UTC").tz_convert("Europe/Berlin")
    assert len({str(moment)[-6:] for moment in night}) == 2
    for texts in (mixed, [str(moment) for moment in night]):
        expected = pd.to_datetime(texts, utc=True, format="ISO8601").as_unit("ns").astype("int64").tolist()
        assert arrivals_at(tmp_path, *texts) == tuple((each - expected[0]) / 10**9 for each in expected)


@pytest.mark.parametrize(("first", "second"), [("Z", ""), ("", "+00:00")])
def test_mixing_timestamps_with_and_without_zone_is_refused(tmp_path: Path, first: str, second: str) -> None:
    has, had = ("a zone", "none") if second else ("no zone", "one")
    with pytest.raises(UsageError, match=rf"a.csv:4: TIMESTAMP is '.*', with {has}, but line 2 has {had}"):
        arrivals_at(tmp_path, *(f"2024-05-10 00:00:0{s}{zone}" for s, zone in enumerate((first, first, second))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv: recorded arrivals must be CSV with a column arrived_at or TIMESTAMP"),
        ("time\n1\n", "a.csv: recorded arrivals must be CSV"),
        ("arrived_at\n", "a.csv: the trace is empty"),
        ("arrived_at,b\n1,2\nsoon,2\n", "a.csv:3: arrived_at is 'soon', which is not a time"),
        ("arrived_at,b\n1,2\nnan,2\n", "a.csv:3: arrived_at is 'nan', but it must be finite"),
        ("b,arrived_at\n1,2\n1\n", "a.csv:3: arrived_at is None"),
        ("arrived_at\n2\n1\n", "a.csv:3: time goes back"),
        *(
            (f"TIMESTAMP\n{text}\n", "a.csv:2: TIMESTAMP is '.*', which is not a time")
            for text in (
                "2024-05-10 24:00:01",
                "2024-05-10 07:60",
                "2024-05-10 07:05:60",
                "2024-05-10 07:05:03+24:00",
                "2024-05-10 07:05:03+02:60",
                "2024-05-10 07:05:03 Europe/Berlin",
                "2024-05-10 07:",
                "2024-05-10x07:05",
                "2024-W19-8T07:05",
                "05/10/2024 07:05",
                "1715299200",
            )
        ),
        ("TIMESTAMP\n2023-13-16 18:15:46\n", "a.csv:2: TIMESTAMP is '2023-13-16 18:15:46', which is not a time"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_arrivals(tmp_path / "a.csv")
    with pytest.raises(UsageError, match="cannot read the arrivals: No such file"):
        read_arrivals(tmp_path / "b.csv")


def test_traces_of_both_kinds() -> None:
    config = TraceConfig(kind="diurnal", request_rate=4.0, num_prompts=None, duration_s=200.0, period_s=100.0, seed=2)
    requests = generate_trace(config, ["a", "b"])
    assert requests == generate_trace(config, ["a", "b"])
    assert 650 < len(requests) < 950
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(requests))

    recorded = TraceConfig(kind="recorded", request_rate=2.0, num_prompts=None, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(recorded, ["a"])] == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    # The first requests have the requested rate.
    some = TraceConfig(kind="recorded", request_rate=2.0, num_prompts=3, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(some, ["a"])] == pytest.approx([0.0, 0.125, 1.0])
    # The contents of requests do not depend on their arrival times.
    poisson = generate_trace(TraceConfig(num_prompts=3), ["a", "b"])
    assert [one.seed for one in generate_trace(some, ["a", "b"])] == [one.seed for one in poisson]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "diurnal", "amplitude": 1.1}, "amplitude is 1.1, but it must be from 0 to 1"),
        ({"kind": "diurnal", "period_s": 0.0}, "period is 0 s"),
        ({"kind": "diurnal", "request_rate": math.inf}, "request rate is inf, but a diurnal trace needs a finite one"),
        ({"kind": "diurnal", "num_prompts": None}, "the trace never ends"),
        ({"kind": "recorded"}, "a recorded trace needs arrivals"),
        ({"kind": "recorded", "arrivals_s": (1.0,), "cv": 2.0}, "cv is 2, but a recorded trace takes none: use gamma"),
        ({"kind": "recorded", "arrivals_s": (0.0, 1.0), "request_rate": 0.0}, "request rate is 0"),
    ],
)
def test_invalid_settings_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TraceConfig(**fields)
