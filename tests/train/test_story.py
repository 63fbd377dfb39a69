"""A job whose own validation dies in its budget runs to its end under a plan, and its report says where it would have.

python -m pytest tests/train/test_story.py [-m slow]
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.latentsync_story import run_story
from memfit.device.hardware.catalogue import with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.loading import load_job
from memfit.plan import PhasePolicy, write_plan
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.train.probe.trial import Question, run_trial

ROOT = Path(__file__).parents[2]
BUDGET = 100 << 20
JOB = """
from typing import ClassVar
import torch
from torch import nn
import memfit

class Decoded(memfit.Job):
    # Like LatentSync: gradients stay until the next forward, and validation decodes a whole video, 8 MiB a frame.
    windows: int = 4
    real_validation_batch = True
    zero_grad: str = "after_forward"
    validate_every: int = 2
    at_once: int = 16
    validation_smaller: ClassVar = {"at_once": 1}
    validation_options: ClassVar = {"sliced decode in validation": {"at_once": 1}}

    def nets(self):
        return {"net": nn.Linear(1024, 1024)}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-3)}

    def batch(self, shape):
        return torch.randn(shape.items, 1024)

    def dataset(self):
        return list(torch.randn(32, 1024, generator=torch.Generator().manual_seed(0)))

    def loss(self, nets, batch):
        return (nets["net"](batch) - batch).square().mean(1).sum(), len(batch)

    def validation_batch(self, shape):
        return torch.zeros(16)

    def validate(self, nets, batch):
        frames = (part.new_zeros(len(part) * 2048, 1024) for part in batch.split(self.at_once))
        return {"size": torch.stack([nets["net"](part).square().mean() for part in frames]).mean()}
"""


def memfit(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def validated(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["window"], line["validation_tries"], line["validation"]) for line in lines if "validation" in line]


@pytest.mark.slow
def test_a_validation_that_dies_as_the_job_has_it_passes_under_a_plan_at_every_interval(tmp_path):
    (tmp_path / "decoded.py").write_text(JOB)
    name = f"{tmp_path}/decoded.py:Decoded"
    job = load_job(name)
    trial = run_trial(Question(job=name, settings=job.settings(), items=2, length=None, budget_bytes=BUDGET))
    assert (trial.ok, trial.failed_in) == (False, "validate")
    assert "can't allocate memory" in trial.error

    plan = find_plan(
        job, PlanRequest(name=name, global_batch=4, device=with_memory(local_cpu(), BUDGET), micro_batch=2)
    ).plan
    assert plan.validation == PhasePolicy(settings={"at_once": 1})
    write_plan(plan, tmp_path / "plan.toml")
    write_plan(replace(plan, validation=PhasePolicy(gradients="keep")), tmp_path / "own.toml")
    said = memfit("run", tmp_path / "own.toml", "--out", tmp_path / "own", "--windows", 2)
    assert re.search(r"window 0: validation did not fit \(out of memory: .* asked for\)", said), said

    said = memfit("run", tmp_path / "plan.toml", "--out", tmp_path / "run")
    assert "did not fit" not in said
    assert [(window, tries) for window, tries, _ in validated(tmp_path / "run")] == [(1, 1), (3, 1)]
    assert all(metrics["size"] > 0 for _, _, metrics in validated(tmp_path / "run"))
    assert validated(tmp_path / "own") == validated(tmp_path / "run")[:1]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "validation runs out of memory: " in page
    assert "fails to allocate 128 MiB." in page


@pytest.mark.slow
def test_latentsync_validates_at_every_interval_where_upstream_dies(tmp_path, capsys):
    run_story(tmp_path, windows=4)
    assert "memfit's plan, run: exit code 0, validated after windows [1, 3]" in capsys.readouterr().out
