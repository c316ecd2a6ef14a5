"""The names that the package itself exports: documented, lazy, and the same objects as in their modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchedserve
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.scheduling.policies import get_policy

HOMES = {each.__name__: each for each in (Engine, InMemory, Request, Resolution, get_policy, load_model)}


def test_exported_names_are_those_of_their_modules() -> None:
    assert {name: getattr(patchedserve, name) for name in patchedserve.__all__} == HOMES
    assert set(patchedserve.__all__) <= set(dir(patchedserve))


def test_unknown_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"'Pipeline'; it exports Engine, .*load_model"):
        patchedserve.Pipeline  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [("import patchedserve; dir(patchedserve)", "numpy"), ("from patchedserve import Request, get_policy", "torch")],
)
def test_import_loads_only_what_a_name_needs(statement: str, heavy: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys; {statement}; sys.exit({heavy!r} in sys.modules)"], check=True)


def test_page_documents_every_exported_name(repository: Path) -> None:
    page = (repository / "docs" / "python-api.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == sorted(patchedserve.__all__)
