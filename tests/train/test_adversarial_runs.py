"""Runs of two nets that step one after the other, on ranks that shard them.

python -m pytest tests/train/test_adversarial_runs.py
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from memfit.plan import write_plan
from memfit.verify.verify_plan import on_ranks, plan_for
from tests.train.adversarial_jobs import Adversarial
from tests.train.test_ranks import ROOT, memfit

JOB = f"{ROOT}/tests/train/adversarial_jobs.py:Adversarial"


@pytest.mark.slow
@pytest.mark.parametrize("judge_last", [False, True], ids=["first", "last"])
def test_a_net_that_runs_without_a_backward_is_sharded_again(judge_last, tmp_path):
    alone = plan_for(Adversarial(judge_last=judge_last), JOB, [2], 8, 2)
    sharded = on_ranks(alone, "fsdp2", 2)
    nets = {}
    for plan in (on_ranks(alone, "single", 1), sharded):
        folder = tmp_path / plan.engine
        write_plan(plan, tmp_path / f"{plan.engine}.toml")
        proof = ("--verify-every", 2) if plan.engine == "fsdp2" else ()
        done = memfit("run", tmp_path / f"{plan.engine}.toml", "--out", folder, "--windows", 3, *proof)
        assert done.returncode == 0, done.stderr
        assert "without a trial" not in done.stderr
        nets[plan.engine] = [load_file(file) for file in sorted((folder / "final").glob("*.safetensors"))]
    verified = [json.loads(line) for line in (tmp_path / "fsdp2" / "verified.jsonl").read_text().splitlines()]
    assert verified
    assert all(window["ok"] for window in verified)
    assert len(nets["single"]) >= 2
    for learnt, expected in zip(nets["fsdp2"], nets["single"], strict=True):
        for name, weight in expected.items():
            torch.testing.assert_close(learnt[name], weight, rtol=1e-4, atol=1e-5)
