"""Settings and fixtures that all tests share."""

import contextlib
import io
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence, Set
from pathlib import Path

import pytest

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that. The tests of
# interrupts need it as at a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


RunPsctl = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """Set the environment before any test module imports torch."""
    # One thread makes small models faster, and results the same on every machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["MPLBACKEND"] = "Agg"
    # Workers of pytest-xdist inherit the width of a terminal, and commands in a pipe have none.
    os.environ.pop("COLUMNS", None)
    # What developers have set for their own runs must not reach the tests.
    for name in [name for name in os.environ if name.startswith("PSCTL_")]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's search for garbage away from the packages that test modules import, as serving does."""
    from patchedserve.serving.core.garbage import imports_are_no_garbage

    with imports_are_no_garbage():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make check` leave out what takes long and has nothing to do with the change at hand."""
    parser.addoption("--changed-since", metavar="COMMIT", help="run slow tests only of what has changed since then")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what repeats in a product as exhaustive.

    With `--changed-since`, keep the tests that are not marked slow, and all of those of what has changed.
    """
    mark_repetitions(items)
    commit = config.getoption("--changed-since")
    if commit is None:
        return
    wanted = set(places_of_tests(config.rootpath, changed_files(config.rootpath, commit)))
    kept, left_out = [], []
    for item in items:
        is_fast = item.get_closest_marker("slow") is None
        is_wanted = is_fast or not wanted.isdisjoint((item.path, *item.path.parents))
        (kept if is_wanted else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark as exhaustive the cases of tests marked `product`, but for a few that have every value of each parameter.

    With the argument `most`, no more cases than that stay.
    """
    products: dict[tuple[Path, str, int | None], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("product")) is not None:
            products.setdefault((item.path, item.originalname, marker.kwargs.get("most")), []).append(item)
    for (_, _, most), cases in products.items():
        values = [{(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases]
        kept = covering(values)[:most]
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker("exhaustive")


def covering(cases: Sequence[Set[Hashable]]) -> list[int]:
    """Places of few sets that have all elements together; first come those that bring most."""
    left = set[Hashable]().union(*cases)
    found: list[int] = []
    while left:
        found.append(max(range(len(cases)), key=lambda place: (len(left & cases[place]), -place)))
        left -= cases[found[-1]]
    return found


def changed_files(root: Path, commit: str) -> list[Path]:
    """Files of a checkout that differ from a commit, those that git does not know yet included; from its root."""
    asked = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(["git", *each], cwd=root, capture_output=True, text=True, check=True) for each in asked]
    return [Path(line) for each in found for line in each.stdout.splitlines()]


def places_of_tests(root: Path, changed: list[Path]) -> list[Path]:
    """Test files and folders of changed files, by their place: `tests/` mirrors the tree.

    That is a test itself, else the test file that has the name of the changed one, else the innermost folder of its
    place; nothing for what has neither, such as the files of the root.
    """
    found = []
    for file in changed:
        place = file.parent if file.parts[0] == "tests" else Path("tests") / file.parent
        while not (root / place).is_dir():
            place = place.parent
        named = [place / file.name, place / f"test_{file.stem}.py"]
        found += [next((each for each in named if (root / each).is_file() and each.suffix == ".py"), place)]
    return [root / each for each in found if each != Path("tests")]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout, which is the package `patchedserve`."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def psctl_script() -> str:
    """Path of the installed console script."""
    from .support.psctl_process import find_script

    return find_script()


@pytest.fixture
def spawn_psctl(psctl_script: str, tmp_path: Path) -> RunPsctl:
    """A function that runs `psctl ARGUMENTS...` as a process in an empty folder and returns the finished process.

    Keyword arguments are added to the environment. This is for tests of the start itself. Most others are as good with
    `run_psctl`, which starts no process, or `start_psctl` of `support/psctl_process.py`, which imports nothing anew.
    """

    def run(*arguments: str | Path, timeout_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [psctl_script, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture
def run_psctl(tmp_path: Path) -> RunPsctl:
    """As `spawn_psctl`, but in this process: importing torch and diffusers anew takes seconds.

    What runs is `main`, the function of the console script, with its output in a pipe's place, its own environment and
    folder.
    """

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        from patchedserve.psctl.app import main

        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(tmp_path)
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(["psctl", *map(str, arguments)], code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without the graphs of other tests, and with none left behind."""
    import torch
    from torch._dynamo.utils import counters

    # pytest would take down every line of the compiler's trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_only(fresh_compiler: None) -> Iterator[None]:
    """torch.compile without generated code, see `support.traced_only`."""
    from .support.traced_only import traced_only

    with traced_only():
        yield
