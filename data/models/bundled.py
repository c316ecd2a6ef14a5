"""Trained models that ship with the package: their folders and checksums."""

from pathlib import Path

from ..errors import UsageError
from ..files import sha256_of, write_text

GENERATORS: tuple[str, ...] = ("emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-edit")
BUNDLED: tuple[str, ...] = (*GENERATORS, "emoji-clip")
MODELS_DIR = Path(__file__).parent
CHECKSUMS_FILE = "SHA256SUMS"
CARD_FILES = ("README.md", "figures.json", "samples.png")
"""Files that `psctl models card` adds to a model."""


def bundled_model_path(name: str) -> Path:
    """Return the folder of a bundled model. Raises UsageError for another name."""
    if name not in BUNDLED:
        raise UsageError(f"no bundled model is called {name!r}; bundled: {', '.join(BUNDLED)}")
    return MODELS_DIR / name


def read_checksums(models_dir: Path = MODELS_DIR) -> dict[str, str]:
    """Return the SHA-256 by path relative to `models_dir`, from a file in the format of `sha256sum`."""
    lines = (models_dir / CHECKSUMS_FILE).read_text(encoding="utf-8").splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines if line)}


def write_checksums(models_dir: Path = MODELS_DIR) -> None:
    """Write the SHA-256 of every file of every bundled model."""
    files = sorted(path for name in BUNDLED for path in (models_dir / name).rglob("*") if path.is_file())
    lines = [f"{sha256_of(path)}  {path.relative_to(models_dir).as_posix()}\n" for path in files]
    write_text(models_dir / CHECKSUMS_FILE, "".join(lines))


def verify_bundled(name: str, models_dir: Path = MODELS_DIR) -> list[str]:
    """Return the problems of a bundled model, one line each; empty if every file has its checksum."""
    if name not in BUNDLED:
        raise UsageError(f"no bundled model is called {name!r}; bundled: {', '.join(BUNDLED)}")
    try:
        expected = read_checksums(models_dir)
    except OSError as error:
        return [f"{name}: the list of checksums cannot be read: {error}"]
    expected = {path: digest for path, digest in expected.items() if path.startswith(f"{name}/")}
    if not expected:
        return [f"{name}: no file of it is listed in {CHECKSUMS_FILE}"]
    problems = []
    for path, digest in expected.items():
        file = models_dir / path
        if not file.is_file():
            problems.append(f"{name}: {file} is missing")
        elif sha256_of(file) != digest:
            problems.append(f"{name}: {file} does not have the checksum it was shipped with")
    return problems
