"""What runs unasked may read, and neither writes nor connects.

python -m pytest tests/cli/test_reading_only.py
"""

import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading

import pytest

from memfit.cli.reading_only import reading_only

ROOM = 8 << 30


def _append(folder):
    with (folder / "file").open("a") as file:
        file.write("more")


def _open_by_number(folder):
    os.close(os.open(folder / "new", os.O_CREAT | os.O_RDWR))


WRITES = {
    "append": _append,
    "open by number": _open_by_number,
    "write": lambda folder: (folder / "file").write_text("other"),
    "folder": lambda folder: (folder / "new").mkdir(),
    "remove": lambda folder: (folder / "file").unlink(),
    "rename": lambda folder: (folder / "file").rename(folder / "new"),
    "truncate": lambda folder: os.truncate(folder / "file", 0),
    "link": lambda folder: (folder / "new").symlink_to("file"),
    "mode": lambda folder: (folder / "file").chmod(0o777),
    "process": lambda folder: subprocess.run([sys.executable, "--version"]),
    "fork": lambda folder: os.fork() or os._exit(0),
    "name": lambda folder: socket.getaddrinfo("localhost", 80),
    "connect": lambda folder: socket.create_connection(("127.0.0.1", 9)),
    "database": lambda folder: sqlite3.connect(folder / "new"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_or_connects_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("here")
    before = (tmp_path / "file").stat()
    with pytest.raises(PermissionError), reading_only(seconds=60, more_bytes=ROOM):
        WRITES[name](tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    after = (tmp_path / "file").stat()
    assert (after.st_size, after.st_mtime_ns, after.st_mode) == (before.st_size, before.st_mtime_ns, before.st_mode)


def test_it_may_read_and_throw_away(tmp_path):
    (tmp_path / "file").write_text("here")
    with reading_only(seconds=60, more_bytes=ROOM):
        assert (tmp_path / "file").read_text() == "here"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        with open(os.devnull, "w") as nothing:
            nothing.write("words")
    (tmp_path / "file").write_text("there")  # outside, all is as ever


def test_other_threads_are_bound_too(tmp_path):
    raised = []

    def write():
        try:
            (tmp_path / "file").write_text("here")
        except PermissionError as error:
            raised.append(error)

    with reading_only(seconds=60, more_bytes=ROOM):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert len(raised) == 1


def _without_end():
    while True:
        pass


def test_time_and_memory_are_bounded_and_given_back():
    before, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TimeoutError), reading_only(seconds=0.2, more_bytes=ROOM):
        _without_end()
    with pytest.raises(MemoryError), reading_only(seconds=60, more_bytes=1 << 30):
        bytearray(2 << 30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert signal.getsignal(signal.SIGVTALRM) == handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
