"""The mesh of a run: what is read, where ranks are, and what is refused.

python -m pytest tests/test_mesh.py
"""

import pytest

from memfit.engine.capabilities import dimensions, engine_of
from memfit.errors import InputError
from memfit.mesh import MeshShape, communicators, mesh_of, parse_mesh


def test_a_mesh_is_read_and_written_in_the_order_of_its_dimensions():
    mesh = parse_mesh(" dp_shard=4, dp_replicate=2 ")
    assert mesh == MeshShape(dp_replicate=2, dp_shard=4)
    assert str(mesh) == "dp_replicate=2,dp_shard=4"
    assert mesh_of(mesh.sizes(), "") == mesh
    assert (mesh.world, mesh.data_ranks, mesh.same_samples) == (8, 8, 1)
    cut = parse_mesh("tp=4,dp_shard=2")
    assert (cut.world, cut.data_ranks, cut.same_samples) == (8, 2, 4)


def test_neighbouring_ranks_differ_in_the_last_dimension():
    mesh = MeshShape(dp_replicate=2, dp_shard=2, tp=3)
    places = [tuple(mesh.place(rank).values()) for rank in range(mesh.world)]
    assert places == [(replica, shard, tensor) for replica in range(2) for shard in range(2) for tensor in range(3)]
    assert [rank // mesh.same_samples for rank in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "why", "write"),
    [
        ("dp_shrad=2", "no dimension 'dp_shrad'", "write dp_shard=2"),
        ("colour=2", "no dimension 'colour'", "write some of"),
        ("dp_shard=0", "dp_shard = 0 is not a number of ranks", "1 or more"),
        ("dp_shard=-1", "'dp_shard=-1' is not a dimension and its ranks", "dp_replicate=2,dp_shard=4"),
        ("dp_shard", "'dp_shard' is not a dimension and its ranks", "dp_replicate=2,dp_shard=4"),
        ("dp_shard=2,dp_shard=2", "dp_shard is given twice", "once"),
        ("ep=0", "ep = 0 is not a number of ranks", "1 or more"),
    ],
)
def test_what_is_no_mesh_is_refused_with_what_to_write(text, why, write):
    with pytest.raises(InputError) as refused:
        parse_mesh(text)
    assert why in str(refused.value)
    assert write in str(refused.value).partition(";")[2]


def test_the_engine_follows_from_the_mesh():
    assert engine_of(MeshShape(dp_replicate=4)) == "ddp"
    assert engine_of(MeshShape(dp_shard=4)) == engine_of(MeshShape(dp_replicate=2, dp_shard=4)) == "fsdp2"
    assert engine_of(MeshShape(tp=2)) == engine_of(MeshShape(dp_replicate=2, dp_shard=2, tp=2)) == "fsdp2"
    assert engine_of(MeshShape(ep=2)) == engine_of(MeshShape(dp_replicate=2, dp_shard=2, ep=2)) == "fsdp2"
    assert engine_of(MeshShape(dp_replicate=4, tp=2)) == engine_of(MeshShape(dp_replicate=4, tp=2, ep=2)) == "fsdp2"
    with pytest.raises(InputError, match="write dp_shard=4 instead of dp_replicate"):
        engine_of(MeshShape(dp_replicate=4, dp_shard_in_ep=2))
    assert engine_of(MeshShape(tp=2, ep=3)) == engine_of(MeshShape(dp_shard=2, tp=2, ep=3)) == "fsdp2"
    assert engine_of(MeshShape(dp_shard_in_ep=2)) == engine_of(MeshShape(dp_shard=2, dp_shard_in_ep=2)) == "fsdp2"
    with pytest.raises(InputError, match="send each other tokens are not carried together with ep"):
        engine_of(MeshShape(dp_shard_in_ep=2, ep=2))
    for other in ("pp", "cp", "tp"):
        assert engine_of(MeshShape(dp_shard_in_ep=2, **{other: 2})) == "fsdp2"
    assert engine_of(MeshShape(pp=2, ep=2)) == engine_of(MeshShape(pp=2, tp=2, ep=2)) == "fsdp2"
    for engine in ("ddp", "zero3", "single"):
        with pytest.raises(InputError, match=f"--engine {engine} --mesh .* write --engine fsdp2"):
            engine_of(MeshShape(dp_replicate=2, dp_shard=4), engine)
    with pytest.raises(InputError, match="write --engine ddp"):
        engine_of(MeshShape(dp_replicate=4), "fsdp2")


def test_ranks_that_divide_experts_are_neighbours_and_share_their_samples():
    mesh = MeshShape(dp_shard=2, ep=3)
    assert (mesh.world, mesh.data_ranks, mesh.same_samples) == (6, 2, 3)
    assert [mesh.place(rank)["ep"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    cut = MeshShape(tp=2, ep=3)
    assert (cut.world, cut.data_ranks, cut.same_samples) == (6, 1, 6)
    assert [cut.place(rank)["tp"] for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_ranks_that_send_each_other_tokens_are_neighbours_with_samples_of_their_own():
    mesh = MeshShape(dp_shard=2, dp_shard_in_ep=3)
    assert (mesh.world, mesh.data_ranks, mesh.same_samples, mesh.shards) == (6, 6, 1, 6)
    assert [mesh.place(rank)["dp_shard_in_ep"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ranks_that_send_each_other_tokens_are_those_of_a_sequence_too():
    mesh = MeshShape(dp_shard=2, dp_shard_in_ep=3, cp=2)
    assert (mesh.sending, mesh.expert_dimensions, mesh.shards) == (6, ("dp_shard_in_ep", "cp"), 12)
    assert (mesh.data_ranks, mesh.same_samples) == (6, 2)
    assert (MeshShape(dp_shard=2, cp=2).sending, MeshShape(dp_shard=2, cp=2).expert_dimensions) == (1, ())


def test_one_dimension_is_the_engine_without_a_mesh():
    assert dimensions("fsdp2", MeshShape(dp_shard=4)) is dimensions("ddp", MeshShape(dp_replicate=4)) is None
    hybrid = MeshShape(dp_replicate=2, dp_shard=4)
    assert dimensions("fsdp2", hybrid) == hybrid
    assert dimensions("fsdp2", MeshShape(tp=2)) == MeshShape(tp=2)


def test_each_dimension_of_several_has_a_communicator_beside_that_of_all_ranks():
    assert communicators(1, {}) == 0
    assert communicators(8, {}) == 1
    assert communicators(8, MeshShape(dp_replicate=2, dp_shard=4).sizes()) == 3
    assert communicators(4, MeshShape(dp_shard=2, dp_shard_in_ep=2).sizes()) == 4, "with that of both together"
    both = MeshShape(dp_shard=2, dp_shard_in_ep=2, cp=2).sizes()
    assert communicators(8, both) == 6, "with those of all shards, and of those that divide experts"
    assert communicators(2, MeshShape(pp=2).sizes()) == 2, "with its neighbour"
    assert communicators(4, MeshShape(pp=4).sizes()) == 3, "with two neighbours"


def test_a_target_that_carries_every_dimension_gets_them():
    assert parse_mesh("cp=2,ep=4") == MeshShape(cp=2, ep=4)
