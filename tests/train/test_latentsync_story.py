"""A LatentSync run in a budget in which its validation, as upstream has it, really fails: under a plan it does not.

python -m pytest -m slow tests/train/test_latentsync_story.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.plan import PhasePolicy, Plan, write_plan

BUDGET = 140 << 20
"""Training takes 59 MiB of tensors; validation 126 as it is, 101 without gradients and optimizer state."""


def story(path: Path, policy: PhasePolicy) -> tuple[int, list[dict], str]:
    plan = Plan(
        job="latentsync/tiny", settings={}, device="cpu", budget_bytes=BUDGET, unit="samples", global_batch=2,
        micro_batch=1, micro_batches=[[1, 1]], arithmetic="2 = 2 x 1 on 1 device", engine="single", precision="fp32",
        seed=0, validate_every=2, validation=policy,
    )  # fmt: skip
    path.mkdir()
    write_plan(plan, path / "plan.toml")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "run", str(path / "plan.toml"), "--out", str(path / "run"), "--windows", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return done.returncode, lines, done.stderr


@pytest.mark.slow
def test_it_validates_at_every_interval_and_runs_to_its_end(tmp_path):
    planned = PhasePolicy(gradients="free", optimizer="aside", settings={"validation_decode": 1})
    code, lines, said = story(tmp_path / "planned", planned)
    assert code == 0, said
    assert [line.get("validation_tries") for line in lines] == [None, 1, None, 1]
    assert all(lines[at]["validation"] for at in (1, 3))

    code, lines, said = story(tmp_path / "upstream", PhasePolicy(gradients="keep"))
    assert code == 0, said
    assert "window 0: validation did not fit" in said
    assert [line.get("validation_tries") for line in lines] == [None, 1, None, 1]
    assert all(lines[at]["validation"] for at in (1, 3))
