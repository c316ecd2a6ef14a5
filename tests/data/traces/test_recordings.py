"""Recorded traces in their published formats: files that the tests write, and rows that are malformed."""

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse, parse_list
from patchedserve.data.traces.recordings import Recording, Selection, read_recording
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.runs.trace_requests import draw_trace
from patchedserve.serving.runs.trace_settings import TraceSettings

from ...support.caption_sets import METADATA_SCHEMA

SMALL = ModelDefaults(default_resolution=parse("256"), resolutions=parse_list("128,256,192x320"))


def test_files_of_arrivals(tmp_path: Path) -> None:
    vidur, azure = tmp_path / "vidur.csv", tmp_path / "azure.csv"
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5.0,374,44\n9.314579,396,109\n")
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert read_recording("azure", vidur).arrivals_s == pytest.approx((0.0, 4.314579))
    assert read_recording("azure", azure).arrivals_s == (0.0, 4.314579)


def arrivals_at(folder: Path, *times: str) -> tuple[float, ...]:
    (folder / "a.csv").write_text("TIMESTAMP\n" + "".join(f'"{time}"\n' for time in times))
    return read_recording("azure", folder / "a.csv").arrivals_s


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
        read_recording("azure", tmp_path / "a.csv")
    with pytest.raises(UsageError, match="cannot read the arrivals: No such file"):
        read_recording("azure", tmp_path / "b.csv")


def diffusiondb(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema = METADATA_SCHEMA) -> Path:
    """Write a metadata table with these rows; what they omit has a usual value."""
    usual = {
        "image_name": "a.png",
        "prompt": "a hat",
        "part_id": 1,
        "seed": 7,
        "step": 50,
        "cfg": 7.5,
        "sampler": 8,
        "width": 512,
        "height": 512,
        "user_name": "anna",
        "timestamp": pd.Timestamp("2022-08-11 09:05", tz="UTC"),
        "image_nsfw": 0.1,
        "prompt_nsfw": 0.1,
    }
    path = folder / "metadata.parquet"
    pq.write_table(pa.Table.from_pylist([usual | row for row in rows], schema), path)
    return path


def minute(number: float) -> Any:
    return pd.Timestamp(1_660_208_400 + 60 * number, unit="s", tz="UTC")


def test_diffusiondb_gives_times_sizes_steps_and_users(tmp_path: Path) -> None:
    rows = [
        {"timestamp": minute(2.5), "user_name": "ben", "width": 512, "height": 768, "prompt": "late", "seed": 3},
        {"timestamp": minute(0.5), "step": 20, "sampler": 1, "prompt": "first", "cfg": 12.0},
        {"timestamp": None, "user_name": None, "prompt": "deleted"},
        {"timestamp": minute(1.25), "step": 20, "sampler": 5, "prompt": "heun"},
        {"timestamp": minute(1.5), "width": None, "prompt": "without a size"},
    ]
    recording = read_recording("diffusiondb", diffusiondb(tmp_path, rows))
    assert recording.arrivals_s == pytest.approx((0.0, 45.0, 120.0))
    first, heun, late = recording.fields
    assert first == {
        "resolution": Resolution(512, 512),
        "num_inference_steps": 20,
        "prompt": "first",
        "guidance_scale": 12.0,
        "seed": 7,
        "owner": "anna",
    }
    assert (heun["prompt"], heun["num_inference_steps"]) == ("heun", 39), "two calls a step, one in the last"
    assert (late["resolution"], late["owner"], late["seed"]) == (Resolution(512, 768), "ben", 3)


def test_whole_minutes_are_spread(tmp_path: Path) -> None:
    rows = [{"timestamp": minute(number // 200), "seed": number} for number in range(1000)]
    path = diffusiondb(tmp_path, rows)
    recording = read_recording("diffusiondb", path)
    times = np.array(recording.arrivals_s)
    assert (np.diff(times) > 0).all()
    # 200 a minute, uniform in each: every second of the minute gets some of the thousand.
    assert np.bincount(np.floor((times % 60) / 10).astype(int), minlength=6).min() > 120
    begun = [each["seed"] // 200 for each in recording.fields]
    assert begun == sorted(begun), "requests stay in their minute"
    assert read_recording("diffusiondb", path) == recording
    assert read_recording("diffusiondb", path, Selection(seed=1)) != recording
    limited = read_recording("diffusiondb", path, Selection(limit=30))
    assert limited == Recording(recording.arrivals_s[:30], recording.fields[:30])


def test_users_are_selected(tmp_path: Path) -> None:
    names = ["anna", "ben", "carla", None, "deleted_account"]
    rows = [{"timestamp": minute(number + 0.5), "user_name": names[number % 5]} for number in range(50)]
    path = diffusiondb(tmp_path, rows)

    def owners(text: str | None, seed: int = 0) -> Counter[str | None]:
        fields = read_recording("diffusiondb", path, Selection(text, seed=seed)).fields
        return Counter(each.get("owner") for each in fields)

    assert owners(None) == dict.fromkeys(names, 10)
    assert owners("ben, anna") == {"ben": 10, "anna": 10}
    assert owners("deleted_account") == {"deleted_account": 10}
    assert owners("2") == owners("2")
    drawn = {frozenset(owners("2", seed)) for seed in range(20)}
    assert drawn == {frozenset(pair) for pair in (("anna", "ben"), ("anna", "carla"), ("ben", "carla"))}
    for text, message in (("dora", "names 'dora', which has no requests"), ("4", "from 1 to 3"), ("0", "from 1 to 3")):
        with pytest.raises(UsageError, match=rf"metadata.parquet: --owners.* {message}"):
            owners(text)


def test_rows_are_found_in_all_batches_of_a_large_table(tmp_path: Path) -> None:
    count = 150_000
    table = pa.table(
        {
            "prompt": pa.array(["a"] * count),
            "seed": pa.array(np.arange(count, dtype=np.uint32)),
            "step": pa.array(np.full(count, 30, np.uint16)),
            "cfg": pa.array(np.full(count, 7, np.float32)),
            "sampler": pa.array(np.full(count, 8, np.uint8)),
            "width": pa.array(np.full(count, 512, np.uint16)),
            "height": pa.array(np.full(count, 512, np.uint16)),
            "user_name": pa.array([f"user {number % 5000}" for number in range(count)]),
            # The last row is the first request.
            "timestamp": pa.array(np.arange(count)[::-1] * 1_500_000 + 1, pa.timestamp("us", "UTC")),
        }
    )
    pq.write_table(table, tmp_path / "metadata-large.parquet", row_group_size=40_000)
    recording = read_recording("diffusiondb", tmp_path / "metadata-large.parquet", Selection("user 4,user 4999"))
    seeds = [each["seed"] for each in recording.fields]
    assert seeds == [number for number in reversed(range(count)) if number % 5000 in (4, 4999)]
    assert recording.arrivals_s[:2] == pytest.approx((0.0, 4995 * 1.5))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"width": 0}, "width is 0, but it must be a whole number from 1 to 65536"),
        ({"height": 0}, "height is 0"),
        ({"step": 0}, "step is 0, but it must be a whole number from 1 to 1000"),
        ({"step": 1001}, "step is 1001"),
        ({"sampler": 10}, "sampler is 10, but it must be a whole number from 1 to 9"),
        ({"cfg": float("nan")}, "guidance_scale is nan"),
        ({"cfg": -1.0}, "guidance_scale is -1.0"),
        ({"prompt": "a\0b"}, "prompt"),
    ],
)
def test_malformed_rows_of_diffusiondb_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"timestamp": minute(5.5)}, {}, {"timestamp": minute(0.5)} | row]
    path = diffusiondb(tmp_path, rows)
    with pytest.raises(UsageError, match=rf"metadata.parquet: row 2: .*{message}"):
        read_recording("diffusiondb", path)


def test_tables_that_are_not_diffusiondb_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.parquet"
    for name, column, message in (
        ("sampler", None, "has no column sampler, so that it is not a trace of DiffusionDB"),
        ("user_name", None, "has no column user_name"),
        ("timestamp", pa.array([5]), "the column timestamp holds int64, but it must hold times"),
        ("user_name", pa.array([5]), "the column user_name holds int64, but it must hold texts"),
        ("width", pa.array(["wide"]), "row 0: width is 'wide', but it must be a whole number"),
    ):
        table = pq.read_table(diffusiondb(tmp_path, [{"timestamp": minute(0.5)}]))
        place = table.schema.get_field_index(name)
        pq.write_table(table.remove_column(place) if column is None else table.set_column(place, name, column), path)
        with pytest.raises(UsageError, match=f"metadata.parquet: {message}"):
            read_recording("diffusiondb", path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match="cannot read the trace: it is damaged or not parquet"):
        read_recording("diffusiondb", path)
    with pytest.raises(UsageError, match="the trace is empty"):
        read_recording("diffusiondb", diffusiondb(tmp_path, [{"timestamp": None}]))


GENTD26 = (
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,negative_prompt_length,"
    "num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora\n"
)


def gentd26(folder: Path, *lines: str) -> Path:
    (folder / "lora_request_trace.csv").write_text(GENTD26 + "".join(line + "\n" for line in lines))
    return folder / "lora_request_trace.csv"


def test_gentd26_gives_times_steps_images_and_groups(tmp_path: Path) -> None:
    path = gentd26(
        tmp_path,
        "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0000,63.0,26.0,1.0,30.0,M0000,0",
        "2024-11-15 16:59:00,IMG_2_IMG,SUCCEED,53.0,G0001,93.0,,8.0,40.0,M0001,0",
        "2024-11-15 16:58:00,TXT_2_IMG,FAILED,3.0,G0001,93.0,,2.0,40.0,M0001,1",
        "2024-11-15 16:59:00,INPAINTING,SUCCEED,9.0,G0001,12.0,,1.0,40.0,M0001,0",
        "2024-11-15 16:59:30,TXT_2_IMG,PENDING,0.0,G0002,,,,,,0",
        "2024-11-15 17:00:00,TXT_2_IMG,SUCCEED,3.0,G0000,93.0,,,20.0,M0001,1",
    )
    recording = read_recording("gentd26", path)
    assert recording.arrivals_s == (0.0, 10.0, 10.0, 130.0)
    assert [each["num_inference_steps"] for each in recording.fields] == [30, 40, 40, 20]
    assert [each["owner"] for each in recording.fields] == ["G0000", "G0001", "G0001", "G0000"]
    assert read_recording("gentd26", path, Selection("G0001")).arrivals_s == (0.0, 0.0)
    assert len(read_recording("gentd26", path, Selection(limit=2)).fields) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("today,TXT_2_IMG,SUCCEED,1.0,G0,1.0,,1.0,30.0,M0,0", "gmt_create is 'today', which is not a time"),
        ("2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,1.0,G0,1.0,,1.0,30.5,M0,0", "num_inference_steps is '30.5'"),
        ("2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,1.0,G0,1.0,,none,30.0,M0,0", "num_images_per_prompt is 'none'"),
        ("2024-11-15 16:57:50,TXT_2_IMG", "has 2 columns, but the header has 11"),
    ],
)
def test_malformed_lines_of_gentd26_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = gentd26(tmp_path, "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0000,63.0,26.0,1.0,30.0,M0000,0", line)
    with pytest.raises(UsageError, match=f"lora_request_trace.csv:3: {re.escape(message)}"):
        read_recording("gentd26", path)
    path.write_text("gmt_create,predict_type\n")
    with pytest.raises(UsageError, match="has no column groupId, num_images_per_prompt, num_inference_steps, so that"):
        read_recording("gentd26", path)


def katz(folder: Path, entries: object) -> Path:
    (folder / "diffusion_model_request_trace.json").write_text(json.dumps(entries))
    return folder / "diffusion_model_request_trace.json"


def test_katz_gives_times_and_services(tmp_path: Path) -> None:
    def entry(timestamp: object, service: str, **more: object) -> dict[str, object]:
        rest = {"ip": "10", "base_model_id": "b0", "controlnets": ["c1"], "loras": None}
        return {"timestamp": timestamp, "scene_id": service, **rest, **more}

    for first, second in ((1716800000, 1716800000.5), ("2024-05-27 10:00:00", "2024-05-27T10:00:00.500")):
        path = katz(tmp_path, [entry(second, "B"), entry(first, "A"), entry(None, "A"), entry(second, "A")])
        assert read_recording("katz", path) == Recording((0.0, 0.5, 0.5), tuple({"owner": each} for each in "ABA"))
        assert read_recording("katz", path, Selection("A")).arrivals_s == (0.0, 0.5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": 1}, "holds an object, but a trace of Katz is a list"),
        ([], "the trace is empty"),
        ([5], "row 0: holds a number"),
        ([{"timestamp": 1.0, "scene_id": "A"}, {"timestamp": 1.0}], "row 1: has no scene_id"),
        ([{"timestamp": "noon", "scene_id": "A"}], "row 0: timestamp is 'noon', which is not a time"),
        ([{"timestamp": True, "scene_id": "A"}], "row 0: timestamp is True"),
        ([{"timestamp": 1, "scene_id": 5}], "row 0: scene_id is 5"),
    ],
)
def test_malformed_entries_of_katz_are_named(tmp_path: Path, entries: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"diffusion_model_request_trace.json: {message}"):
        read_recording("katz", katz(tmp_path, entries))
    (tmp_path / "half.json").write_text('[{"timestamp": 1')
    with pytest.raises(UsageError, match=r"half.json: not valid JSON, perhaps half-written"):
        read_recording("katz", tmp_path / "half.json")


def test_recorded_requests_are_served_on_a_small_model(tmp_path: Path) -> None:
    sizes = [(512, 512), (512, 768), (256, 256), (1024, 512)]
    rows = [
        {"timestamp": minute(number + 0.5), "width": width, "height": height, "prompt": f"picture {number}"}
        for number, (width, height) in enumerate(sizes)
    ]
    settings = TraceSettings("diffusiondb", arrivals=diffusiondb(tmp_path, rows), request_rate=2.0)
    requests = draw_trace(settings, SMALL)
    assert [str(request.resolution) for request in requests] == ["256x256", "192x320", "128x128", "256x256"]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert [request.prompt for request in requests] == [f"picture {number}" for number in range(4)]
    assert {(r.num_inference_steps, r.guidance_scale, r.seed, r.owner) for r in requests} == {(50, 7.5, 7, "anna")}


def test_speed_replays_the_recorded_times(tmp_path: Path) -> None:
    path = diffusiondb(tmp_path, [{"timestamp": minute(number + 0.5)} for number in range(4)])
    requests = draw_trace(TraceSettings("diffusiondb", arrivals=path, speed=120.0), SMALL)
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    cut = draw_trace(TraceSettings("diffusiondb", arrivals=path, speed=120.0, duration_s=1.2), SMALL)
    assert cut == requests[:3]
    (tmp_path / "own.jsonl").write_text('{"arrival_s": 2, "prompt": "a"}\n{"arrival_s": 5, "prompt": "a"}\n')
    own = draw_trace(TraceSettings(str(tmp_path / "own.jsonl"), speed=2.0, from_zero=True), SMALL)
    assert [request.arrival_s for request in own] == [0.0, 1.5]


def test_given_settings_replace_recorded_ones(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    path = diffusiondb(tmp_path, [{"timestamp": minute(number + 0.5)} for number in range(3)])
    settings = TraceSettings("diffusiondb", arrivals=path, prompts=prompts, num_inference_steps=4, guidance_scale=1.0)
    requests = draw_trace(settings, SMALL)
    assert {(r.prompt, r.num_inference_steps, r.guidance_scale) for r in requests} == {("a cat", 4, 1.0)}


def test_recordings_without_sizes_draw_them(tmp_path: Path) -> None:
    line = "2024-11-15 16:57:{:02},TXT_2_IMG,SUCCEED,32.0,G0000,63.0,26.0,1.0,30.0,M0000,0"
    path = gentd26(tmp_path, *(line.format(second) for second in range(30)))
    requests = draw_trace(TraceSettings("gentd26", arrivals=path, mix="1,1,0"), SMALL)
    assert {str(request.resolution) for request in requests} == {"128x128", "256x256"}
    assert {request.num_inference_steps for request in requests} == {30}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace": "katz"}, "--trace katz replays recorded arrivals: name their file with --arrivals"),
        ({"arrivals": Path("a.csv")}, "--arrivals is a.csv, but it belongs to recorded traces, not to --trace poisson"),
        ({"owners": "5"}, "--owners is 5, but it belongs to recorded traces, not to --trace poisson"),
        ({"speed": 2.0}, "--speed is 2, but it belongs to recorded traces and trace files"),
        ({"trace": "diffusiondb", "mix": "1,1,1"}, "--mix is 1,1,1, but --trace diffusiondb has sizes of its own"),
        ({"trace": "diffusiondb", "speed": 0.0}, "speed is 0, but it must be more than 0 and finite"),
        ({"trace": "azure", "owners": "2"}, "--owners is 2, but traces of kind azure name no users"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    if settings.get("trace") in ("diffusiondb", "azure"):
        settings = {"arrivals": diffusiondb(tmp_path, [{"timestamp": minute(0.5)}, {}]), **settings}
    with pytest.raises(UsageError, match=re.escape(message)):
        draw_trace(TraceSettings(**settings), SMALL)
