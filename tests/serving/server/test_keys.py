"""API keys, their owners and key files."""

from dataclasses import replace
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.keys import SHARED, Keys, read_keys
from patchedserve.serving.server.limits import KeyLimits

NAMED = """
[red]
keys = ["one", "two"]
["blue.2"]
keys = ["three"]
"""


def owner(keys: Keys, key: str) -> str:
    return keys.owner(f"Bearer {key}")


def test_keys_of_one_name_share_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"\ufeff{NAMED}")
    keys = read_keys(path, operator="four")
    assert owner(keys, "one") == owner(keys, "two") == "red"
    assert owner(keys, "three") == "blue.2"
    assert list(keys.limits) == ["red", "blue.2", keys.operator]
    assert keys.operator == owner(keys, "four")
    with pytest.raises(ApiError, match="the API key is wrong"):
        owner(keys, "five")
    assert read_keys(path, operator="two").operator == "red"


def test_data_of_unnamed_keys_passes_to_their_names(tmp_path: Path) -> None:
    lines, names = tmp_path / "keys", tmp_path / "keys.toml"
    # Every key that a file of lines could hold remains valid.
    written = ["one", "YWJj==", "team=secret", "a:b"]
    lines.write_text("# ours\n\n" + "\n".join(written) + "\n", encoding="utf-8-sig")
    names.write_text(NAMED)
    unnamed = read_keys(lines)
    owners = [owner(unnamed, key) for key in written]
    assert len({*owners}) == len(written)
    assert not unnamed.operator
    assert read_keys(names).renamed[owners[0]] == "red"
    assert not any(key in repr(owners) for key in written)


def test_limits_apply_to_a_name_or_to_all(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"max_open = 9\nmax_disk_mb = 5\n{NAMED}max_open = 3\nrequests_per_minute = 1.5\nweight = 2\n")
    red = KeyLimits(max_open=9, max_disk_mb=5, max_batches=16)
    assert read_keys(path).limits == {"red": red, "blue.2": replace(red, max_open=3, requests_per_minute=1.5, weight=2)}
    path.write_text('[red]\nkeys = ["one"]\n')
    assert read_keys(path, "one").limits == {"red": KeyLimits()}, "with one owner there are none by default"
    keys = read_keys(path, "two")
    assert keys.limits == {"red": SHARED, keys.operator: SHARED}
    assert read_keys(None, "two").limits.popitem()[1] == KeyLimits()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it holds no name with keys"),
        ("[red", "Expected ']'"),
        ("red = 3", "the top of the file has 'red', but limits are max_open"),
        ("[red]", 'red has no keys: keys = ["KEY", "ANOTHER"]'),
        ("[red]\nkeys = []", "red has no keys"),
        ('[red]\nkeys = "sesame"', "red has no keys"),
        ('[red]\nkeys = ["sesame", ""]', "key 2 of red must be text"),
        ('[red]\nkeys = ["se same"]', "key 1 of red must be text"),
        ("[red]\nkeys = [3]", "key 1 of red must be text"),
        ('[red]\nkeys = ["sesame"]\n[blue]\nkeys = ["sesame"]', "key 1 of blue is one of red, too"),
        ('["red team"]\nkeys = ["sesame"]', "the name 'red team' must be 1 to 64 letters"),
        ('[red]\nkeys = ["sesame"]\ncolour = 3', "red has 'colour', but limits are max_open, requests_per_minute, "),
        (
            'max_open = 0\n[red]\nkeys = ["sesame"]',
            "max_open of the top of the file is 0, but it must be a whole number",
        ),
        ('[red]\nkeys = ["sesame"]\nmax_open = 1.5', "max_open of red is 1.5, but it must be a whole number above 0"),
        (
            '[red]\nkeys = ["sesame"]\nmax_disk_mb = "9"',
            "max_disk_mb of red is '9', but it must be a finite number above 0",
        ),
        ('[red]\nkeys = ["sesame"]\nweight = 0', "weight of red is 0, but it must be a finite number above 0"),
        ('[red]\nkeys = ["sesame"]\nweight = 1e-9', "weight of red is 1e-09, but it must be from 0.001 to 1000"),
        ('[red]\nkeys = ["sesame"]\nmax_disk_mb = inf', "max_disk_mb of red is inf, but it must be a finite number"),
    ],
)
def test_invalid_key_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_keys(path)
    told = str(caught.value)
    assert told.startswith(f"--api-key-file {path}: ")
    assert message in told
    assert "\n" not in told
    assert "sesame" not in told


def test_plain_key_file_with_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(NAMED)
    with pytest.raises(UsageError, match=r"has names: call it \.toml"):
        read_keys(path)
