"""kill -9 at random moments of a run, saving included: resumed, it ends as if it had never been killed.

python -m pytest tests/train/test_kills.py [-m slow]; a hundred times: python -m bench.kills
"""

import random
import shutil

import pytest

from memfit.errors import Exit
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from testing.kill_and_resume import kill_and_resume, make_plan, new_run, same_end, server


@pytest.mark.parametrize(
    ("writing", "kills"),
    [
        ("asynchronous", 6),
        pytest.param("synchronous", 20, marks=pytest.mark.slow),
        pytest.param("asynchronous", 20, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_the_undisturbed_one(tmp_path, writing, kills):
    plan = make_plan(tmp_path, writing)
    with server() as server_process:
        count = kill_and_resume(server_process, tmp_path, plan, kills, random.Random(kills))
    assert count.kills == kills
    assert count.finished >= 1
    assert count.passed_over == 0


def test_a_run_on_a_disk_that_fills_stops_cleanly_and_goes_on_when_there_is_room(small_disk, tmp_path):
    """Fifty checkpoints are to stay, and there is no room for them: the disk is full of the run's own files."""
    plan = make_plan(tmp_path, "asynchronous")
    with server() as server_process:
        undisturbed, run = new_run(tmp_path / "whole", plan), new_run(small_disk / "run", plan)
        assert server_process.run(undisturbed, resume=False)["code"] == 0
        log = tmp_path / "log.txt"
        assert server_process.run(run, resume=False, keep=50, log=log)["code"] == Exit.STOPPED, log.read_text()
        said = log.read_text()
        assert "not written: No space left on device; the one before it" in said
        assert "Traceback" not in said
        checkpoints = Checkpoints(run / "checkpoints")
        assert 2 < len(checkpoints.numbers()) < 40
        for window in checkpoints.numbers():
            read_checkpoint(checkpoints.folder(window))
        for window in checkpoints.numbers()[1:]:
            shutil.rmtree(checkpoints.folder(window))
        assert server_process.run(run, resume=True, keep=2, log=log)["code"] == 0, log.read_text()
    same_end(run, undisturbed)
