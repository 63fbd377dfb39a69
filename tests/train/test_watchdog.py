"""A process that holds Python's lock is ended by a timer, which follows the part at hand.

python -m pytest tests/train/test_watchdog.py
"""

import time

from memfit.train.launch import watchdog
from memfit.train.launch.watchdog import LEAST_START, Watchdog
from memfit.train.run_folder import RunFolder


def test_the_timer_is_set_anew_when_another_part_begins(tmp_path, monkeypatch):
    """Not later: the part may hold Python's lock from its beginning on, and no other thread runs any more."""
    timers = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, **how: timers.append(seconds))
    watches = Watchdog(RunFolder(tmp_path), rank=0, world=1, patience=5.0)
    with watches.watching():
        assert timers[-1] > LEAST_START
        watches.progress("fetch", 0)
        assert timers[-1] < 30


def test_stacks_of_an_earlier_launch_are_not_taken_for_a_rank_that_hangs(tmp_path, monkeypatch):
    """Rank 0 removes them when it begins, which may be after another rank has."""
    folder, ends = RunFolder(tmp_path), []
    folder.stacks.mkdir()
    (folder.stacks / "rank-0.txt").write_text("of an earlier launch")
    monkeypatch.setattr(Watchdog, "_end_without_progress", lambda watches, now: ends.append(now))
    watches = Watchdog(folder, rank=1, world=2)
    with watches.watching():
        time.sleep(3 * watchdog.LOOKS_EVERY)
        assert not ends
        (folder.stacks / "rank-0.txt").write_text("of this launch")
        assert soon(lambda: ends)


def soon(holds):
    until = time.monotonic() + 3
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()
