"""What memfit run does once its training has ended.

python -m pytest tests/cli/test_run_endings.py
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from memfit.cli import main, run_monitor
from memfit.errors import Exit
from memfit.plan import read_plan, write_plan
from memfit.train.launch import launch
from memfit.train.launch.launch import Launched
from testing.kill_and_resume import make_plan
from tests.cli.asking import ROOT


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


@pytest.mark.parametrize(("is_filled", "end"), [(False, "--out run\n"), (True, "--out run --resume\n")])
def test_a_run_that_is_stopped_before_its_processes_are_there_says_how_to_go_on(tmp_path, is_filled, end):
    (tmp_path / "run").mkdir()
    if is_filled:
        (tmp_path / "run" / "plan.toml").touch()
    source = (
        "import os, signal, sys, time, memfit.cli, memfit.cli.run as run\n"
        "run._run = lambda *values: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(20))\n"
        "memfit.cli.main(['run', 'plan.toml', '--out', 'run', '--resume'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ask = [sys.executable, "-c", source]
    done = subprocess.run(ask, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.STOPPED
    assert done.stderr == f"memfit: stopped before the first window; go on with: memfit run plan.toml {end}", (
        done.stderr
    )


def test_a_run_that_would_verify_rounded_weights_is_refused_before_it_starts(tmp_path, capsys):
    file = make_plan(tmp_path, "synchronous")
    plan = replace(read_plan(file), engine="fsdp2", mesh={"dp_shard": 2}, engine_choices={"half_gather": True})
    plan = replace(plan, micro_batches=[plan.micro_batches[0]] * 2, global_batch=2 * plan.global_batch)
    write_plan(plan, file)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--out", str(tmp_path / "run"), "--verify-every", "2"])
    assert ended.value.code == Exit.BAD_INPUT
    assert "half_gather rounds weights that one device reads in float32" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
