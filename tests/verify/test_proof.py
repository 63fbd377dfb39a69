"""memfit run --verify-every: windows of real ranks, proven on one device beside the training.

python -m pytest tests/verify/test_proof.py
"""

import json
from pathlib import Path

import pytest

from memfit.plan import Plan, write_plan
from tests.train.test_ranks import lines, memfit

ROOT = Path(__file__).parents[2]


def run(folder: Path, name: str, engine: str, world: int = 2):
    plan = Plan(
        job=f"{ROOT}/tests/verify/proven.py:{name}", settings={}, device="cpu", budget_bytes=256 << 20, unit="samples",
        global_batch=14, micro_batch=3, micro_batches=[[3, 3, 1]] * 2 if world == 2 else [[14]], arithmetic="",
        engine=engine, precision="fp32", seed=3,
    )  # fmt: skip
    write_plan(plan, folder / "plan.toml")
    return memfit("run", folder / "plan.toml", "--out", folder / "run", "--windows", 4, "--verify-every", 2)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("Proven", "fsdp2"),
        pytest.param("WithoutState", "fsdp2", marks=pytest.mark.slow),
        pytest.param("Proven", "ddp", marks=pytest.mark.slow),
    ],
)
def test_windows_of_ranks_are_proven_during_the_run(name, engine, tmp_path):
    done = run(tmp_path, name, engine)
    assert done.returncode == 0, done.stderr
    proofs = lines(tmp_path / "run", "verified")
    assert proofs[0]["window"] == 1
    for proof in proofs:
        assert (proof["engine"], proof["world"], proof["ok"]) == (engine, 2, True)
        assert proof["max_relative_difference"]["loss"] <= proof["bound"]
        assert proof["of_bounds"]["parameters"] <= 1
    assert not (tmp_path / "run" / ".proof").exists()
    assert [line["window"] for line in lines(tmp_path / "run", "metrics")] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_windows_of_layers_that_are_cut_are_proven_in_the_precision_of_the_run(precision, tmp_path):
    plan = Plan(
        job=f"{ROOT}/tests/verify/cut_jobs.py:Cut", settings={"precision": precision}, device="cpu",
        budget_bytes=256 << 20, unit="samples", global_batch=14, micro_batch=5, micro_batches=[[5, 5, 4]],
        arithmetic="", engine="fsdp2", mesh={"tp": 2}, precision=precision, seed=3,
    )  # fmt: skip
    write_plan(plan, tmp_path / "plan.toml")
    done = memfit("run", tmp_path / "plan.toml", "--out", tmp_path / "run", "--windows", 2, "--verify-every", 1)
    assert done.returncode == 0, done.stderr
    for proof in lines(tmp_path / "run", "verified"):
        assert proof["ok"] is True
        assert 0 < proof["of_bounds"]["parameters"] <= 1


def test_a_window_that_depends_on_the_rank_is_told_and_ends_with_4(tmp_path):
    done = run(tmp_path, "OfTheRank", "ddp")
    assert done.returncode == 4, done.stderr
    assert "WINDOW 1 IS NOT THE SAME ON ONE DEVICE" in done.stderr
    assert json.loads((tmp_path / "run" / "verified.jsonl").read_text().splitlines()[0])["ok"] is False
    assert (tmp_path / "run" / "final" / "net.safetensors").exists()
