"""Which ranks are traced, so that the one that needs most is among them.

python -m pytest tests/planner/test_binding_ranks.py
"""

import pytest
import torch
from torch import nn

import memfit
from memfit.engine.capabilities import CAPABILITIES
from memfit.mesh import MeshShape
from memfit.planner.predict import BINDING_RANK, binding_ranks, binding_reason
from tests.engine.context_jobs import Divided


class Uneven(memfit.Job):
    """DeepSpeed deals whole parameters of a group to ranks in flat order: the large one falls on the last."""

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 400))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}


@pytest.mark.parametrize("engine", list(CAPABILITIES))
def test_only_zero_with_whole_weights_traces_the_rank_with_most_gradients_too(engine):
    job = Uneven()
    world = 4 if CAPABILITIES[engine].several_ranks else 1
    ranks = binding_ranks(job, job.nets(), engine, world)
    assert ranks[0] == BINDING_RANK
    assert len(ranks) == (2 if engine in ("zero1", "zero2") else 1)
    assert binding_ranks(job, job.nets(), engine, 1) == (BINDING_RANK,)


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (MeshShape(ep=2), "with ep 0: experts are divided equally, all else is whole"),
        (
            MeshShape(dp_shard=2, ep=2),
            "with dp_shard 0 and ep 0: experts are divided equally, tensors are cut by ceiling",
        ),
        (MeshShape(dp_shard_in_ep=2), "first parts are largest, where routers send as many tokens to each rank"),
        (MeshShape(dp_shard=2, tp=2), "with dp_shard 0 and tp 0: tensors are cut by ceiling division"),
        (
            MeshShape(pp=2, cp=4),
            "of the others all were traced; within a stage, of ranks of one sequence those with the largest shards",
        ),
        (
            MeshShape(cp=2, ep=2),
            "(cp 1) were traced; no rank needs more than those with ep 0: experts are divided equally, tensors are cut",
        ),
        (
            MeshShape(dp_shard_in_ep=2, cp=2),
            "(cp 1) were traced; no rank needs more than those with dp_shard_in_ep 0: experts are divided equally",
        ),
        (MeshShape(pp=2, tp=2), "within a stage, no rank needs more than those with tp 0"),
    ],
)
def test_the_reason_says_what_is_cut_by_ceiling_division_and_what_equally(mesh, reason):
    assert reason in binding_reason(mesh)


def test_of_every_stage_the_first_and_the_last_rank_of_a_sequence_are_traced():
    job = Divided()
    mesh = MeshShape(pp=2, dp_shard=2, cp=2, tp=2)
    assert binding_ranks(job, job.nets(), "fsdp2", mesh.world, mesh) == (0, 2, 8, 10)
    assert binding_ranks(job, job.nets(), "fsdp2", 4, MeshShape(pp=2, dp_shard=2)) == (0, 2)


def test_of_ranks_of_one_sequence_the_last_is_behind_all_that_divide_experts():
    job = Divided()
    mesh = MeshShape(dp_shard=2, cp=3, tp=2, ep=2)
    (first, last) = binding_ranks(job, {}, "fsdp2", mesh.world, mesh)
    assert mesh.place(first) == {"dp_shard": 0, "cp": 0, "tp": 0, "ep": 0}
    assert mesh.place(last) == {"dp_shard": 0, "cp": 2, "tp": 0, "ep": 0}
