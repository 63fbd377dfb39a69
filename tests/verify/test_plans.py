"""Of a plan, its own engine and mesh are verified. Real ranks.

python -m pytest tests/verify/test_plans.py
"""

from dataclasses import replace

import pytest

from memfit.loading import load_job
from memfit.mesh import MeshShape
from memfit.plan import read_plan, write_plan
from memfit.verify.verify_plan import on_ranks, plan_for
from tests.verify.test_verify import ROOT, run_verify, verify

SOUND = f"{ROOT}/tests/verify/jobs.py:Sound"


def plan_file(tmp_path, mesh, **changes):
    path = tmp_path / "plan.toml"
    plan = on_ranks(plan_for(load_job(SOUND), SOUND, [2], None, None), "fsdp2", 2, mesh)
    write_plan(replace(plan, **changes), path)
    return str(path)


@pytest.mark.parametrize("mesh", [None, MeshShape(dp_shard=2)])
def test_a_plan_is_verified_with_its_engine_and_its_mesh(tmp_path, mesh):
    path = plan_file(tmp_path, mesh)
    assert bool(read_plan(path).mesh) == (mesh is not None)
    code, answer = verify(path, "--windows", "1")
    assert (code, answer["ok"]) == (0, True)
    assert [(row["world"], row["engine"]) for row in answer["worlds"]] == [(1, "single"), (2, "fsdp2")]


def test_what_is_asked_for_comes_before_the_plan(tmp_path):
    code, answer = verify(plan_file(tmp_path, MeshShape(dp_shard=2)), "--windows", "1", "--world-sizes", "1,2")
    assert (code, [row["engine"] for row in answer["worlds"]]) == (0, ["single", "ddp"])


def test_a_plan_of_more_ranks_than_the_machine_holds_is_refused_with_its_mesh(tmp_path):
    path = plan_file(tmp_path, MeshShape(dp_shard=2))
    plan = read_plan(path)
    write_plan(
        replace(plan, mesh={"dp_shard": 4096}, micro_batches=[[1]] * 4096, global_batch=4096, micro_batch=1), path
    )
    done = run_verify(path)
    assert done.returncode == 2
    assert "mesh dp_shard=4096: 4096 ranks do not fit on this machine" in done.stderr
    assert done.stderr.count("\n") == 1
