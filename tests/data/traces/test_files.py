"""Trace files: the three formats are equivalent, and errors in a line are reported with its number."""

import json
import random
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from patchedserve.data.adapters import adapters_text
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import MAX_PRIORITY, MAX_SEED, Request
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.traces.draws import TraceDefaults
from patchedserve.data.traces.files import load_trace, save_trace
from patchedserve.data.traces.traces import TraceConfig, generate_trace

PROMPTS = ("a taco", "a cat", "a candle")
DEFAULTS = TraceDefaults(prompts=PROMPTS, resolutions=parse_list("128,192"), num_inference_steps=9, seed=5)
JSONL = '{"timestamp": 0, "width": 128, "height": 128, "prompt": "a"}\n'


def write(folder: Path, content: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def random_request(rng: random.Random, request_id: int, arrival_s: float) -> Request:
    alphabet = "ab '\"\\,;{}()=\n\t\r\u2028é🌮\x1c"
    text = lambda: "".join(rng.choices(alphabet, k=rng.randint(1, 30)))  # noqa: E731
    return Request(
        request_id=request_id,
        prompt=text(),
        resolution=Resolution(8 * rng.randint(1, 99), 8 * rng.randint(1, 99)),
        num_inference_steps=rng.randint(1, 99),
        guidance_scale=rng.uniform(0, 9),
        seed=rng.randint(0, MAX_SEED),
        negative_prompt=rng.choice([None, "", text()]),
        arrival_s=arrival_s,
        slo_s=rng.choice([None, rng.uniform(1e-3, 9)]),
        adapters=rng.choice([(), (("ink", rng.uniform(-9, 9)), ("toy-2.1", 1.0))]),
        cache=rng.choice([True, False]),
        owner=rng.choice(["", text()]),
        weight=rng.choice([1.0, 0.25, 3.0]),
        priority=rng.choice([0, rng.randint(-MAX_PRIORITY, MAX_PRIORITY)]),
    )


def test_saved_traces_read_back_equal(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(50):
        arrivals = sorted(rng.uniform(0, 9) for _ in range(10))
        ids = rng.sample(range(1000), 10)
        trace = [random_request(rng, i, arrival_s) for i, arrival_s in zip(ids, arrivals, strict=True)]
        path = tmp_path / "deep" / "trace.jsonl"
        save_trace(path, trace)
        assert load_trace(path) == trace
        assert load_trace(path, defaults=DEFAULTS) == trace
        assert [p.name for p in path.parent.iterdir()] == ["trace.jsonl"]


def test_request_lines_of_random_requests_read_back_equal(tmp_path: Path) -> None:
    rng = random.Random(1)
    trace = [random_request(rng, i, float(i)) for i in range(50)]
    lines = []
    for request in trace:
        values = {field.name: getattr(request, field.name) for field in fields(request)}
        values |= values.pop("resolution")._asdict()
        values["timestamp"] = values.pop("arrival_s")
        values["lora"] = adapters_text(values.pop("adapters"))
        for name in ("references", "controls"):
            assert not values.pop(name), "they have no field in traces"
        lines.append(f"Request({', '.join(f'{name}={value!r}' for name, value in values.items())})\n")
    assert load_trace(write(tmp_path, "".join(lines))) == trace


def test_generated_trace_round_trips_through_a_file(tmp_path: Path) -> None:
    trace = generate_trace(TraceConfig(num_prompts=100, slo_s=3.0), PROMPTS)
    save_trace(tmp_path / "trace.jsonl", trace)
    assert load_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    "content",
    [
        '{"timestamp": 0.5, "width": 128, "height": 192, "prompt": "a \\"b\\", c", "num_inference_steps": 28,'
        ' "slo_ms": 1500, "num_frames": 1, "seed": null}\n\n'
        '{"arrival_s": 2, "resolution": "256", "prompt": "d", "negative_prompt": "e", "seed": 7, "request_id": 9}\n',
        "\ufeff\r\nrequest_id,timestamp,width,height,prompt,negative_prompt,num_inference_steps,slo_ms,seed\r\n"
        '0,0.5,128,192,"a ""b"", c",,28,1500,\r\n9,2,256,256,d,e,,,7\r\n',
        "Request(request_id=0, timestamp=0.5, height=192, width=128, num_frames=1, prompt='a \"b\", c', "
        "num_inference_steps=28, slo_ms=1500.0)\n"
        "  Request(request_id=9, timestamp=2, height=256, width=256, prompt='d', negative_prompt='e', seed=7)",
    ],
    ids=["jsonl", "csv", "lines"],
)
@pytest.mark.parametrize("name", ["trace.txt", "trace.csv"])
def test_format_is_detected_from_the_first_line(tmp_path: Path, content: str, name: str) -> None:
    first, second = load_trace(write(tmp_path, content, name), defaults=replace(DEFAULTS, guidance_scale=3.0))
    assert first == Request(0, 'a "b", c', Resolution(128, 192), 28, 3.0, seed=first.seed, arrival_s=0.5, slo_s=1.5)
    assert second == Request(9, "d", Resolution(256, 256), 9, 3.0, seed=7, negative_prompt="e", arrival_s=2.0)


def test_every_format_can_disable_the_cache_per_request(tmp_path: Path) -> None:
    table = "timestamp,resolution,prompt,cache\n0,128,a,false\n1,128,b,true\n2,128,c,\n"
    assert [request.cache for request in load_trace(write(tmp_path, table, "trace.csv"))] == [False, True, True]
    line = write(tmp_path, JSONL.replace("}", ', "cache": false}'))
    assert [request.cache for request in load_trace(line)] == [False]


def test_line_of_the_conventional_format(tmp_path: Path) -> None:
    line = (
        "Request(request_id=0, timestamp=0.0, height=256, width=256, num_frames=1, prompt='...', "
        "negative_prompt='...', num_inference_steps=28)"
    )
    (request,) = load_trace(write(tmp_path, line))
    assert request == Request(0, "...", Resolution(256, 256), 28, seed=request.seed, negative_prompt="...")


def test_arrival_times_alone_become_a_full_trace(tmp_path: Path) -> None:
    content = "timestamp\n" + "".join(f"{i / 10}\n" for i in range(300))
    trace = load_trace(write(tmp_path, content), defaults=replace(DEFAULTS, mix=(3, 1), slo_s=2.0))
    assert Counter(request.prompt for request in trace) == dict.fromkeys(PROMPTS, 100)
    shares = Counter(request.resolution for request in trace)
    assert shares[Resolution(128, 128)] / 300 == pytest.approx(0.75, abs=0.1)
    assert len({request.seed for request in trace}) == 300
    assert {(request.num_inference_steps, request.slo_s) for request in trace} == {(9, 2.0)}
    assert trace == load_trace(write(tmp_path, content), defaults=replace(DEFAULTS, mix=(3, 1), slo_s=2.0))


def test_fields_of_one_line_do_not_change_other_requests(tmp_path: Path) -> None:
    bare = [json.dumps({"timestamp": i}) for i in range(5)]
    told = [*bare]
    told[1] = json.dumps({"timestamp": 1, "prompt": "x", "seed": 3, "resolution": "64x72"})
    one = load_trace(write(tmp_path, "\n".join(bare)), defaults=DEFAULTS)
    two = load_trace(write(tmp_path, "\n".join(told)), defaults=DEFAULTS)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, True, True, True]


def test_equal_timestamps_keep_file_order(tmp_path: Path) -> None:
    assert len(load_trace(write(tmp_path, JSONL * 3))) == 3


def test_multi_line_csv_prompts_keep_line_numbers_correct(tmp_path: Path) -> None:
    content = 'timestamp,prompt,width,height\n0,"a\ncat",128,128\n1,b,128,128\n{bad}'
    assert load_trace(write(tmp_path, content.replace("{bad}", "")))[0].prompt == "a\ncat"
    with pytest.raises(UsageError, match=r"trace.jsonl:5: has 1 columns, but the header has 4"):
        load_trace(write(tmp_path, content))


def test_request_lines_are_never_evaluated(tmp_path: Path) -> None:
    target = tmp_path / "made"
    line = f"Request(timestamp=0, width=128, height=128, prompt=open({str(target)!r}, 'w').name)\n"
    with pytest.raises(UsageError, match=r"trace.jsonl:1: "):
        load_trace(write(tmp_path, line))
    assert not target.exists()


CALL = "Request(timestamp=0, width=128, height=128, prompt='a'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "trace.jsonl: the trace is empty"),
        ("\n \n", "trace.jsonl: the trace is empty"),
        ("timestamp,prompt\n", "trace.jsonl: the trace is empty"),
        (JSONL + '{"timestamp": 1,\n', "trace.jsonl:2: not valid JSON"),
        (JSONL + "\n\n[1]\n", "trace.jsonl:4: the line must be one JSON object"),
        (JSONL + "Request(timestamp=1)\n", "trace.jsonl:2: not valid JSON"),
        ('{"a":' * 100_000, "trace.jsonl:1: not valid JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "trace.jsonl:1: not valid JSON"),
        ('{"timestamp": ' + "9" * 400 + "}", "trace.jsonl:1: timestamp is 9+, but it must be a finite number"),
        (JSONL.replace("0", "NaN", 1), "trace.jsonl:1: arrival_s is nan"),
        (JSONL.replace("0", "1e999", 1), "trace.jsonl:1: arrival_s is inf"),
        (JSONL.replace("0", "-1", 1), "trace.jsonl:1: arrival_s is -1"),
        (JSONL.replace("0", '"now"', 1), "trace.jsonl:1: timestamp is 'now', but it must be a finite number"),
        (JSONL.replace("0", "true", 1), "trace.jsonl:1: timestamp is True"),
        (JSONL.replace("128", "128.5", 1), "trace.jsonl:1: width is 128.5, but it must be a whole number"),
        (JSONL.replace("128", "100", 1), "trace.jsonl:1: width is 100 in resolution 100x128"),
        (JSONL.replace('"a"', "5"), "trace.jsonl:1: prompt is 5, but it must be text"),
        (JSONL.replace("prompt", "promt"), "trace.jsonl:1: unknown field 'promt'; allowed are request_id, arrival_s"),
        (JSONL.replace('"height": 128, ', ""), "trace.jsonl:1: width and height must be given together"),
        (JSONL.replace("}", ', "resolution": "64"}'), "trace.jsonl:1: resolution and width are both given"),
        (JSONL.replace("}", ', "arrival_s": 0}'), "trace.jsonl:1: arrival_s and timestamp are both given"),
        (JSONL.replace("}", ', "num_frames": 16}'), "trace.jsonl:1: num_frames is not 1, but only images"),
        (JSONL.replace("}", ', "width": 64}'), "trace.jsonl:1: not valid JSON: width is given twice"),
        (JSONL.replace("}", ', "slo_ms": 0}'), "trace.jsonl:1: slo_s is 0"),
        (JSONL.replace("}", ', "seed": -1}'), "trace.jsonl:1: seed is -1"),
        (JSONL.replace("}", ', "lora": "ink:x"}'), "trace.jsonl:1: the scale of adapter ink is 'x'"),
        (JSONL.replace("}", ', "cache": 1}'), "trace.jsonl:1: cache is 1, but it must be true or false"),
        (JSONL.replace("}", ', "seed": true}'), "trace.jsonl:1: seed is True, but it must be a number"),
        (JSONL.replace("}", ', "seed": [1]}'), r"trace.jsonl:1: seed is \[1\], but it must be a whole number"),
        (JSONL.replace('"a"', "false"), "trace.jsonl:1: prompt is False, but it must be text"),
        ('{"width": 128, "height": 128, "prompt": "a"}', r"trace.jsonl:1: timestamp \(or arrival_s\) is missing"),
        ('{"timestamp": 0, "prompt": "a"}', "trace.jsonl:1: resolution is missing, and there is no default"),
        ('{"timestamp": 0, "width": 128, "height": 128}', "trace.jsonl:1: prompt is missing, and there is no default"),
        (
            JSONL + "\n" + JSONL.replace("0", "2.5", 1) + JSONL.replace("0", "1", 1),
            "trace.jsonl:4: time goes back from 2.5 s on line 3 to 1.0 s",
        ),
        (
            JSONL.replace("}", ', "request_id": 1}') + JSONL,
            "trace.jsonl:2: request_id 1 was given before, on line 1",
        ),
        (CALL + ")\n" + CALL + "\n", "trace.jsonl:2: the line must be Request"),
        (CALL + ")\n" + CALL.replace("Request", "print") + ")\n", "trace.jsonl:2: the line must be Request"),
        (CALL + ", **{'seed': 1})", "trace.jsonl:1: the line must be Request"),
        ("Request(0, 0.0)", "trace.jsonl:1: the line must be Request"),
        (CALL + ", seed=1 + x)", "trace.jsonl:1: "),
        (CALL + ", seed=1, seed=2)", "trace.jsonl:1: seed is given twice"),
        (CALL + ", num_frames=2)", "trace.jsonl:1: num_frames is not 1"),
        (CALL + ", seed=" + "(" * 5000 + ")", "trace.jsonl:1: "),
        (CALL + ", fps=2)", "trace.jsonl:1: unknown field 'fps'"),
        ("when,prompt\n0,a\n", "trace.jsonl:1: not a trace: the first line must be"),
        ("garbage\n", "trace.jsonl:1: not a trace"),
        ("timestamp,promt\n0,a\n", "trace.jsonl:1: unknown column 'promt'; allowed are"),
        ("timestamp,seed,seed\n0,1,2\n", "trace.jsonl:1: column 'seed' occurs twice"),
        ("timestamp,resolution,prompt\n0,128,a\n1,128\n", "trace.jsonl:3: has 2 columns, but the header has 3"),
        ("timestamp,resolution,prompt\n0,128x,a\n", "trace.jsonl:2: resolution is '128x'"),
        ('timestamp,resolution,prompt\n0,128,"a" b\n', "trace.jsonl:2: malformed table"),
        ('timestamp,resolution,prompt\n0,128,"a', "trace.jsonl:2: malformed table"),
        (JSONL + JSONL.replace('"a"', '"a \\ud83d cat"'), "trace.jsonl:2: prompt holds a character that is not text"),
        (JSONL.replace('"a"', '"a\\u0000"'), "trace.jsonl:1: prompt holds a character that is not text"),
        (JSONL.replace("}", ', "negative_prompt": "\\udc00"}'), "trace.jsonl:1: negative_prompt holds a character"),
        (
            JSONL.replace("}", ', "image": "a\\ud83d.png", "mask": "box:1", "mask_ratio": 0.5}'),
            "trace.jsonl:1: image holds a character that is not text",
        ),
        (CALL[:-1] + "\\ud83d')", "trace.jsonl:1: prompt holds a character that is not text"),
        ("timestamp,resolution,prompt\n0,128,a\0b\n", "trace.jsonl:2: prompt holds a character that is not text"),
        (b"PAR1\x00\xff\xfe", "trace.jsonl: not UTF-8 text"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_traces_give_a_one_line_error(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UsageError, match=message) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: cannot read the trace: No such file"):
        load_trace(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot read the trace: Is a directory"):
        load_trace(str(tmp_path))


def test_random_damage_is_reported_or_harmless(tmp_path: Path) -> None:
    """For any damage, the reader returns requests or raises an error of one line that names the file; no crash."""
    rng = random.Random(3)
    trace = [replace(random_request(rng, i, float(i)), prompt=f"p{i}", negative_prompt=None) for i in range(4)]
    save_trace(tmp_path / "good.jsonl", trace)
    forms = [
        (tmp_path / "good.jsonl").read_bytes(),
        "".join(f"Request(timestamp={i}, width=128, height=64, prompt='p{i}')\n" for i in range(4)).encode(),
        ("timestamp,width,height,prompt\n" + "".join(f"{i},128,64,p{i}\n" for i in range(4))).encode(),
    ]
    num_told = 0
    for _ in range(600):
        content = bytearray(rng.choice(forms))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(content))
            content[place : place + rng.randint(0, 3)] = bytes(
                rng.choices(b"\"'(){},:=\\\n0-9aN\x00\xff", k=rng.randint(0, 3))
            )
        path = write(tmp_path, bytes(content), "damaged")
        try:
            requests, told = load_trace(path), None
        except UsageError as error:
            requests, told = [], str(error)
        if told is None:
            assert requests
        else:
            num_told += 1
            assert told.startswith(f"{path}:")
            assert "\n" not in told
    assert 100 < num_told < 600
