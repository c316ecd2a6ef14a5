"""Files and folders that are either complete or absent: written under a temporary name, synced, then renamed."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, is_private: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. If the body ends without an error, it is renamed to `path`; otherwise it is
    removed.

    The body writes to the yielded path by name (`image.save(temporary)`, `frame.to_parquet(temporary)`). The name keeps
    the suffix of `path`, by which libraries choose the format. Missing parent folders are created, a link is written
    through, and an existing file keeps its permissions; with `is_private`, only the owner can access the file. A target
    that is not a regular file (`/dev/stdout`, a pipe) cannot be replaced by renaming, so the finished temporary file is
    copied into it.

    Raises:
        IsADirectoryError: if `path` is a folder.
        FileNotFoundError: if the body wrote nothing.
        OSError: an error of the file system (disk full, no permission); `path` is then unchanged, unless only its
            folder could not be synced.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if target.exists() and not target.is_file():
        with _special_file(target) as temporary:
            yield temporary
        return
    # Resolved, so that renaming replaces the file and not the link that points to it.
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem[:100]}.{secrets.token_hex(4)}.tmp{target.suffix}")
    try:
        if is_private:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, _PRIVATE_FILE))
        yield temporary
        _sync(temporary)
        if target.exists() and not is_private:
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        # BaseException: Ctrl-C must not leave a temporary file behind either.
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, is_private: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path`. If the body ends without an error, it is renamed to `path`; otherwise it is
    removed.

    An existing folder at `path` stays until the new one is complete. It is then renamed, and deleted once the new one
    has its name. A process that is killed between the two leaves both folders, complete, under hidden names beside
    `path`. Missing parent folders are created, and a link is written through. With `is_private`, only the owner can
    access the folder and its files.

    Raises:
        NotADirectoryError: if `path` is a file.
        OSError: as `atomic_write`.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    temporary, old = (target.with_name(f".{target.name[:100]}.{token}.{mark}") for mark in ("tmp", "old"))
    temporary.mkdir(mode=_PRIVATE_FOLDER if is_private else 0o777)
    try:
        with lock_folder(temporary):
            yield temporary
        for current, _, names in os.walk(temporary):
            for name in names:
                if is_private:
                    Path(current, name).chmod(_PRIVATE_FILE)
                _sync(Path(current, name))
            _sync(Path(current))
        if target.exists():
            target.rename(old)
        temporary.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


@contextmanager
def lock_folder(folder: Path, *, is_shared: bool = False) -> Iterator[bool]:
    """Lock a folder for the context, at most until this process ends in any way. Yields whether the lock was acquired,
    which some network file systems do not support. Raises OSError if it is not a folder.

    `is_shared` makes the lock a shared one.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    is_locked = False
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        is_locked = True
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path, min_age_s: float = 60.0) -> None:
    """Delete leftovers of killed processes in `parent`: hidden folders that no process has locked (see `atomic_folder`)
    and that are too old to be about to be locked. A folder that cannot be deleted stays.
    """
    for folder in parent.glob(".*"):
        # Another process may have locked or deleted it meanwhile, or it is not a folder.
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime >= min_age_s:
                with lock_folder(folder) as is_free:
                    if is_free:
                        shutil.rmtree(folder)


def quarantine(path: Path, what: str, error: Exception) -> None:
    """Rename a damaged file or folder, so that the caller can continue without it, and issue a warning.

    Args:
        path: path in the workspace, which does not depend on it.
        what: name of the file or folder, with which the warning begins.
        error: error that shows the damage.
    """
    quarantined = path.with_name(f"{path.name}-{time.time_ns()}.bad")
    try:
        path.rename(quarantined)
        done = f"it was put aside as {quarantined}"
    except OSError:  # another process has renamed it, or the folder is read-only
        done = "it is left there"
    warnings.warn(f"{what} is damaged ({error}); {done}", stacklevel=3)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` atomically. Raises OSError."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Write `content` to `path` atomically, as UTF-8 with unchanged line ends. Raises OSError."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: str | os.PathLike[str], content: Any, *, is_private: bool = False) -> None:
    """Write `content` to `path` atomically, as indented JSON with a final line end.

    Raises:
        TypeError, ValueError: if `content` is not JSON (NaN and infinity are not); `path` is then untouched.
        OSError: as `atomic_write`.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_write(path, is_private=is_private) as temporary:
        temporary.write_bytes(text.encode())


def private_folder(folder: Path) -> None:
    """Create a folder that only its owner can access; an existing one becomes private if it is ours. Raises OSError."""
    folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):
        folder.chmod(_PRIVATE_FOLDER)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error is a lack of disk space, which may be temporary."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_folder(folder: Path) -> None:
    """Create a folder for results and check that files can be created in it, before the run and not after it.

    Raises:
        UsageError: if the folder is not writable.
        OSError: if the folder cannot be created, or its disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Permissions do not reveal file systems that accept no files at all, such as /proc.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UsageError(f"folder {folder} is not writable") from error


def require_places(*folders: Path | None, file: Path | None = None) -> None:
    """Call `require_folder` for these folders and for the parent of `file`. None is skipped, and `~` is expanded."""
    for folder in (*folders, None if file is None else file.expanduser().absolute().parent):
        if folder is not None:
            require_folder(folder.expanduser())


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_by_content(path: str | os.PathLike[str]) -> str:
    """Return `PATH (checksum)`, which distinguishes files with the same name and different content, for keys and
    messages. Raises OSError.
    """
    return f"{os.fspath(path)} ({sha256_of(path)[:12]})"


@contextmanager
def _special_file(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="psctl-") as folder:
        temporary = Path(folder, "content" + target.suffix)
        yield temporary
        with temporary.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
