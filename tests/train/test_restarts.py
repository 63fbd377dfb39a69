"""Sharded ranks, one of which runs out of memory: all stop, start again with less, and learn the same.

python -m pytest tests/train/test_restarts.py
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memfit.plan import Plan, write_plan
from tests.train.test_ranks import lines, memfit

JOB = f"{Path(__file__).parent}/restarted_job.py:Restarted"
SECONDS = 120
"""From the failure until all run again. Most of it is Python's imports: some 8 s on two cores that do nothing else."""
POINTS = [f"{rank} {part} {number}" for part in ("forward", "backward") for number in range(12) for rank in (0, 2)]
"""Three blocks in each of two micro-batches: every micro-step of the trial and of the first window."""
FAST = "2 backward 13"
"""In the second window. The others, and "1 forward 4", in the trial's second micro-batch, are slow."""


def run(folder: Path, fails: str = "") -> tuple[dict, Path, str]:
    """(weights, the run's folder, what it said)."""
    settings = {"fails": fails, "mark": str(folder / "failed")} if fails else {}
    plan = Plan(
        job=JOB, settings=settings, device="cpu", budget_bytes=256 << 20, unit="samples", global_batch=14,
        micro_batch=3, micro_batches=[[3, 2], [3, 2], [3, 1]], arithmetic="", engine="fsdp2", precision="fp32", seed=3,
    )  # fmt: skip
    write_plan(plan, folder / "plan.toml")
    path = folder / "run"
    done = memfit("run", folder / "plan.toml", "--out", path, "--save-every", 0)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return load_file(path / "final" / "net.safetensors"), path, done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))


def samples(path: Path) -> dict[int, list[int]]:
    """The ids of each window, sorted; every window and rank once."""
    by_name: dict[int, list[int]] = {}
    applied = lines(path, "samples")
    assert [(line["window"], line["rank"]) for line in applied] == [(w, r) for w in range(3) for r in range(3)]
    for line in applied:
        by_name.setdefault(line["window"], []).extend(line["ids"])
    return {window: sorted(ids) for window, ids in by_name.items()}


@pytest.mark.parametrize(
    "point", [FAST, *(pytest.param(point, marks=pytest.mark.slow) for point in ("1 forward 4", *POINTS))]
)
def test_a_rank_without_memory_stops_all_and_all_start_again_with_less(point, undisturbed, tmp_path):
    weights, path, _ = undisturbed
    learnt, again, said = run(tmp_path, point)
    rank, part, _ = point.split()
    assert f"rank {rank}: out of memory in {part}" in said
    assert "all ranks start again from the newest checkpoint, with micro-batches of at most 1 samples" in said
    failed, began = (float((tmp_path / name).read_text()) for name in ("failed", "failed.again"))
    assert 0 < began - failed < SECONDS
    assert json.loads((again / "reduced_limits.json").read_text())["most"] == 1
    assert samples(again) == samples(path)
    assert max(line["micro_batches"] for line in lines(again, "metrics")) > 6
    assert learnt.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(learnt[name], weight, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_in_parts_is_validated_by_hand_on_one_device(undisturbed):
    _, path, _ = undisturbed
    done = memfit("validate", path, "--json")
    assert done.returncode == 0, done.stderr
    answer, last = json.loads(done.stdout), lines(path, "metrics")[-1]
    assert answer["window"] == 3
    assert answer["values"]["items"] == last["validation"]["items"]
    assert answer["values"]["error"] == pytest.approx(last["validation"]["error"], rel=1e-5)


@pytest.mark.slow
def test_a_validation_without_memory_on_one_rank_is_done_with_less(undisturbed, tmp_path):
    weights, path, _ = undisturbed
    learnt, again, said = run(tmp_path, "1 validate")
    assert "rank 1: validation" in said
    assert "with less in validation" in said
    assert samples(again) == samples(path)
    assert all(torch.equal(learnt[name], weight) for name, weight in weights.items())
    assert lines(again, "metrics")[-1]["validation"]["items"] == 3
