"""Files written by users, checked against the types of a class."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from patchedserve.data.errors import UsageError
from patchedserve.data.parsing import parse


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.size > 9:
            raise UsageError(f"size is {self.size}, but at most 9 is allowed")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: dict[str, Inner] = field(default_factory=dict)
    pair: tuple[int, int] | None = None


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    metric: Annotated[str, Field(min_length=1)]
    is_on: bool = False


def test_nested_dataclasses_are_parsed() -> None:
    found = parse(Outer, {"name": "x", "inner": {"i": {"size": 3, "kind": "b"}}, "pair": [1, 2], "more": 1})
    assert found == Outer("x", {"i": Inner(3, "b")}, (1, 2))
    assert parse(Entry, {"metric": "fid"}).is_on is False


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (Outer, {}, "f.json: 'name' is missing"),
        (Outer, {"name": 3}, "f.json: name is 3, but it must be text"),
        (
            Outer,
            {"name": "x", "inner": {"i": {"size": "3"}}},
            "inner.i.size is '3', but it must be a whole number",
        ),
        (
            Outer,
            {"name": "x", "inner": {"i": {"size": 1, "kind": "c"}}},
            "i.kind is 'c', but it must be 'a' or 'b'",
        ),
        (Outer, {"name": "x", "inner": {"i": {"size": 10}}}, "f.json: inner.i: size is 10, but at most 9 is allowed"),
        (Outer, {"name": "x", "inner": [1]}, r"f.json: inner is \[1\], but it must be a mapping"),
        (Outer, [1], r"f.json: content is \[1\], but it must be a mapping"),
        (Entry, {"metric": "fid", "colour": 1}, "f.json: unknown key 'colour'; known: metric, is_on"),
        (Entry, {"metric": ""}, "f.json: metric is '', but it must not be empty"),
        (Entry, {"metric": "fid", "is_on": 1}, "f.json: is_on is 1, but it must be true or false"),
    ],
)
def test_errors_are_a_single_line(kind: type[Any], content: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(kind, content, "f.json")
    assert "\n" not in str(caught.value)
