"""Files are complete or not there, and are synced before they are renamed.

python -m pytest tests/test_atomic_file.py
"""

import errno
import os
import stat
import threading

import pytest

from memfit.atomic_file import open_atomic, temporary_name, write_atomic
from memfit.errors import unwritable


def test_content_mode_and_links_are_kept(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    write_atomic(path, "ä")
    path.chmod(0o640)
    link.symlink_to(path)
    write_atomic(link, b"new")
    assert path.read_bytes() == b"new"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]


@pytest.fixture
def calls(monkeypatch):
    """System calls in their order: ``sync NAME`` and ``rename``."""
    recorded = []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        recorded.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def replaced(source, target):
        recorded.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return recorded


def test_the_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, calls):
    path = tmp_path / "file"
    write_atomic(path, "x")
    assert calls == [f"sync {temporary_name(path).name}", "rename", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch, fails):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write():
        with open_atomic(path) as file:
            file.write(b"half")
            if fails == "write":
                full()

    if fails != "write":
        monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_link_under_the_temporary_name_is_not_followed(tmp_path):
    path, victim = tmp_path / "file", tmp_path / "victim"
    victim.write_text("mine")
    temporary_name(path).symlink_to(victim)
    write_atomic(path, "x")
    assert (victim.read_text(), path.read_text()) == ("mine", "x")


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write_atomic(path, "through")
    reader.join()
    assert got == [b"through"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_name_as_long_as_the_file_system_takes(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomic(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("/dev/full", "make room on that disk"),
        ("none/file", "a folder that is there"),
        ("file/file", "a folder that is there"),
        ("folder", "not of a folder"),
        ("x" * 300, "a shorter path"),
    ],
    ids=["full disk", "no folder", "in a file", "a folder", "long name"],
)
def test_what_to_write_instead_follows_from_the_error(tmp_path, name, write):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as failed:
        write_atomic(tmp_path / name, "text")
    line = str(unwritable(f"--out {name}", failed.value))
    assert line.startswith(f"--out {name}: cannot be written: ")
    assert write in line
