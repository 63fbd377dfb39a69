"""Signals while a checkpoint is written, workers of a killed process, and a full disk under a live terminal.

python -m pytest tests/attack/test_signals.py -m slow
"""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testing.attacker import ROOT, launched_processes, make_plan, run_plan
from testing.small_disk import small_disk

pytestmark = pytest.mark.slow
SECONDS = 15.0
"""Within which a run that is told to stop has ended: 10 on a machine with nothing else to do."""


def until(holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_whose_checkpoint_is_being_written(tmp_path, kind, number):
    plan, run, stuck, seconds = tmp_path / "plan.toml", tmp_path / "run", tmp_path / "stuck", []
    make_plan(kind, plan, windows=100)  # some are left when a busy machine has seen the second checkpoint

    def disturb(process):
        until(lambda: len(list((run / "checkpoints").glob("[0-9]*"))) == 2)
        stuck.touch()
        until(lambda: list((run / "checkpoints").glob(".*")))
        time.sleep(1)
        begin = time.monotonic()
        process.send_signal(number)
        process.wait(60)
        seconds.append(time.monotonic() - begin)

    code, words = run_plan(plan, run, environment={"ATTACK_STUCK": str(stuck)}, disturb=disturb)
    assert code == 5, words
    assert seconds[0] < SECONDS
    assert "Traceback" not in words
    assert words.rstrip().splitlines()[-1].startswith("memfit: ")
    assert "--resume" in words
    assert len(list((run / "checkpoints").glob("[0-9]*"))) == 2
    assert not list((run / "checkpoints").glob(".*"))
    stuck.unlink()
    assert run_plan(plan, run)[0] == 0


def test_workers_of_a_training_process_that_is_killed_end_with_the_run(tmp_path):
    plan, run, killed = tmp_path / "plan.toml", tmp_path / "run", []
    make_plan("workers", plan)

    def disturb(process):
        until(lambda: (run / "metrics.jsonl").exists())
        (training,) = launched_processes(process.pid)
        killed.extend(launched_processes(training))
        os.kill(training, signal.SIGKILL)
        process.wait(60)

    code, words = run_plan(plan, run, environment={"ATTACK_ORPHANS": "1"}, disturb=disturb)
    assert code == 5
    assert "killed by signal 9 (SIGKILL)" in words
    assert len(killed) == 2


def test_a_full_disk_under_tensorboard_and_a_live_terminal_costs_no_window(tmp_path):
    pytest.importorskip("tensorboard")
    plan, run = tmp_path / "plan.toml", tmp_path / "run"
    make_plan("plain", plan)
    run.mkdir()
    (run / ".memfit-run").touch()
    with small_disk(run / "tensorboard", size="4k") as disk:
        if not disk.mounted:
            pytest.skip("no right to mount a file system")
        terminal, other = pty.openpty()
        arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), "--resume"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(arguments, stdout=other, stderr=other, stdin=other, env=environment, cwd=ROOT)
        os.close(other)
        shown = b""
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 1 << 16):
                shown += part
        os.close(terminal)
        assert process.wait(60) == 0, shown.decode()
    words = " ".join(shown.decode(errors="replace").split())
    assert words.count("TensorBoard is switched off") == 1
    assert "No space left on device" in words
    assert "Traceback" not in words
    assert "Done" in words
    assert len(Path(run / "metrics.jsonl").read_text().splitlines()) == 20
