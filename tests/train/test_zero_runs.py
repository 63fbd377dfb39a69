"""memfit run on ZeRO: stopped and gone on with bit for bit, on other ranks, and after memory ran out on one of them.

python -m pytest tests/train/test_zero_runs.py -m slow
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from memfit.plan import Plan, read_plan, write_plan
from memfit.verify.verify_plan import on_ranks
from tests.train.test_ranks import lines, memfit, plan
from tests.train.test_restarts import JOB, samples

pytestmark = pytest.mark.slow
CHOICES = {
    "zero1": {"reduce_bucket_size": 500, "offload_optimizer": True},
    "zero2": {"overlap_comm": True, "allgather_bucket_size": 256},
    "zero3": {"param_persistence_threshold": 100, "offload_param": True},
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The plan for one device, and the final weights of its run."""
    folder = tmp_path_factory.mktemp("one")
    made = replace(on_ranks(read_plan(plan(folder, name="Still")), "single", 1), budget_bytes=256 << 20)
    return made, ran(made, folder)


def ran(plan, folder, *arguments):
    write_plan(plan, folder / "plan.toml")
    done = memfit("run", folder / "plan.toml", "--out", folder / "run", *arguments)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return load_file(folder / "run" / "final" / "net.safetensors")


@pytest.mark.parametrize("engine", CHOICES)
def test_a_run_goes_on_bit_for_bit_and_on_more_ranks(engine, one_device, tmp_path):
    alone, expected = one_device
    two = replace(on_ranks(alone, engine, 2), engine_choices=CHOICES[engine])
    for name in ("whole", "cut", "more"):
        (tmp_path / name).mkdir()
    complete = ran(two, tmp_path / "whole")
    for name, weight in expected.items():
        torch.testing.assert_close(complete[name], weight, rtol=1e-4, atol=1e-5)
    ran(two, tmp_path / "cut", "--windows", 3)
    cut = ran(two, tmp_path / "cut", "--resume")
    assert all(torch.equal(cut[name], weight) for name, weight in complete.items())
    assert lines(tmp_path / "cut" / "run", "samples") == lines(tmp_path / "whole" / "run", "samples")
    ran(two, tmp_path / "more", "--windows", 3)
    more = ran(on_ranks(two, engine, 3), tmp_path / "more", "--resume")
    for name, weight in expected.items():
        torch.testing.assert_close(more[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", CHOICES)
def test_what_is_planned_for_zero_is_run_by_torchrun(engine, one_device, tmp_path):
    _, expected = one_device
    file = plan(tmp_path, "--engine", engine, name="Still")
    made = read_plan(file)
    assert (made.engine, made.micro_batches) == (engine, [[5, 3], [5, 3]])
    assert made.phases["train"]["process_bytes"] < made.budget_bytes
    done = memfit(
        "run", file, "--out", tmp_path / "run", "--json",
        launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"16 = 2 devices x (1 x 5 + 3), {engine}, mesh data 2" in done.stderr
    assert [line["global_batch_done"] for line in lines(tmp_path / "run", "metrics")] == [16, 16, 16, 2, 16, 16]
    learnt = load_file(tmp_path / "run" / "final" / "net.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(learnt[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_memory_that_runs_out_on_one_rank_hangs_none(engine, tmp_path):
    shape = {"unit": "samples", "global_batch": 14, "micro_batch": 3, "micro_batches": [[3, 2], [3, 2], [3, 1]]}
    planned = Plan(
        job=JOB, settings={}, device="cpu", budget_bytes=256 << 20,
        arithmetic="", engine=engine, precision="fp32", seed=3, **shape,
    )  # fmt: skip
    for name in ("undisturbed", "failing"):
        (tmp_path / name).mkdir()
    expected = ran(planned, tmp_path / "undisturbed", "--save-every", 0)
    settings = {**planned.settings, "fails": "1 forward 13", "mark": str(tmp_path / "failed")}
    learnt = ran(replace(planned, settings=settings), tmp_path / "failing", "--save-every", 0)
    assert (tmp_path / "failed").exists()
    assert samples(tmp_path / "failing" / "run") == samples(tmp_path / "undisturbed" / "run")
    if engine != "zero1":
        assert json.loads((tmp_path / "failing" / "run" / "reduced_limits.json").read_text())["most"] == 1
    for name, weight in expected.items():
        torch.testing.assert_close(learnt[name], weight, rtol=1e-4, atol=1e-6)
