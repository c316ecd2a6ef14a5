"""Files are complete or absent."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from patchedserve.data.files import (
    atomic_folder,
    atomic_write,
    private_folder,
    quarantine,
    remove_leftovers,
    sha256_of,
    write_bytes,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.json"
    with atomic_write(target) as temporary:
        assert temporary.parent == target.parent
        assert temporary.suffix == ".json"
        temporary.write_text("1")
        assert not target.exists()
    assert target.read_text() == "1"
    assert names(target.parent) == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError()])
def test_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write_half() -> None:
        with atomic_write(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_writing_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.txt"):
        pass
    assert names(tmp_path) == []


def test_permissions_are_preserved(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("old")
    target.chmod(0o600)
    write_text(target, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_text("")
    write_text(tmp_path / "a", "")
    assert (tmp_path / "a").stat().st_mode == usual.stat().st_mode


def test_symlink_is_preserved(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "a")


def test_pipe_is_written_to_and_preserved(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_contents(tmp_path: Path) -> None:
    write_bytes(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    write_text(tmp_path / "t", "é\r\n")
    assert (tmp_path / "t").read_bytes() == b"\xc3\xa9\r\n"
    write_json(tmp_path / "j.json", {"é": [1, 0.5]})
    assert json.loads((tmp_path / "j.json").read_text(encoding="utf-8")) == {"é": [1, 0.5]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "j.json", float("nan"))
    assert sha256_of(tmp_path / "b") == hashlib.sha256(b"\x00\xff").hexdigest()


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_folder_replaces_the_old_one_atomically(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert tree(tmp_path) == {"deep/model/a": "1"}
    (tmp_path / "link").symlink_to(target)
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("2")
        assert tree(target) == {"a": "1"}
    assert tree(tmp_path) == {"deep/model/sub/b": "2"}
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def write_and_fail(target: Path, error: BaseException) -> None:
    with atomic_folder(target) as folder:
        (folder / "b").write_text("2")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "model"
    for before in ({}, {"model/a": "1"}):
        with pytest.raises(type(error)):
            write_and_fail(target, error)
        assert tree(tmp_path) == before
        assert target.exists() == bool(before)
        target.mkdir(exist_ok=True)
        (target / "a").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_replacement_keeps_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "a").write_text("1")
    with pytest.raises(FileNotFoundError), atomic_folder(target) as folder:
        # The last rename fails: the folder that was moved away for it must come back.
        folder.rmdir()
    assert tree(tmp_path) == {"model/a": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError), atomic_folder(tmp_path / "file"):
        pass


def test_stale_temporary_files_are_removed_but_not_those_being_written(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from patchedserve.data.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1]) / 'record') as folder:\n"
        "    (folder / 'file').write_text('half'); print(folder, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with atomic_folder(tmp_path / "own") as own:
            remove_leftovers(tmp_path, 0.0)
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left.name, own.name])
            process.kill()
            process.wait()
            remove_leftovers(tmp_path)  # the leftover is too recent
            assert left.is_dir()
            (tmp_path / ".file").touch()
            remove_leftovers(tmp_path, 0.0)
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".file", own.name])


def test_damaged_files_are_quarantined(tmp_path: Path) -> None:
    folder, file = tmp_path / "record", tmp_path / "table.json"
    folder.mkdir()
    file.write_text("{")
    for path in (folder, file):
        with pytest.warns(UserWarning, match=rf"{path.name} is damaged \(half of it\); it was put aside as .*\.bad"):
            quarantine(path, path.name, ValueError("half of it"))
        assert not path.exists()
    with pytest.warns(UserWarning, match="it is left there"):
        quarantine(file, file.name, ValueError("half of it"))
    assert sorted(each.name.partition("-")[0] for each in tmp_path.iterdir()) == ["record", "table.json"]


def modes(folder: Path) -> set[str]:
    return {oct(each.stat().st_mode & 0o777) for each in (folder, *folder.rglob("*"))}


def test_private_files_are_accessible_only_to_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    private_folder(folder)
    (folder / "old.json").write_text("[]")
    for name in ("new.json", "old.json"):
        write_json(folder / name, {}, is_private=True)
    with atomic_folder(folder / "record", is_private=True) as record:
        (record / "step").write_text("a")
    assert modes(folder) == {"0o600", "0o700"}
    open_to_all = tmp_path / "open"
    with atomic_folder(open_to_all) as opened:
        (opened / "step").write_text("a")
    assert modes(open_to_all) == {oct(0o666 & ~umask()), oct(0o777 & ~umask())}


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found
