"""Keys of records: what distinguishes two records, and the names of their folders."""

from dataclasses import replace
from typing import Any

import numpy as np

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.requests import Request, TracedEdit
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import TemplateKind
from patchedserve.serving.core.record_key import RecordKey

SIZE = Resolution(128, 64)
OF_MODEL = (("model", "f"), ("dtype", "float32"), ("scheduler", ("Euler", "12")), ("keep", "all"))


def test_names_of_folders_never_change() -> None:
    """Records that are on disk would no longer be found."""
    noised = RecordKey("abc", SIZE, 20, True, "noised", "a picture", 5, None, "ann", OF_MODEL)
    drawn = RecordKey("abc", SIZE, 20, False, "trajectory", None, None, 4.0, "", (*OF_MODEL[:3], ("keep", "kv")))
    assert (noised.digest, drawn.digest) == ("3ba8e6f1841fbefb13092af4", "4acd82b7e3b19bd3ce9bb2f3")


def test_key_depends_on_what_is_recorded_alone() -> None:
    picture = np.zeros((SIZE.height, SIZE.width, 3), np.uint8)
    edit = EditSpec(picture, np.ones(picture.shape[:2], bool))

    def key(kind: TemplateKind = "noised", scale: float = 4.0, **changes: Any) -> RecordKey | None:
        request = Request(0, "a hat", SIZE, 20, scale, edit=replace(edit, template=TemplateSpec(kind=kind)))
        return RecordKey.of(replace(request, **changes))

    assert key() == key(scale=7.0) == key(prompt="a dog", seed=3)
    assert key() != key(scale=1.0), "passes without guidance have one row"
    assert key("trajectory") == key("trajectory", prompt="a dog", seed=3)
    assert key("trajectory") not in (key(), key("trajectory", 7.0))
    assert [key(edit=None), key(edit=edit)] == [None, None], "no edit, and one without a template"
    traced = key(edit=None, traced=TracedEdit("emoji:3", "box:1", 0.1))
    assert traced == RecordKey("emoji:3", SIZE, 20)
