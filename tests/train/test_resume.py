"""Going on under another plan: with the same samples in the same windows, or not at all.

python -m pytest tests/train/test_resume.py
"""

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.apply.train_state import build
from memfit.errors import Exit, InputError
from memfit.loading import load_job
from memfit.plan import read_plan, write_plan
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.resume import resume
from memfit.train.checkpoint.saver import Saver
from memfit.train.run_folder import check_same_samples
from testing.kill_and_resume import JOB, make_plan, new_run, server


def test_a_run_goes_on_with_smaller_micro_batches_and_the_same_samples(tmp_path):
    plan = make_plan(tmp_path, "synchronous")
    with server() as server_process:
        undisturbed, run = new_run(tmp_path / "whole", plan), new_run(tmp_path / "run", plan)
        assert server_process.run(undisturbed, resume=False, windows=12)["code"] == 0
        assert server_process.run(run, resume=False, windows=5)["code"] == 0
        smaller = replace(read_plan(plan), micro_batch=4, micro_batches=[[4, 4, 4, 4]], arithmetic="16 = 4 x 4")
        write_plan(smaller, run / "plan.toml")
        assert server_process.run(run, resume=True, windows=12)["code"] == 0, (run / "log.txt").read_text()
        assert (run / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()

        before = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
        write_plan(replace(smaller, seed=1), run / "plan.toml")
        assert server_process.run(run, resume=True, windows=13)["code"] == Exit.BAD_INPUT
        assert "its seed is 1: " in (run / "log.txt").read_text()
        assert before == {path: path.read_bytes() for path in run.rglob("*.jsonl")}


@pytest.mark.parametrize("name", ["job", "settings", "unit", "global_batch", "precision", "seed"])
def test_a_plan_of_other_samples_is_refused_by_the_name_of_what_differs(tmp_path, name):
    plan = read_plan(make_plan(tmp_path, "synchronous"))
    other = {"settings": {}, "global_batch": 8, "seed": 7}.get(name, "other")
    with pytest.raises(InputError, match=rf"its {name} is .*; plan with .*, or write another --out"):
        check_same_samples(plan, replace(plan, **{name: other}), Path("RUN"))
    check_same_samples(plan, replace(plan, micro_batch=3, engine="ddp", budget_bytes=1), Path("RUN"))


def test_samples_with_lengths_need_the_same_micro_batch(tmp_path):
    """Windows of varied lengths are packed by it."""
    plan = read_plan(make_plan(tmp_path, "synchronous"))
    train_state, checkpoints = build(load_job(JOB), "cpu"), Checkpoints(tmp_path / "checkpoints")
    Saver(checkpoints=checkpoints, plan=plan).save(train_state, 3)
    other = replace(plan, micro_batch=5)
    assert resume(train_state, other, checkpoints, print, lengths=False) == 3
    with pytest.raises(InputError, match=r"its micro_batch is 5: .* was run with 6"):
        resume(train_state, other, checkpoints, print, lengths=True)
