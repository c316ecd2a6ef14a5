"""Garbage collection is off while packages are imported, and later collections leave out their objects."""

import gc
import json
import subprocess
import sys

import pytest

from patchedserve.serving.core.garbage import imports_are_no_garbage

# Loads a bundled model in a fresh process; prints the numbers of full collections, of objects left out, and of others.
SCRIPT = """
import gc, json
searches = []
gc.callbacks.append(lambda phase, told: searches.append(told["generation"]) if phase == "stop" else None)
from patchedserve.serving.models.loading import load_model

searches.clear()
load_model("emoji-3", "cpu")
print(json.dumps([searches.count(2), gc.get_freeze_count(), len(gc.get_objects())]))
"""


@pytest.mark.exhaustive
def test_garbage_collection_skips_imported_packages() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    full_searches, left_out, searched = json.loads(done.stdout)
    assert "leaked" not in done.stderr
    assert full_searches <= 1
    assert left_out > 10 * searched, "what was imported is left out, and the model is not"


def test_garbage_is_collected_when_nothing_is_imported() -> None:
    left_out = gc.get_freeze_count()
    assert gc.isenabled()
    with imports_are_no_garbage():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() <= left_out
    with pytest.raises(ImportError), imports_are_no_garbage():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with imports_are_no_garbage():
            pass
        assert not gc.isenabled(), "who had it off has it off"
    finally:
        gc.enable()
