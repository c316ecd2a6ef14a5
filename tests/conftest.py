"""Settings and fixtures that all tests share."""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence, Set
from pathlib import Path

import pytest

from .support.tools import SHARED_FOLDER

# A shell without job control starts background jobs that ignore Ctrl-C, and children inherit this. Tests of
# interrupts need the behaviour of a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


RunPsctl = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports torch."""
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the folder
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="psctl-tests-")
    # One thread makes small models faster, and results equal on every machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["MPLBACKEND"] = "Agg"
    # Workers of pytest-xdist inherit the width of a terminal, which commands in a pipe do not have.
    os.environ.pop("COLUMNS", None)
    # Variables that developers set for their own runs must not reach the tests.
    for name in [name for name in os.environ if name.startswith("PSCTL_")]:
        del os.environ[name]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder that the workers have shared."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the packages that test modules import from garbage collection, as serving does."""
    from patchedserve.serving.core.garbage import imports_are_no_garbage

    with imports_are_no_garbage():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options by which `make check` leaves out slow tests that a change does not affect, and CI takes a part
    of the exhaustive ones.
    """
    parser.addoption("--changed-since", metavar="COMMIT", help="run slow tests only of what has changed since then")
    parser.addoption("--part", metavar="K/N", default="1/1", help="run every N-th exhaustive test, from the K-th on")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark repetitions in products as exhaustive.

    With `--part`, keep a part of the exhaustive tests. With `--changed-since`, keep the tests that are not marked slow
    and all tests of changed files.
    """
    mark_repetitions(items)
    number, count = map(int, str(config.getoption("--part")).split("/"))
    # Tests of a file that run in order stay together.
    units = {
        item: item.path if item.get_closest_marker("in_order") else item.nodeid
        for item in items
        if item.get_closest_marker("exhaustive")
    }
    chosen = set([*dict.fromkeys(units.values())][number - 1 :: count])
    left_out = {item for item, unit in units.items() if unit not in chosen}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
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
    """Mark the cases of tests marked `product` as exhaustive, except a few that cover every value of each parameter.

    The argument `most` limits the number of these.
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
    """Return the indices of a few sets that cover all elements, by a greedy choice of the set that adds most."""
    left = set[Hashable]().union(*cases)
    found: list[int] = []
    while left:
        found.append(max(range(len(cases)), key=lambda place: (len(left & cases[place]), -place)))
        left -= cases[found[-1]]
    return found


def changed_files(root: Path, commit: str) -> list[Path]:
    """Return the files of a checkout that differ from a commit, including untracked ones, relative to its root."""
    asked = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(["git", *each], cwd=root, capture_output=True, text=True, check=True) for each in asked]
    return [Path(line) for each in found for line in each.stdout.splitlines()]


def places_of_tests(root: Path, changed: list[Path]) -> list[Path]:
    """Return test files and folders of changed files by location: `tests/` mirrors the tree.

    A changed test is its own result; otherwise it is the test file named after the changed file, or else the innermost
    folder that mirrors its location. Files with neither, such as those of the root, have no result.
    """
    found = []
    for file in changed:
        place = file.parent if file.parts[0] == "tests" else Path("tests") / file.parent
        while not (root / place).is_dir():
            place = place.parent
        named = [place / file.name, place / f"test_{file.stem}.py"]
        found += [next((each for each in named if (root / each).is_file() and each.suffix == ".py"), place)]
    return [root / each for each in found if each != Path("tests")]


@pytest.fixture(scope="session", autouse=True)
def _shared_tls_context() -> Iterator[None]:
    """Let all HTTP clients of a worker share a TLS context, as each would take 50 ms to read the certificates."""
    if importlib.util.find_spec("httpx") is None:
        yield
        return
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout, which is the package `patchedserve`."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def psctl_script() -> str:
    """Path of the installed console script."""
    from .support.psctl_process import find_script

    return find_script()


@pytest.fixture
def spawn_psctl(psctl_script: str, tmp_path: Path) -> RunPsctl:
    """Function that runs `psctl ARGUMENTS...` as a process in an empty folder and returns the finished process.

    Keyword arguments are added to the environment. Use it for tests of the start itself. Most other tests can use
    `run_psctl`, which starts no process, or `start_psctl` of `support/psctl_process.py`, which imports nothing again.
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
    """Like `spawn_psctl`, but in this process, because importing torch and diffusers again takes seconds.

    It runs `main`, the function of the console script, with captured output, and with the environment and the folder of
    a process of its own.
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
    """Reset torch.compile before and after a test, so that tests share no graphs."""
    import torch
    from torch._dynamo.utils import counters

    # pytest would capture every line of the compiler's trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_only(fresh_compiler: None) -> Iterator[None]:
    """Let torch.compile trace without generating code, as `support.traced_only` describes."""
    from .support.traced_only import traced_only

    with traced_only():
        yield
