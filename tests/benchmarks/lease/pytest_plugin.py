"""A pytest plugin that writes the outcome of each test to the file `LEASE_TESTS_REPORT` as soon as it is known, and
deselects the tests that the file `LEASE_TESTS_KNOWN` lists.

If the weights of bundled models are missing, tests that load them are skipped, and their outcome is `left out`.
"""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from patchedserve.data.models import bundled

_MISSING = "the weights of bundled models are not in this tree"
_is_there = bundled.bundled_model_path


def _path_or_skip(name: str) -> Any:
    folder = _is_there(name)
    return folder if folder.is_dir() else _skip()


def _skip() -> NoReturn:
    pytest.skip(_MISSING)


# Replaced before any other module imports it.
bundled.bundled_model_path = _path_or_skip


def _write(message: dict[str, Any]) -> None:
    with open(os.environ["LEASE_TESTS_REPORT"], "a", encoding="utf-8") as file:
        print(json.dumps(message), file=file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests whose outcome an earlier run has."""
    known = set(json.loads(Path(os.environ["LEASE_TESTS_KNOWN"]).read_text(encoding="utf-8")))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the collected tests of a run without workers of pytest-xdist."""
    if not hasattr(session.config, "workerinput"):
        _write({"collected": [item.nodeid for item in session.items]})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Write the tests that a worker of pytest-xdist collected; all workers collect the same."""
    _write({"collected": list(ids)})


class _Outcomes:
    """Writer of outcomes, in the process that receives the reports of all workers."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_end = report.when == "call" or report.outcome != "passed"
        if not is_end or (report.when == "teardown" and report.outcome == "passed"):
            return
        message, outcome = "", report.outcome
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash is not None else str(report.longrepr)).partition("\n")[0]
        elif report.outcome == "skipped":
            message = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            outcome = "left out" if _MISSING in message else "skipped"
        row = {"label": report.nodeid, "outcome": outcome, "message": message, "seconds": round(report.duration, 2)}
        _write({"row": row})


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer of outcomes in the controller only."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(), "lease-outcomes")
