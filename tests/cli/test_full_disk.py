"""A disk that has no room for a run's plan: the folder that the run made is gone again.

python -m pytest tests/cli/test_full_disk.py
"""

import errno
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.train.run_folder import RunFolder
from tests.cli.asking import ROOT

NO_ROOM = (50, 50)
"""Bytes that a file may take: RLIMIT_FSIZE, in place of a disk that is full."""


@pytest.mark.parametrize("is_there", [False, True])
def test_a_plan_that_cannot_be_written_leaves_no_folder_of_a_run(tmp_path: Path, plan: str, is_there: bool) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    run = tmp_path / "run"
    if is_there:
        run.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "run", tmp_path / "plan.toml", "--out", run], cwd=ROOT, text=True,
        capture_output=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, NO_ROOM),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "run/plan.toml: cannot be written" in done.stderr
    assert run.exists() == is_there
    assert not is_there or not list(run.iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_cannot_be_made_within_a_run_leaves_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    run = tmp_path / "run"
    if is_there:
        run.mkdir()
    folder = RunFolder(run)
    make = Path.mkdir

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        if path == folder.checkpoints:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(InputError, match="No space left"):
        folder.open(resume=False)
    assert run.exists() == is_there
    monkeypatch.undo()
    RunFolder(run).open(resume=False)
