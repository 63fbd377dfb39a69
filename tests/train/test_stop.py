"""SIGINT and SIGTERM in a long window, in validation, in saving and before the first window: exit code 5, and the run
goes on bit for bit.

python -m pytest tests/train/test_stop.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfit.train.checkpoints import Checkpoints
from tests.train.killing import same_end

ROOT = Path(__file__).parents[2]
JOB = """
import os, time
from pathlib import Path
import torch
from torch import nn
import memfit

class Slow(memfit.Job):
    # Waits in one place, once: where MEMFIT_SLOW says, until the file beside this one is gone.
    windows: int = 4
    validates = True
    validate_every: int = 2

    def wait(self, place):
        file = Path(__file__).with_name("wait")
        if os.environ.get("MEMFIT_SLOW") == place and self.counted.count(place) == 5:
            file.with_name("reached").touch()
            while file.exists():
                time.sleep(0.05)
        self.counted.append(place)

    counted = []

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return [torch.randn(shape.items, 16), torch.randn(shape.items)]

    def dataset(self):
        x = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x.sum(1)))

    def loss(self, nets, batch):
        self.wait("window")
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return error.sum(), len(error)

    def validate(self, nets, batch):
        for _ in range(4):
            self.wait("validation")
        return {"size": nets["net"](batch[0]).square().mean()}

    def saved(self, nets, optimizers):
        for _ in range(2):
            self.wait("saving")
        return {}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the job's folder, its plan, an undisturbed run)."""
    folder = tmp_path_factory.mktemp("stop")
    (folder / "slow.py").write_text(JOB)
    arguments = ("--global-batch", 10, "--micro-batch", 5, "--memory", "128MiB", "--out", folder / "plan.toml")
    assert memfit("plan", f"{folder}/slow.py:Slow", *arguments).wait() == 0
    assert memfit("run", folder / "plan.toml", "--out", folder / "whole", "--save-every", 0).wait() == 0
    return folder


def memfit(*arguments, slow="", **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEMFIT_SLOW": slow}
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


def stopped(folder: Path, run: Path, place: str, number: signal.Signals, lasts: float) -> str:
    """A run that is told to stop while it waits in a place, which then lasts so many seconds; what it said."""
    (folder / "wait").touch()
    (folder / "reached").unlink(missing_ok=True)
    with memfit("run", folder / "plan.toml", "--out", run, "--save-every", 0, slow=place) as one:
        until = time.monotonic() + 120
        while not (folder / "reached").exists() and one.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        one.send_signal(number)
        time.sleep(lasts)
        (folder / "wait").unlink()
        said = one.communicate(timeout=300)[1].decode()
    assert one.returncode == 5, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("place", "number", "lasts", "windows"),
    [
        ("window", signal.SIGTERM, 6.0, 1),
        ("window", signal.SIGINT, 0.1, 2),
        ("validation", signal.SIGTERM, 0.1, 2),
        ("saving", signal.SIGINT, 0.1, None),
    ],
)
def test_a_run_that_is_told_to_stop_goes_on_bit_for_bit(whole, tmp_path, place, number, lasts, windows):
    """The trial of every phase takes 2 of a window's micro-batches, 4 waits of a validation and 2 of a save."""
    run = tmp_path / "run"
    stopped(whole, run, place, number, lasts)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["window"] for line in lines] == list(range(windows or len(lines)))
    assert Checkpoints(run / "checkpoints").numbers()[0] == len(lines)
    assert len(lines) < 4
    if place == "validation":
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation"] is None
    resumed = memfit("run", whole / "plan.toml", "--out", run, "--resume", "--save-every", 0)
    assert resumed.wait() == 0
    same_end(run, whole / "whole")


def test_a_run_that_is_told_to_stop_before_its_first_window_says_nothing_and_starts_anew(whole, tmp_path):
    with memfit("run", whole / "plan.toml", "--out", tmp_path / "run") as one:
        while not (tmp_path / "run" / "plan.toml").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        one.send_signal(signal.SIGTERM)
        said = one.communicate(timeout=300)[1].decode()
    assert one.returncode == 5, said
    assert "Traceback" not in said
    assert memfit("run", whole / "plan.toml", "--out", tmp_path / "run", "--resume").wait() == 0
    same_end(tmp_path / "run", whole / "whole")
