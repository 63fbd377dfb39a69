"""SIGINT and SIGTERM in a long window, in validation, in saving and before the first window: exit code 5, and the run
goes on bit for bit.

python -m pytest tests/train/test_stop_signals.py
"""

import json
import signal

import pytest

from memfit.device.hardware.catalogue import with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.loading import load_job
from memfit.plan import write_plan
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.train.checkpoint.checkpoints import Checkpoints
from testing.kill_and_resume import new_run, same_end, server

JOB = """
import os, time
from pathlib import Path
import torch
from torch import nn
import memfit

class Slow(memfit.Job):
    # Waits in one place, once: where SLOW says, until the file "wait" beside this one is gone.
    windows: int = 4
    real_validation_batch = True
    validate_every: int = 2

    def wait(self, place):
        file = Path(__file__).with_name("wait")
        if os.environ.get("SLOW") == place and self.counted.count(place) == (0 if place == "dataset" else 5):
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
        self.wait("dataset")
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
    """(a server, the job's folder with its plan and an undisturbed run)."""
    folder = tmp_path_factory.mktemp("stop")
    (folder / "slow.py").write_text(JOB)
    name = f"{folder}/slow.py:Slow"
    plan = find_plan(
        load_job(name),
        PlanRequest(name=name, global_batch=10, device=with_memory(local_cpu(), 128 << 20), micro_batch=5),
    ).plan
    write_plan(plan, folder / "plan.toml")
    with server() as server_process:
        assert server_process.run(new_run(folder / "whole", folder / "plan.toml"), resume=False)["code"] == 0
        yield server_process, folder


@pytest.mark.parametrize(
    ("place", "number", "lasts", "windows"),
    [
        ("dataset", signal.SIGTERM, 0.1, (0,)),
        ("window", signal.SIGTERM, 6.0, (1,)),
        ("window", signal.SIGINT, 0.1, (2,)),
        ("validation", signal.SIGTERM, 0.1, (2,)),
        ("saving", signal.SIGINT, 0.1, (1, 2, 3)),
    ],
)
def test_a_run_that_is_told_to_stop_goes_on_bit_for_bit(whole, tmp_path, place, number, lasts, windows):
    """The trial of every phase takes 2 of a window's micro-batches, 4 waits of a validation and 2 of a save; a window
    that lasts longer than 5 seconds more is abandoned."""
    first, folder = whole
    (folder / "wait").touch()
    (folder / "reached").unlink(missing_ok=True)
    run = new_run(tmp_path / "run", folder / "plan.toml")
    stop = {"folder": str(folder), "place": place, "number": int(number), "lasts": lasts}
    assert first.run(run, resume=False, stop=stop)["code"] == 5, (run / "log.txt").read_text()
    assert "Traceback" not in (run / "log.txt").read_text()
    file = run / "samples.jsonl"
    done = [json.loads(line)["window"] for line in file.read_text().splitlines()] if file.exists() else []
    assert done == list(range(len(done)))
    assert len(done) in windows
    assert Checkpoints(run / "checkpoints").numbers()[:1] == [len(done)][: len(done)]
    if place == "validation":
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation"] is None
    assert first.run(run, resume=True)["code"] == 0, (run / "log.txt").read_text()
    same_end(run, folder / "whole")
    validations = [
        [json.loads(line).get("validation") for line in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (run, folder / "whole")
    ]
    assert validations[0] == validations[1]
