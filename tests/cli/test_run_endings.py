"""What memfit run does once its training has ended.

python -m pytest tests/cli/test_run_endings.py
"""

import pytest

from memfit.cli import main, run_monitor
from memfit.errors import Exit
from memfit.train.launch import launch
from memfit.train.launch.launch import Launched
from testing.kill_and_resume import make_plan


@pytest.mark.parametrize("left", [None, "rank-1.txt", "held-0.txt"])
def test_with_a_mocked_launch_a_run_whose_job_hung_writes_no_report_that_would_run_the_job_again(
    tmp_path, monkeypatch, capsys, left
):
    reports = []

    def launched(plan, options):
        if left is not None:
            (tmp_path / "run" / "stacks").mkdir()
            (tmp_path / "run" / "stacks" / left).write_text("in loss()")
        return Launched(code=Exit.STOPPED, line="the run has made no progress")

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(run_monitor, "write_report", reports.append)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(make_plan(tmp_path, "synchronous")), "--out", str(tmp_path / "run")])
    assert ended.value.code == Exit.STOPPED
    assert len(reports) == (left is None)
    assert ("no report is written" in capsys.readouterr().err) is (left is not None)
