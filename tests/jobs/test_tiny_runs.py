"""Every system's tiny job is planned into a budget and trained in it by memfit run, on its real data; its loss falls.

python -m pytest tests/jobs/test_tiny_runs.py [-m slow]
"""

import json
import os
import subprocess
import sys
from statistics import mean

import pytest

RUNS = {
    "f5_tts/tiny": (1128, "160MiB", 12),
    "gpt_sovits/tiny": (4, "400MiB", 10),
    "latentsync/tiny": (4, "500MiB", 10),
    "musetalk/tiny": (4, "500MiB", 10),
}
"""Global batch, budget, windows."""


def memfit(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "memfit", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("job", RUNS)
def test_a_tiny_job_learns_within_its_budget(job, tmp_path):
    global_batch, budget, windows = RUNS[job]
    plan, folder = tmp_path / "plan.toml", tmp_path / "run"
    planned = memfit("plan", job, "--global-batch", global_batch, "--memory", budget, "--out", plan)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    done = memfit("run", plan, "--out", folder, "--windows", windows)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [sum(line["losses"].values()) for line in lines if "losses" in line]
    assert len(losses) == windows
    assert mean(losses[-3:]) < 0.97 * mean(losses[:3])
