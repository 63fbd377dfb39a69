"""What a run writes is on disk at once, or soon where windows are short."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from memfit.train.launch.watchdog import Watchdog
from memfit.train.run_folder import WAITS, CannotWriteError, RunFolder

KEEPS_THE_LOCK = """
import ctypes, sys
from memfit.train.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.open(resume=False)
for window in range(3):
    folder.append("metrics", {"window": window})
ctypes.PyDLL(None).pause()
"""
"""Ends in a call that keeps Python's lock: no other thread could write lines that wait."""


def test_a_line_is_on_disk_when_it_was_added(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    for window in range(5):
        for name in ("metrics", "losses"):
            folder.append(name, {"window": window})
            assert json.loads(folder.lines(name).read_text().splitlines()[-1]) == {"window": window}
    folder.close()


def test_finished_windows_are_on_disk_while_a_call_keeps_pythons_lock(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", KEEPS_THE_LOCK, str(run)]) as process:
        try:
            latest = time.monotonic() + 60
            while not _lines(run) and time.monotonic() < latest:
                time.sleep(0.05)
            time.sleep(1)
            assert _lines(run) == 3
        finally:
            process.kill()


def test_lines_of_short_windows_are_written_together_in_their_order(folder):
    made = []

    def lines(window):
        made.append(window)
        return [("samples", {"window": window, "rank": rank}) for rank in range(2)] + [("metrics", {"window": window})]

    for window in range(4):
        folder.append_soon(lambda window=window: lines(window))
    assert made == [0]
    assert _lines(folder.path) == 1
    folder.append("verified", {"window": 3})
    assert made == [0, 1, 2, 3]
    assert [json.loads(line)["window"] for line in folder.lines("samples").read_text().splitlines()] == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip
    time.sleep(WAITS)
    folder.append_soon(lambda: lines(4))
    assert _lines(folder.path) == 5
    folder.append_soon(lambda: lines(5))
    folder.close()
    assert _lines(folder.path) == 6


def test_lines_that_wait_are_written_while_the_job_hangs(folder):
    with Watchdog(folder, rank=0, world=1).watching():
        for window in range(3):
            folder.append_soon(lambda window=window: [("metrics", {"window": window})])
        time.sleep(1)
        assert _lines(folder.path) == 3


def test_no_line_is_lost_where_two_threads_write(folder):
    """The watchdog's thread writes what waits while the training adds to it."""
    with Watchdog(folder, rank=0, world=1).watching():
        until, window = time.monotonic() + 2, 0
        while time.monotonic() < until:
            folder.append_soon(lambda window=window: [("metrics", {"window": window})])
            window += 1
    folder.close()
    windows = [json.loads(line)["window"] for line in folder.lines("metrics").read_text().splitlines()]
    assert windows == list(range(window))


def test_a_full_disk_that_another_thread_met_ends_the_training(small_disk):
    folder = RunFolder(small_disk / "run")
    folder.open(resume=False)
    folder.append("metrics", {"window": 0})
    (small_disk / "other").write_bytes(b"0" * (os.statvfs(small_disk).f_bavail * 4096))
    with Watchdog(folder, rank=0, world=1).watching():
        folder.append_soon(list)
        folder.append_soon(lambda: [("metrics", {"window": 1, "text": "0" * 100_000})])
        time.sleep(1)
        with pytest.raises(CannotWriteError, match="No space left on device"):
            folder.append_soon(lambda: [("metrics", {"window": 2})])
        with pytest.raises(CannotWriteError):
            folder.write_waiting()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "made again by a checkpoint"])
def test_a_folder_that_is_gone_ends_the_training_at_the_next_line(folder, tmp_path, how):
    folder.append("metrics", {"window": 0})
    if how == "removed":
        shutil.rmtree(folder.path)
    else:
        folder.path.rename(tmp_path / "elsewhere")
    if how == "replaced":
        RunFolder(folder.path).open(resume=False)
    elif how != "moved":
        (folder.path / "checkpoints").mkdir(parents=True)
    with pytest.raises(CannotWriteError, match=r"run was removed, moved or replaced while the run was writing to it; "):
        folder.append("metrics", {"window": 1})
    assert not folder.lines("metrics").exists()


def test_a_folder_that_is_gone_before_the_first_line_is_said_to_be(folder):
    shutil.rmtree(folder.path)
    with pytest.raises(CannotWriteError, match="was removed, moved or replaced"):
        folder.write_window_range(0, 3)
    with pytest.raises(CannotWriteError, match="was removed, moved or replaced"):
        folder.append("metrics", {"window": 0})


@pytest.mark.parametrize("replaced", [False, True])
def test_lines_go_on_in_a_new_file_where_theirs_was_removed_or_replaced(folder, replaced):
    folder.append("metrics", {"window": 0})
    folder.lines("metrics").unlink()
    if replaced:
        folder.lines("metrics").touch()
    folder.append("metrics", {"window": 1})
    assert folder.lines("metrics").read_text() == '{"window":1}\n'


@pytest.fixture(name="folder")
def _folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    return folder


def _lines(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0
