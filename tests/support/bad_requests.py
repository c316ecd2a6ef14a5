"""Invalid requests and the errors that they must receive, for tests of the parser and of a server."""

from typing import Any

from patchedserve.data.requests import MAX_SEED

WRONG: list[tuple[dict[str, Any], str | None, str, int]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter", 400),
    ({"prompt": 3}, "prompt", "invalid_value", 400),
    ({"prompt": ["a cat"]}, "prompt", "invalid_value", 400),
    *(({"prompt": value}, "prompt", "invalid_value", 400) for value in ("", " \n")),
    ({"prompt": "x" * 32_001}, "prompt", "invalid_value", 400),
    ({"prompt": "a\0b"}, "prompt", "invalid_value", 400),
    ({"prompt": "\ud800"}, "prompt", "invalid_value", 400),
    ({"negative_prompt": 1}, "negative_prompt", "invalid_value", 400),
    ({"negative_prompt": "x" * 32_001}, "negative_prompt", "invalid_value", 400),
    *(({"n": value}, "n", "invalid_value", 400) for value in (0, 11, -1, 1.5, True, "2", [], 10**30)),
    *(
        ({"size": value}, "size", "invalid_value", 400)
        for value in (
            "x",
            "128",
            "0x128",
            "129x128",
            "-128x128",
            "1e3x8",
            "\uff11\uff12\uff18x128",
            "100000x10000",
            "128X128",
            "128x128x128",
            " 128x128",
            "",
            128,
            "512x512",
            "9999999x8",
        )
    ),
    *(
        ({"num_inference_steps": value}, "num_inference_steps", "invalid_value", 400)
        for value in (0, -1, 201, 1.5, "30", True, 10**400)
    ),
    *(
        ({"guidance_scale": value}, "guidance_scale", "invalid_value", 400)
        for value in (-1, 101, "4", True, float("inf"), float("nan"))
    ),
    *(({"seed": value}, "seed", "invalid_value", 400) for value in (-1, 2**63, True, "0", 1.0)),
    ({"seed": MAX_SEED, "n": 2}, "seed", "invalid_value", 400),
    *(({"slo": value}, "slo", "invalid_value", 400) for value in (0, -1, float("inf"), "5", True, 1e9)),
    *(
        ({"header_slo": value}, "X-SLO-Seconds", "invalid_value", 400)
        for value in ("0", "-1", "inf", "nan", "soon", "")
    ),
    *(({"priority": value}, "priority", "invalid_value", 400) for value in (2**31, -(2**31), 1.5, "1", True)),
    *(({"stream": value}, "stream", "invalid_value", 400) for value in ("true", 1, [])),
    ({"partial_images": 1}, "partial_images", "invalid_value", 400),
    ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value", 400),
    ({"partial_images": True, "stream": True}, "partial_images", "invalid_value", 400),
    ({"progress": True}, "progress", "invalid_value", 400),
    ({"cache": "off"}, "cache", "invalid_value", 400),
    ({"response_format": "gif"}, "response_format", "invalid_value", 400),
    ({"response_format": "url", "stream": True}, "response_format", "invalid_value", 400),
    ({"output_format": "gif"}, "output_format", "invalid_value", 400),
    *(({"output_compression": value}, "output_compression", "invalid_value", 400) for value in (-1, 101, 50.0, "100")),
    ({"background": "transparent"}, "background", "invalid_value", 400),
    ({"background": "blue"}, "background", "invalid_value", 400),
    ({"quality": "best"}, "quality", "invalid_value", 400),
    ({"moderation": "none"}, "moderation", "invalid_value", 400),
    ({"user": 1}, "user", "invalid_value", 400),
    ({"user": "x" * 257}, "user", "invalid_value", 400),
    ({"safety_identifier": 1}, "safety_identifier", "invalid_value", 400),
    ({"svg": {"model": "a"}}, "svg", "unsupported_parameter", 400),
    ({"model": "another"}, "model", "model_not_found", 404),
    ({"model": 1}, "model", "invalid_value", 400),
    ({"colour": "red"}, "colour", "unknown_parameter", 400),
    ({"lora": "style"}, "lora", "unknown_parameter", 400),
    ({"a" * 1000: 1}, "a" * 256, "unknown_parameter", 400),
    ({"\ud800": 1}, "\\ud800", "unknown_parameter", 400),
]
"""Fields beside a prompt (`header_slo` is a header), with the field that the error names, its code and its status."""

BODIES = [
    b"",
    b"{",
    b"[]",
    b"3",
    b'"text"',
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": Infinity}',
    b'{"prompt": -Infinity}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": {"a": 1, "a": 2}}',
    b'{"prompt": "\xff"}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"seed": ' + b"9" * 5_000 + b"}",
    b"{'prompt': 'a'}",
    b'{"prompt": "a",}',
    b'{"prompt": "a"} {}',
    b'{"prompt": "a\n"}',
]
"""Bodies that are not JSON objects, and get 400 `invalid_json`."""
