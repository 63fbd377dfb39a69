"""What libraries say while a job is traced is kept out; what the job's own files say is shown."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest

from memfit.cli.progress import progress
from tests.cli.asking import ROOT

LIBRARY = click.__file__
JOB = f"""
import logging
import warnings

import torch

from memfit import Job


class Talking(Job):
    def nets(self):
        warnings.warn("the job's own warning")
        warnings.warn_explicit("a library's warning", FutureWarning, {LIBRARY!r}, 3)
        return {{"net": torch.nn.Linear(4, 4)}}

    def optimizers(self, nets):
        return {{"net": torch.optim.SGD(nets["net"].parameters(), 0.1)}}

    def batch(self, shape):
        return torch.randn(shape.items, 4)

    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)
"""
SCRIPT = f"""
import warnings

import torch

warnings.warn("the script's own warning")
warnings.warn_explicit("a library's warning", FutureWarning, {LIBRARY!r}, 3)
net = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "talking.py"
    path.write_text(JOB)
    return path


def asked(job: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "memfit", "predict", f"{job}:Talking", "--device", "rtx4090", "--fresh"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_library_warning_is_kept_out_and_the_jobs_own_is_shown(job):
    answer = asked(job)
    assert answer.returncode == 0
    assert "the job's own warning" in answer.stderr
    assert "a library's warning" not in answer.stderr


@pytest.mark.slow
def test_the_option_of_python_shows_a_library_warning(job):
    assert "a library's warning" in asked(job, "-W", "default").stderr


def test_a_script_shows_its_own_warnings_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "memfit", "predict", "--device", "rtx4090", "--", "python", str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 0
    assert "the script's own warning" in answer.stderr
    assert "a library's warning" not in answer.stderr


def test_a_library_logs_no_warning_while_a_job_is_traced(capsys, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    handler = logging.StreamHandler(sys.stdout)
    logger = logging.Logger("talking")
    logger.addHandler(handler)

    def log(path: str, level: int, text: str) -> None:
        logger.handle(logger.makeRecord(logger.name, level, path, 1, text, (), None))

    with progress("tracing"):
        log(LIBRARY, logging.WARNING, "a library's advice")
        log(LIBRARY, logging.ERROR, "a library's error")
        log(__file__, logging.WARNING, "own advice")
    log(LIBRARY, logging.WARNING, "advice afterwards")
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["a library's error", "own advice", "advice afterwards"]


def test_warnings_are_shown_as_before_once_a_job_is_traced(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    before, handled = warnings.showwarning, logging.Logger.callHandlers
    with progress("tracing"):
        assert warnings.showwarning is not before
    assert warnings.showwarning is before
    assert logging.Logger.callHandlers is handled
