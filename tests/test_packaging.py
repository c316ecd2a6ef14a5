"""The package list, the version, the shipped files, and the imports of `psctl --help`."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import patchedserve

NOT_PACKAGES = {"docs", "tests", "build", "dist", "psctl-workspace", "__pycache__"}


@pytest.fixture(scope="module")
def setuptools_config(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]


def _folder(repository: Path, package: str) -> Path:
    return repository.joinpath(*package.split(".")[1:])


def _code_folders(repository: Path) -> Iterator[Path]:
    """Yield every folder of the checkout that contains Python files of the product."""
    for folder, subfolders, files in os.walk(repository):
        is_root = Path(folder) == repository
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and not (is_root and name in NOT_PACKAGES) and not name.endswith(".egg-info")
        ]
        if any(name.endswith(".py") for name in files):
            yield Path(folder)


def test_every_code_folder_is_a_listed_package(repository: Path, setuptools_config: dict[str, Any]) -> None:
    listed = {_folder(repository, package) for package in setuptools_config["packages"]}
    assert set(_code_folders(repository)) == listed
    assert all((folder / "__init__.py").is_file() for folder in listed)


def test_setup_installs_all_extras_except_gpu(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r"^EXTRAS := (.*)$", (repository / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed.split(",")) == sorted(extras.keys() - {"gpu"})


def test_every_data_file_of_a_package_is_shipped(repository: Path, setuptools_config: dict[str, Any]) -> None:
    packages = {_folder(repository, package): package for package in setuptools_config["packages"]}
    shipped: set[Path] = set()
    for package, patterns in setuptools_config["package-data"].items():
        for pattern in patterns:
            shipped.update(path for path in _folder(repository, package).glob(pattern) if path.is_file())
    present = {
        path
        for package in packages
        if package != repository
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"} and not path.name.startswith(".")
    }
    assert present - shipped == set()


def test_version_is_the_one_of_the_installed_distribution() -> None:
    assert metadata.version("psctl") == patchedserve.__version__


def test_imported_package_is_the_checkout(repository: Path) -> None:
    assert patchedserve.__file__ is not None
    assert Path(patchedserve.__file__).parent == repository


def test_every_constraint_is_exact_and_torch_comes_first(repository: Path) -> None:
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0].startswith("torch==")
    assert [line for line in lines if line.count("==") != 1] == []


def test_help_imports_little() -> None:
    """Imports take most of the time of `psctl --help`; unlike their time, their number is equal on every machine."""
    code = "import sys; from patchedserve.psctl.app import main; main(['--help']); print(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 550  # 472 in November 2026; torch alone brings 1,000 more


@pytest.mark.parametrize("heavy", ["torch", "diffusers", "transformers", "pandas", "matplotlib", "pydantic", "click"])
def test_help_does_not_import(heavy: str) -> None:
    code = (
        "import sys; from patchedserve.psctl.app import main; "
        f"code = main(['--help']); assert code == 0; sys.exit({heavy!r} in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
