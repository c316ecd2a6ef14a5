"""What the comparison of results with known keys finds. Pages of the documentation compare every command's result."""

import pytest

from ..support import json_keys
from ..support.json_keys import keys_of_all, lost_keys

FIRST = {"rows": [{"ms": 1.0, "size": "64x64"}, {"ms": 2.0, "size": "128x128"}], "by_size": {"64x64": {"mean": 1}}}
SECOND = {"rows": [], "by_size": {"128x128": {"mean": None}}, "note": "empty"}


def test_lost_keys_are_found_in_lists_and_under_names_that_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of_all([FIRST, SECOND])
    assert keys == ["by_size", "by_size.*", "by_size.*.mean", "rows", "rows[].ms", "rows[].size"]
    monkeypatch.setattr(json_keys, "known_keys", lambda: {"bench": keys})
    assert not lost_keys("bench", FIRST)
    assert not lost_keys("bench", SECOND)
    assert lost_keys("bench", {"rows": [{"ms": 1.0, "size": "a"}, {"ms": 2.0}], "by_size": {"64x64": {"p95": 1}}}) == [
        "by_size.*.mean",
        "rows[].size",
    ]
