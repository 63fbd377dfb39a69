"""Signals while a report is written, by ``memfit report`` and by ``memfit run`` after its last window.

python -m pytest tests/cli/test_report_interrupts.py [-m slow]
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from memfit.plan import read_plan, write_plan
from testing.attacker import ROOT, make_plan

JOB = """
import time
from pathlib import Path
from testing.attacked_job import Plain

class Waits(Plain):
    # Waits where its nets are built, once the folder ``waits_after`` is there.
    windows: int = 2
    waits_after: str = "/"
    how: str = "wait"

    def nets(self):
        if Path(self.waits_after).exists():
            if self.how == "exit":
                raise SystemExit(3)
            Path(__file__).with_name("reached").touch()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    time.sleep(1)
                except BaseException:
                    if self.how == "wait":
                        raise
        return super().nets()
"""
SLOW = pytest.mark.slow


def start(folder, verb, how="wait"):
    """The process of a verb on a plan of the job in the folder."""
    (folder / "waits.py").write_text(JOB)
    (folder / "tmp").mkdir()
    make_plan("plain", folder / "plan.toml")
    settings = {"windows": 2, "how": how, "waits_after": str(folder / "run" / "final") if verb == "run" else "/"}
    plan = replace(read_plan(folder / "plan.toml"), job=f"{folder}/waits.py:Waits", settings=settings)
    write_plan(plan, folder / "plan.toml")
    out = folder / ("run" if verb == "run" else "report.html")
    return subprocess.Popen(
        [sys.executable, "-m", "memfit", verb, folder / "plan.toml", "--out", out], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def signalled(folder, verb, number, how="wait"):
    """(exit code, standard output, standard error) of a verb whose report was interrupted."""
    process = start(folder, verb, how)
    until = time.monotonic() + 120
    while not (folder / "reached").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    begin = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert not list(folder.rglob("*.html*"))
    assert [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "wait"), *(pytest.param(*case, marks=SLOW) for case in (
        (signal.SIGINT, "wait"), (signal.SIGHUP, "wait"), (signal.SIGTERM, "catch"))
    )],
)  # fmt: skip
def test_a_report_is_stopped_in_one_line(tmp_path, number, how):
    assert signalled(tmp_path, "report", number, how) == (5, "", "memfit: stopped\n")


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "wait"), *(pytest.param(*case, marks=SLOW) for case in (
        (signal.SIGINT, "wait"), (signal.SIGTERM, "catch"))
    )],
)  # fmt: skip
def test_a_run_that_is_done_stays_so_and_says_how_to_write_its_report(tmp_path, number, how):
    code, out, err = signalled(tmp_path, "run", number, how)
    assert code == 0
    assert "Done: 2 windows" in out
    words = (
        f"memfit: the run is done; no report is written, since a signal came; memfit report {tmp_path}/run writes it\n"
    )
    assert err == words


@SLOW
def test_a_job_that_leaves_while_the_report_is_written_leaves_the_run_done(tmp_path):
    process = start(tmp_path, "run", "exit")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Done: 2 windows" in out
    assert "memfit: no report was written: " in err
    assert "called sys.exit(3)" in err
