"""Gradients that are not finite on one rank: all ranks stop together, after a checkpoint of the state before.

python -m pytest tests/attack/test_not_finite.py [-m slow]
"""

import json
import re
from dataclasses import replace

import pytest

from memfit.plan import read_plan, write_plan
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from testing.attacker import JOBS, make_plan, run_plan

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("average", marks=SLOW), pytest.param("fsdp2", marks=SLOW),
             pytest.param("zero2", marks=SLOW)],
)  # fmt: skip
def test_all_ranks_stop_with_the_samples_named_and_a_checkpoint_before(tmp_path, kind):
    make_plan(kind, tmp_path / "plan.toml")
    write_plan(replace(read_plan(tmp_path / "plan.toml"), job=f"{JOBS}:NotFinite"), tmp_path / "plan.toml")
    run = tmp_path / "run"
    code, said = run_plan(tmp_path / "plan.toml", run, save_every=60)
    assert code == 2, said
    assert "Traceback" not in said
    assert "frame #" not in said
    (line,) = re.findall(r"memfit: window (\d+): the norm of the gradients.*samples ([\d, ]+)", said)
    number, named = int(line[0]), {int(sample) for sample in line[1].split(",")}
    assert number > 0
    assert 30 in named
    assert named <= set(range(52))
    newest = Checkpoints(run / "checkpoints").numbers()[0]
    assert newest == number
    assert read_checkpoint(Checkpoints(run / "checkpoints").folder(newest)).next_window == number
    windows = [json.loads(text)["window"] for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert windows == list(range(number))
