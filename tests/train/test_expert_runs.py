"""memfit plan, run and verify of mixtures whose experts are divided over ranks, or cut.

python -m pytest tests/train/test_expert_runs.py -m slow
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from memfit.mesh import MeshShape
from memfit.plan import read_plan
from memfit.verify.verify_plan import on_ranks
from tests.train.test_built_in_mesh_runs import WINDOWS, killed_after_a_window
from tests.train.test_mesh_runs import ran, same
from tests.train.test_ranks import ROOT, lines, memfit

pytestmark = pytest.mark.slow
JOBS = f"{ROOT}/tests/engine/expert_jobs.py"
DIVIDED, BOTH = MeshShape(ep=2), MeshShape(dp_shard=2, ep=2)
SENT, SENT_BOTH = MeshShape(dp_shard_in_ep=2), MeshShape(dp_shard=2, dp_shard_in_ep=2)
CUT, CUT_BOTH = MeshShape(tp=2), MeshShape(dp_shard=2, tp=2)
CUT_DIVIDED, STAGED, CUT_SENT = MeshShape(tp=2, ep=2), MeshShape(pp=2, ep=2), MeshShape(dp_shard_in_ep=2, tp=2)
SENT_STAGED = MeshShape(pp=2, dp_shard_in_ep=2)
CASES = [
    *(
        (job, mesh)
        for mesh in (DIVIDED, BOTH, SENT, SENT_BOTH)
        for job in ("Mixture", "SharedExpert", "NormedMixture", "Biased")
    ),
    *(
        (job, mesh)
        for mesh in (CUT, CUT_BOTH, CUT_DIVIDED, STAGED, CUT_SENT, SENT_STAGED)
        for job in ("Mixture", "SharedExpert", "NormedMixture")
    ),
    ("Biased", CUT_DIVIDED),
]


def planned(mesh, file):
    shape = ("--global-batch", 8, "--micro-batch", 2, *(("--mesh", mesh) if mesh else ()))
    done = memfit("plan", f"{JOBS}:Mixture", *shape, "--memory", "256MiB", "--out", file)
    assert done.returncode == 0, done.stderr
    return read_plan(file)


@pytest.mark.parametrize(
    "mesh", [DIVIDED, BOTH, SENT, SENT_BOTH, CUT, CUT_BOTH, CUT_DIVIDED, STAGED, CUT_SENT, SENT_STAGED], ids=str
)
def test_a_run_that_is_killed_goes_on_bit_for_bit(mesh, tmp_path):
    file = tmp_path / "plan.toml"
    plan = planned(mesh, file)
    assert (plan.engine, plan.mesh, plan.ranks) == ("fsdp2", mesh.sizes(), mesh.world)
    assert len(plan.micro_batches) == mesh.data_ranks
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = memfit("run", file, "--out", whole, "--windows", WINDOWS)
    assert done.returncode == 0, done.stderr
    killed_after_a_window(file, cut)
    done = memfit("run", file, "--out", cut, "--windows", WINDOWS, "--resume")
    assert done.returncode == 0, done.stderr
    expected, learnt = (load_file(run / "final" / "net.safetensors") for run in (whole, cut))
    assert expected["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 80)
    assert [name for name, weight in expected.items() if not torch.equal(learnt[name], weight)] == []
    assert [line["global_batch_done"] for line in lines(cut, "metrics")] == [8] * WINDOWS


def test_a_run_goes_on_on_another_mesh_and_on_one_device(tmp_path):
    alone = planned(None, tmp_path / "alone.toml")
    expected, _ = ran(alone, tmp_path / "alone", "--windows", 8)
    folder = tmp_path / "run"
    _, said = ran(on_ranks(alone, "fsdp2", 2, DIVIDED), folder, "--windows", 1)
    assert "fsdp2, mesh ep 2" in said
    _, said = ran(on_ranks(alone, "fsdp2", 4, BOTH), folder, "--windows", 2, "--resume")
    assert "8 = 2 groups of 2 devices x (2 x 2), fsdp2, mesh dp_shard 2 x ep 2" in said
    ran(on_ranks(alone, "fsdp2", 2), folder, "--windows", 3, "--resume")
    _, said = ran(on_ranks(alone, "fsdp2", 4, CUT_DIVIDED), folder, "--windows", 4, "--resume")
    assert "8 = 4 x 2 on 1 group of 4 devices, fsdp2, mesh tp 2 x ep 2" in said
    ran(on_ranks(alone, "fsdp2", 4, STAGED), folder, "--windows", 5, "--resume")
    ran(on_ranks(alone, "fsdp2", 4, SENT_STAGED), folder, "--windows", 6, "--resume")
    _, said = ran(on_ranks(alone, "fsdp2", 4, SENT_BOTH), folder, "--windows", 7, "--resume")
    assert "8 = 4 devices x (1 x 2), fsdp2, mesh dp_shard 2 x dp_shard_in_ep 2" in said
    same(ran(alone, folder, "--windows", 8, "--resume")[0], expected)
    assert {line["rank"] for line in lines(folder / "run", "samples")} == {0, 1, 2, 3}


@pytest.mark.parametrize(("job", "mesh"), CASES, ids=str)
def test_a_mixture_is_verified_against_one_device(job, mesh):
    shape = ("--global-batch", 8, "--micro-batch", 2)
    done = memfit("verify", f"{JOBS}:{job}", *shape, "--mesh", mesh, "--windows", 2, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["worlds"][1]
    assert (answer["mesh"], answer["world"], answer["ok"]) == (str(mesh), mesh.world, True)
    assert 0 < answer["max_relative_difference"]["gradients"] <= answer["bound"]
    assert max(answer["of_bounds"].values()) <= 1


def test_a_plan_whose_ranks_send_tokens_is_exported_to_torchtitan_alone(tmp_path):
    planned(SENT_BOTH, tmp_path / "plan.toml")
    done = memfit("export", tmp_path / "plan.toml", "--to", "torchtitan", "--out", tmp_path / "run.sh")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run.sh").read_text()
    assert "data_parallel_shard_degree 4" in text
    assert "expert_parallel_degree 2" in text
    refused = memfit("export", tmp_path / "plan.toml", "--to", "torchrun", "--out", tmp_path / "run.sh")
    assert refused.returncode == 2
    assert "send each other the tokens of experts" in refused.stderr


@pytest.mark.parametrize(
    ("mesh", "why"),
    [(DIVIDED, "share their samples"), (CUT_DIVIDED, "share their samples"), (STAGED, "share their samples"),
     (CUT_SENT, "ranks of tp hold parts of each expert, and those of torchtitan whole ones")], ids=str,
)  # fmt: skip
def test_a_plan_whose_ranks_divide_experts_is_not_exported(mesh, why, tmp_path):
    planned(mesh, tmp_path / "plan.toml")
    for tool in ("torchrun", "torchtitan"):
        refused = memfit("export", tmp_path / "plan.toml", "--to", tool, "--out", tmp_path / "run.sh")
        assert refused.returncode == 2
        assert (why if tool == "torchtitan" else "share their samples") in refused.stderr
