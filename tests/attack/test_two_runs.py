"""Two runs on one folder: the second is refused, and has touched nothing.

python -m pytest tests/attack/test_two_runs.py
"""

import os
import subprocess
import sys

import pytest

from memfit.cli import main
from memfit.train.launch.process_guard import alone_in
from testing.kill_and_resume import make_plan


@pytest.fixture
def run(tmp_path):
    """A run's folder with a file that a second run would remove, and one that it would replace."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("plan.toml", "window_range.json", "metrics.jsonl", ".ended-x", ".memfit-run"):
        (folder / name).write_text(name)
    return folder


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def code_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code


def test_a_second_run_touches_nothing(run, tmp_path, capsys, monkeypatch):
    plan, before = make_plan(tmp_path, "synchronous"), content(run)
    patience = alone_in.__wrapped__.__defaults__
    monkeypatch.setattr(alone_in.__wrapped__, "__defaults__", (0.3,))
    assert patience == (10.0,)
    with alone_in(run):
        assert code_of("run", plan, "--out", run, "--resume") == 2
        assert code_of("run", plan, "--out", run) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "another process trains in it; wait until it ends" in said[0]
    assert "it is not empty" in said[1]
    assert content(run) == before


def test_a_program_that_takes_the_place_of_this_one_holds_the_folder_too(tmp_path):
    hold = (
        "import os, sys; from pathlib import Path; from memfit.train.launch.process_guard import alone_in\n"
        "with alone_in(Path(sys.argv[1]), inherited=True): os.execvp('sh', ['sh', '-c', 'echo held; read line'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(Exception, match="another process trains in it"), alone_in(tmp_path, 0.1):
            pass
        process.communicate(b"\n", timeout=20)
    with alone_in(tmp_path, 0.1):
        pass
