"""memfit plan, run, verify and resume with sequences that are divided over ranks (``cp``).

python -m pytest tests/train/test_context_runs.py -m slow
"""

import json
from dataclasses import replace

import pytest
import torch

from memfit.installation import release_number
from memfit.mesh import MeshShape
from memfit.plan import read_plan
from memfit.torch_compat.context_parallel import OLDEST
from memfit.verify.verify_plan import on_ranks
from tests.train.test_built_in_mesh_runs import WINDOWS
from tests.train.test_mesh_runs import planned_and_run, ran, same, verified_killed_and_resumed
from tests.train.test_ranks import ROOT, lines, memfit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses cp before torch 2.13"),
]
LLAMA = f"{ROOT}/tests/engine/context_jobs.py:Divided"
SEQUENCES, BOTH, CUT = MeshShape(cp=2), MeshShape(dp_shard=2, cp=2), MeshShape(cp=2, tp=2)
STAGES, EXPERTS, SENT = MeshShape(pp=2, cp=2), MeshShape(cp=2, ep=2), MeshShape(dp_shard_in_ep=2, cp=2)
MIXTURE, SKEWED, NORMED = (LLAMA.replace(":Divided", f":{name}") for name in (
    "DividedMixture", "SkewedMixture", "DividedNormedMixture"
))  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return planned_and_run(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return planned_and_run(MIXTURE, tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize(
    ("mesh", "choices"),
    [
        (SEQUENCES, {}),
        (BOTH, {}),
        (CUT, {}),
        (STAGES, {}),
        (SEQUENCES, {"cpu_offload": True}),
        (BOTH, {"cpu_offload": True}),
    ],
    ids=str,
)
def test_a_run_is_verified_killed_and_resumed_bit_for_bit(mesh, choices, llama, tmp_path):
    alone, expected = llama
    divided = replace(on_ranks(alone, "fsdp2", mesh.world, mesh), engine_choices=choices)
    verified_killed_and_resumed(divided, expected, tmp_path)
    assert {line["global_batch_done"] for line in lines(tmp_path / "whole" / "run", "metrics")} == {8}
    shares = [line["rank"] for line in lines(tmp_path / "whole" / "run", "samples") if line["window"] == 0]
    assert shares == list(range(mesh.data_ranks)), "ranks of one sequence have one share"


@pytest.mark.parametrize("mesh", [EXPERTS, SENT], ids=str)
def test_a_run_of_a_mixture_is_verified_killed_and_resumed_bit_for_bit(mesh, mixture, tmp_path):
    alone, expected = mixture
    verified_killed_and_resumed(on_ranks(alone, "fsdp2", mesh.world, mesh), expected, tmp_path)
    shares = [line["rank"] for line in lines(tmp_path / "whole" / "run", "samples") if line["window"] == 0]
    assert shares == list(range(mesh.data_ranks))


def test_a_run_of_a_mixture_goes_on_on_any_mesh_and_on_one_device(mixture, tmp_path):
    alone, expected = mixture
    folder, divided = tmp_path / "run", on_ranks(alone, "fsdp2", 4, EXPERTS)
    ran(divided, folder, "--windows", 1)
    ran(on_ranks(alone, "fsdp2", 4, SENT), folder, "--windows", 2, "--resume")
    ran(divided, folder, "--windows", 3, "--resume")
    same(ran(alone, folder, "--windows", WINDOWS, "--resume")[0], expected)


def test_a_run_goes_on_on_any_mesh_and_on_one_device(llama, tmp_path):
    alone, expected = llama
    folder = tmp_path / "run"
    ran(on_ranks(alone, "fsdp2", 2, SEQUENCES), folder, "--windows", 1)
    ran(on_ranks(alone, "fsdp2", 4, BOTH), folder, "--windows", 2, "--resume")
    ran(on_ranks(alone, "fsdp2", 2), folder, "--windows", 3, "--resume")
    same(ran(alone, folder, "--windows", WINDOWS, "--resume")[0], expected)


def test_a_run_of_stages_goes_on_on_one_device_and_back_again(llama, tmp_path):
    alone, expected = llama
    folder, staged = tmp_path / "run", on_ranks(alone, "fsdp2", 4, STAGES)
    ran(staged, folder, "--windows", 1)
    ran(on_ranks(alone, "fsdp2", 1), folder, "--windows", 2, "--resume")
    ran(staged, folder, "--windows", 3, "--resume")
    same(ran(alone, folder, "--windows", WINDOWS, "--resume")[0], expected)


def test_a_rank_that_is_killed_while_another_waits_in_a_ring_is_lost_and_the_run_goes_on(llama, tmp_path):
    alone, expected = llama
    (tmp_path / "left").write_text("3")
    job = alone.job.replace(":Divided", ":Lost")
    lost = replace(alone, job=job, settings={**alone.settings, "marker": str(tmp_path / "left")})
    learnt, said = ran(on_ranks(lost, "fsdp2", 2, SEQUENCES), tmp_path / "run", "--windows", WINDOWS)
    assert (tmp_path / "left").read_text().startswith("-"), "it was killed"
    assert "ring fails" not in said
    same(learnt, expected)


@pytest.mark.parametrize(
    ("job", "mesh"),
    [
        *((LLAMA, mesh) for mesh in (SEQUENCES, BOTH, CUT, STAGES)),
        *((job, mesh) for mesh in (EXPERTS, SENT) for job in (MIXTURE, SKEWED, NORMED)),
    ],
    ids=str,
)
def test_what_is_planned_is_verified_and_not_exported(job, mesh, tmp_path):
    file = tmp_path / "mesh.toml"
    made = memfit("plan", job, "--global-batch", 8, "--mesh", mesh, "--memory", "256MiB", "--out", file)
    assert made.returncode == 0, made.stderr
    planned = read_plan(file)
    assert (planned.engine, planned.mesh, planned.ranks) == ("fsdp2", mesh.sizes(), mesh.world)
    assert len(planned.micro_batches) == mesh.data_ranks
    for tool in ("torchrun", *(("torchtitan",) if mesh.ep > 1 else ())):
        refused = memfit("export", file, "--to", tool, "--out", tmp_path / "run.sh")
        assert refused.returncode == 2
        assert "share their samples" in refused.stderr
    if mesh.sending > 1:
        done = memfit("export", file, "--to", "torchtitan", "--out", tmp_path / "run.sh")
        assert done.returncode == 0, done.stderr
        assert "expert_parallel_degree 4" in (tmp_path / "run.sh").read_text()
    done = memfit("verify", job, "--mesh", mesh, "--windows", "2", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)["worlds"][1]
    assert (answer["mesh"], answer["world"], answer["ok"]) == (str(mesh), mesh.world, True)
    assert 0 < answer["max_relative_difference"]["gradients"] <= answer["bound"]
    assert answer["of_bounds"]["averages"] <= 1


def test_the_search_of_meshes_divides_sequences_where_the_job_names_them(tmp_path):
    made = memfit("plan", LLAMA, "--devices", 4, "--nodes", 1, "--global-batch", 8, "--device", "h100", "--json")
    assert made.returncode == 0, made.stderr
    meshes = [row["mesh"] for row in json.loads(made.stdout)["meshes"]]
    assert {"cp": 4} in meshes
    assert {"dp_shard": 2, "cp": 2} in meshes
    assert {"pp": 2, "cp": 2} in meshes
    words = f"{ROOT}/tests/engine/tensor_jobs.py:Words"
    other = memfit("plan", words, "--devices", 4, "--nodes", 1, "--global-batch", 8, "--device", "h100", "--json")
    assert other.returncode == 0, other.stderr
    assert not any("cp" in row["mesh"] for row in json.loads(other.stdout)["meshes"])


def test_the_search_of_meshes_divides_sequences_and_experts():
    made = memfit("plan", MIXTURE, "--devices", 4, "--nodes", 1, "--global-batch", 8, "--device", "h100", "--json",
                  "--set", "precision=bf16")  # fmt: skip
    assert made.returncode == 0, made.stderr
    rows = [row for row in json.loads(made.stdout)["meshes"] if row["mesh"] == {"cp": 2, "ep": 2}]
    assert [row["state"] for row in rows] != ["refused"]
    assert len(rows) == 1
