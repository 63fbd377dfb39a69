"""A process that holds Python's lock is ended by a timer, which follows the part at hand.

python -m pytest tests/train/test_watchdog.py
"""

import time

from memfit.train.launch import watchdog
from memfit.train.launch.watchdog import LEAST_START, Watchdog
from memfit.train.run_folder import RunFolder


def test_the_timer_is_set_anew_soon_after_another_part_has_begun(tmp_path, monkeypatch):
    timers = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, **how: timers.append(seconds))
    watches = Watchdog(RunFolder(tmp_path), rank=0, world=1, patience=5.0)
    with watches.watching():
        assert soon(lambda: timers and timers[-1] > LEAST_START)
        watches.progress("fetch", 0)
        assert soon(lambda: timers[-1] < 30)


def soon(holds):
    until = time.monotonic() + 3
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()
