"""Memory that runs out for good, on one device and on several ranks: a checkpoint of the window's begin comes first.

python -m pytest tests/attack/test_giving_up.py -m slow
"""

import re
from dataclasses import replace

import pytest

from memfit.plan import read_plan, write_plan
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from testing.attacker import JOBS, make_plan, run_plan

pytestmark = pytest.mark.slow
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def given_up(kind, job, folder, code=5):
    """(the window of the only checkpoint, its last line of metrics, what was said) of a run that gives up."""
    make_plan(kind, folder / "plan.toml")
    plan = read_plan(folder / "plan.toml")
    settings = {**plan.settings, "windows": 400}
    plan = replace(plan, job=f"{JOBS}:{job}", settings=settings, budget_bytes=128 << 20)
    write_plan(plan, folder / "plan.toml")
    run = folder / "run"
    ended, said = run_plan(folder / "plan.toml", run, save_every=3600)
    assert ended == code, said
    assert "Traceback" not in said
    assert "Warning" not in said
    assert code == 2 or "go on with --resume" in said.splitlines()[-1], said
    (newest,) = Checkpoints(run / "checkpoints").numbers()
    assert read_checkpoint(Checkpoints(run / "checkpoints").folder(newest)).next_window == newest
    return newest, len((run / "metrics.jsonl").read_text().splitlines()), said


@pytest.mark.parametrize("kind", ["plain", *ENGINES])
def test_a_sample_that_does_not_fit_alone(tmp_path, kind):
    newest, windows, said = given_up(kind, "TooLarge", tmp_path)
    assert (newest, windows) == (2, 2)
    assert re.search(r"sample 48, tensors .* does not fit alone", said.splitlines()[-1]), said


@pytest.mark.parametrize("kind", ["plain", *ENGINES])
def test_memory_that_grows(tmp_path, kind):
    newest, windows, said = given_up(kind, "Grows", tmp_path)
    assert newest == windows > 8
    assert re.search(r"memory held between windows grew .*Grows\.kept holds .*no sample is to blame", said), said
    assert "does not fit alone" not in said


def test_memory_that_grows_and_fails_after_an_optimizer_has_stepped(tmp_path):
    newest, windows, said = given_up("gan", "GrowsInSecondTurn", tmp_path)
    assert newest == windows > 8
    assert f"the run starts again from the newest checkpoint, to write a checkpoint of window {newest}" in said
    assert "GrowsInSecondTurn.kept holds" in said.splitlines()[-1]


def test_a_window_that_cannot_be_collated_on_one_rank(tmp_path):
    newest, windows, said = given_up("ddp", "TooLargeToCollate", tmp_path)
    assert newest == windows > 0
    assert re.search(r"rank 1: sample 48, .* does not fit alone: memory ran out in fetch", said.splitlines()[-1]), said


def test_a_gradient_that_is_not_finite_after_an_optimizer_has_stepped(tmp_path):
    newest, windows, said = given_up("gan", "NotFiniteInSecondTurn", tmp_path, code=2)
    assert (newest, windows) == (2, 2)
    assert re.search(r"window 2: the norm .* of 'made' is nan.*look at samples .*48", said.splitlines()[-1]), said
