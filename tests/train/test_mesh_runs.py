"""memfit run and verify on meshes: planned, run, resumed on another mesh, and compared with one device.

python -m pytest tests/train/test_mesh_runs.py -m slow
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from memfit.mesh import MeshShape
from memfit.plan import read_plan, write_plan
from memfit.verify.verify_plan import on_ranks
from tests.train.test_built_in_mesh_runs import WINDOWS, killed_after_a_window
from tests.train.test_ranks import ROOT, lines, memfit, plan

pytestmark = pytest.mark.slow
LLAMA = f"{ROOT}/tests/engine/tensor_jobs.py:Words"
HYBRID = MeshShape(dp_replicate=2, dp_shard=2)


def ran(plan, folder, *arguments):
    folder.mkdir(exist_ok=True)
    write_plan(plan, folder / "plan.toml")
    done = memfit("run", folder / "plan.toml", "--out", folder / "run", *arguments)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "run" / "final" / "net.safetensors"), done.stderr


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The plan for one device, and the final weights of its run."""
    folder = tmp_path_factory.mktemp("one")
    made = replace(on_ranks(read_plan(plan(folder, name="Still")), "single", 1), budget_bytes=256 << 20)
    return made, ran(made, folder / "alone")[0]


def same(learnt, expected):
    for name, weight in expected.items():
        torch.testing.assert_close(learnt[name], weight, rtol=1e-4, atol=1e-5)


def verified_killed_and_resumed(divided, expected, folder):
    """Runs a plan for several ranks that verify themselves, and again with a kill and a resume: the weights are those
    of one device, and the same bit for bit. The first run's folder is ``whole/run``."""
    complete, _ = ran(divided, folder / "whole", "--windows", WINDOWS, "--verify-every", 2)
    same(complete, expected)
    proofs = lines(folder / "whole" / "run", "verified")
    assert proofs
    assert all(proof["ok"] for proof in proofs)
    write_plan(divided, folder / "plan.toml")
    killed_after_a_window(folder / "plan.toml", folder / "cut" / "run")
    cut, _ = ran(divided, folder / "cut", "--windows", WINDOWS, "--resume")
    assert [name for name, weight in complete.items() if not torch.equal(cut[name], weight)] == []


def test_a_run_on_a_mesh_learns_what_one_device_does_and_goes_on_on_any_mesh(one_device, tmp_path):
    alone, expected = one_device
    hybrid = on_ranks(alone, "fsdp2", 4, HYBRID)
    complete, said = ran(hybrid, tmp_path / "whole")
    assert "fsdp2, mesh dp_replicate 2 x dp_shard 2" in said
    same(complete, expected)
    ran(hybrid, tmp_path / "cut", "--windows", 3)
    cut, _ = ran(hybrid, tmp_path / "cut", "--resume")
    assert all(torch.equal(cut[name], weight) for name, weight in complete.items())
    assert lines(tmp_path / "cut" / "run", "samples") == lines(tmp_path / "whole" / "run", "samples")
    ran(hybrid, tmp_path / "other", "--windows", 3)
    ran(on_ranks(alone, "fsdp2", 2), tmp_path / "other", "--windows", 4, "--resume")
    same(ran(alone, tmp_path / "other", "--resume")[0], expected)


def test_what_is_planned_for_a_mesh_says_so_in_its_file(tmp_path):
    job = plan(tmp_path, name="Still").with_name("net.py")
    made = memfit(
        "plan", f"{job}:Still", "--global-batch", 16, "--mesh", HYBRID, "--memory", "64MiB",
        "--out", tmp_path / "mesh.toml",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    planned = read_plan(tmp_path / "mesh.toml")
    assert (planned.engine, planned.mesh, planned.ranks) == ("fsdp2", HYBRID.sizes(), 4)
    assert planned.micro_batches == [[4], [4], [4], [4]]


def planned_and_run(job, folder):
    """A plan for one device, and the final weights of its run."""
    made = memfit(
        "plan", job, "--global-batch", 8, "--micro-batch", 3, "--memory", "256MiB", "--out", folder / "made.toml"
    )
    assert made.returncode == 0, made.stderr
    alone = read_plan(folder / "made.toml")
    return alone, ran(alone, folder / "alone", "--windows", WINDOWS)[0]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return planned_and_run(LLAMA, tmp_path_factory.mktemp("words"))


def test_a_run_of_cut_nets_learns_what_one_device_does_and_goes_on_on_any_mesh(words, tmp_path):
    alone, expected = words
    cut, both = MeshShape(tp=2), MeshShape(dp_shard=2, tp=2)
    folder = tmp_path / "run"
    _, said = ran(on_ranks(alone, "fsdp2", 2, cut), folder, "--windows", 1)
    assert "fsdp2, mesh tp 2" in said
    _, said = ran(on_ranks(alone, "fsdp2", 4, both), folder, "--windows", 2, "--resume")
    assert "8 = 2 groups of 2 devices x (1 x 3 + 1), fsdp2, mesh dp_shard 2 x tp 2" in said
    same(ran(alone, folder, "--windows", 4, "--resume")[0], expected)
    assert [line["global_batch_done"] for line in lines(folder / "run", "metrics")] == [8, 8, 8, 8]
    by_window = [line["rank"] for line in lines(folder / "run", "samples")]
    assert by_window == [0, 0, 1, 0, 0], "ranks that hold parts of a layer have one share"


@pytest.mark.parametrize(
    ("mesh", "choice"),
    [
        (MeshShape(tp=2), "sequence_parallel"), (MeshShape(dp_shard=2, tp=2), "sequence_parallel"),
        (MeshShape(dp_replicate=2, tp=2), "sequence_parallel"),
        (MeshShape(dp_shard=2), "cpu_offload"), (MeshShape(dp_replicate=2, dp_shard=2), "cpu_offload"),
        (MeshShape(dp_shard=2, tp=2), "cpu_offload"), (MeshShape(pp=2, dp_shard=2), "cpu_offload"),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_with_a_choice_of_its_mesh_is_verified_killed_and_resumed_bit_for_bit(mesh, choice, words, tmp_path):
    """Divided tokens, and parts on the host, which on the CPU is the device."""
    alone, expected = words
    divided = replace(on_ranks(alone, "fsdp2", mesh.world, mesh), engine_choices={choice: True})
    verified_killed_and_resumed(divided, expected, tmp_path)


@pytest.mark.parametrize(
    "mesh", [MeshShape(tp=2), MeshShape(dp_shard=2, tp=2), MeshShape(dp_replicate=2, tp=2)], ids=str
)
def test_what_is_planned_for_cut_nets_is_verified_and_not_exported(mesh, tmp_path):
    file = tmp_path / "mesh.toml"
    made = memfit("plan", LLAMA, "--global-batch", 8, "--mesh", mesh, "--memory", "256MiB", "--out", file)
    assert made.returncode == 0, made.stderr
    planned = read_plan(file)
    assert (planned.engine, planned.mesh, planned.ranks) == ("fsdp2", mesh.sizes(), mesh.world)
    assert len(planned.micro_batches) == mesh.data_ranks
    assert "not estimated" in planned.reasons["mesh"]
    refused = memfit("export", file, "--to", "torchrun", "--out", tmp_path / "run.sh")
    assert refused.returncode == 2
    assert "share their samples" in refused.stderr
    done = memfit("verify", LLAMA, "--mesh", mesh, "--windows", "1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["worlds"][1]
    assert (answer["mesh"], answer["world"], answer["ok"]) == (str(mesh), mesh.world, True)
    assert 0 < answer["max_relative_difference"]["gradients"] <= answer["bound"]


def test_a_mesh_is_verified_against_one_rank():
    done = memfit("verify", "f5_tts/tiny", "--mesh", str(HYBRID), "--windows", "1", "--json")
    assert done.returncode == 0, done.stderr
    alone, mesh = json.loads(done.stdout)["worlds"]
    assert (alone["mesh"], mesh["mesh"], mesh["world"], mesh["ok"]) == ("", str(HYBRID), 4, True)
    assert 0 < mesh["max_relative_difference"]["gradients"] <= mesh["bound"]
    assert mesh["of_bounds"]["averages"] <= 1
