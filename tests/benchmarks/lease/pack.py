"""`lease.sh --pack`: wheels of packages that a borrowed machine lacks, and a check that they fit with the tree.

The folder `.lease` is ignored by git; the machine receives it with the tree. It is built anew each time.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .versions import REPOSITORY, pins

FOLDER = ".lease"
_LACKING = ("diffusers", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "importlib-metadata")
"""Packages that the parts import and the machine lacks; it has torch, triton, transformers and the rest."""
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_MIB = 1 << 20
_MODELS = "data/models/emoji-*/"
"""Weights of bundled models: needed by tests only, which are left out without them."""
WITHOUT_MODELS = f"git sparse-checkout set --no-cone '/*' '!/{_MODELS}'"
WITH_MODELS = "git sparse-checkout disable"


def main() -> int:
    """Download the wheels, check the size, and return the exit code."""
    most_mib = float(os.environ.get("PSCTL_LEASE_MOST_MIB", "64"))
    tree_mib = size_of(tree_files()) / _MIB
    if tree_mib > most_mib:
        return _too_large(tree_mib, 0.0, most_mib)
    wheels = REPOSITORY / FOLDER / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    pinned = pins()
    platforms = [part for name in _PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", _PYTHON, *platforms]
    command += ["--dest", str(wheels), *(f"{name}=={pinned[name]}" for name in _LACKING)]
    if code := subprocess.run(command, check=False).returncode:
        print(f"lease.sh: pip download ended with exit code {code}", file=sys.stderr)
        return 1
    wheels_mib = size_of(wheels.glob("*.whl")) / _MIB
    if tree_mib + wheels_mib > most_mib:
        return _too_large(tree_mib, wheels_mib, most_mib)
    print(f"tree {tree_mib:.1f} MiB, wheels {wheels_mib:.1f} MiB: {tree_mib + wheels_mib:.1f} of {most_mib:g} MiB")
    models_mib = size_of(path for path in tree_files() if "data/models/emoji-" in path.as_posix()) / _MIB
    if models_mib:
        print(f"Without the bundled models, {models_mib:.1f} MiB less: {WITHOUT_MODELS}; afterwards: {WITH_MODELS}")
    return 0


def _too_large(tree_mib: float, wheels_mib: float, most_mib: float) -> int:
    print(
        f"lease.sh: tree {tree_mib:.1f} MiB and wheels {wheels_mib:.1f} MiB are more than {most_mib:g} MiB; "
        f"leave out the bundled models with {WITHOUT_MODELS}, and bring them back with {WITH_MODELS}",
        file=sys.stderr,
    )
    return 2


def tree_files() -> list[Path]:
    """Return the files sent with the tree: those that git tracks or does not ignore, if they are checked out."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [REPOSITORY / name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


def size_of(files: object) -> int:
    """Return the size of files in bytes."""
    return sum(Path(path).stat().st_size for path in files)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
