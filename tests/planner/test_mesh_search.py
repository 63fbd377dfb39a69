"""Which mesh a plan for a cluster names, and what the search says of the others.

python -m pytest tests/planner/test_mesh_search.py
"""

from dataclasses import replace

import pytest
import torch

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.device.hardware.cluster import cluster_of
from memfit.errors import InputError
from memfit.installation import release_number
from memfit.mesh import MeshShape
from memfit.planner.comparison import plan_subject
from memfit.planner.mesh_search import mesh_choice
from memfit.planner.mesh_search.mesh_choice import find_any_plan, find_mesh_plan
from memfit.planner.mesh_search.mesh_row import CHOSEN, FITS, REFUSED, SLOWER, TOO_LARGE, MeshRow
from memfit.planner.mesh_search.mesh_shapes import mesh_families
from memfit.planner.request import PlanRequest
from memfit.planner.search.engine_search import Answer
from memfit.planner.search.search import find_plan
from memfit.torch_compat.pipelining import OLDEST
from testing.large_nets import Dit
from tests.engine.context_jobs import Tokens
from tests.engine.expert_jobs import Mixture
from tests.engine.tensor_jobs import Tied, Unplanned, Words

CARD = replace(find_device("h100"), context_bytes=0, context_low=0, context_high=0)
LARGE = Dit(dim=512, depth=4, heads=4, frames=32)


def request(devices, nodes, batch, device=CARD, **asked):
    cluster = cluster_of(device, devices, nodes)
    return PlanRequest(name="job", global_batch=batch, device=device, devices=devices, cluster=cluster, **asked)


def plan_of(job, asked, row):
    """The plan that is made where a person sets this mesh."""
    return find_plan(job, replace(asked, mesh=row.mesh, devices=row.mesh.data_ranks))


@pytest.fixture(scope="module")
def words():
    return find_mesh_plan(Words(), request(8, 2, 64))


def test_every_division_of_the_devices_is_there_once():
    families = mesh_families(12)
    meshes = [mesh for family in families for mesh in family.meshes]
    assert all(mesh.world == 12 for mesh in meshes)
    assert len(set(meshes)) == len(meshes)
    names = {str(mesh) for mesh in meshes}
    assert {"dp_replicate=12", "dp_shard=12", "dp_replicate=3,dp_shard=4", "dp_shard=2,tp=6", "tp=12"} <= names
    assert {"pp=12", "pp=4,dp_shard=3", "pp=4,dp_replicate=3"} <= names
    assert {"pp=3,dp_replicate=2,dp_shard=2", "pp=2,tp=6", "pp=2,dp_shard=2,tp=3"} <= names
    assert {"dp_replicate=6,tp=2", "pp=3,dp_replicate=2,tp=2"} <= names
    assert [family.cut.world for family in families] == sorted(family.cut.world for family in families)
    assert all(len({(mesh.tp, mesh.data_ranks) for mesh in family.meshes}) == 1 for family in families)


def test_sequences_are_divided_where_a_job_names_them():
    assert not any(family.cut.cp > 1 for family in mesh_families(8))
    meshes = {str(mesh) for family in mesh_families(8, sequences=True) for mesh in family.meshes}
    assert {"dp_shard=2,cp=2,tp=2", "dp_shard=4,cp=2"} <= meshes
    assert {"pp=2,dp_shard=2,cp=2", "pp=2,cp=2,tp=2", "pp=4,cp=2"} <= meshes
    both = {str(mesh) for family in mesh_families(8, sequences=True, experts=True) for mesh in family.meshes}
    assert {"cp=4,ep=2", "dp_shard=2,cp=2,ep=2", "dp_replicate=2,cp=2,ep=2", "pp=2,cp=2,ep=2"} <= both


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses cp and pp before torch 2.13")
def test_sequences_are_traced_as_long_as_ranks_divide_them():
    """Two sequences of 13 tokens at once are no 4 parts."""
    made = find_mesh_plan(Tokens(precision="bf16"), request(4, 1, 26))
    remarks = {str(row.mesh): row.remark for row in made.meshes if row.mesh.cp == 2}
    assert {"dp_replicate=2,cp=2", "pp=2,cp=2"} <= remarks.keys()
    assert not any("does not divide" in remark for remark in remarks.values())


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses cp before torch 2.13")
def test_a_plan_is_compared_with_sequences_as_long_as_its_ranks_divide_them():
    request = PlanRequest(
        name="tests.engine.context_jobs:Tokens", global_batch=26, micro_batch=13, device=CARD, mesh=MeshShape(cp=2),
    )  # fmt: skip
    made = find_plan(Tokens(precision="bf16"), request)
    subject = plan_subject("divided", replace(made.plan, settings={"precision": "bf16"}), None)
    assert subject.prediction.shape.length % 4 == 0
    assert subject.prediction.footprint.fits


def test_the_plan_has_the_fastest_mesh_and_the_ladder_has_all_others(words):
    first, *others = words.meshes
    assert words.plan is not None
    assert first.state == CHOSEN
    assert first.traced
    assert first.seconds == words.plan.step_seconds
    assert (words.plan.mesh_shape or MeshShape(dp_replicate=8)) in (first.mesh, MeshShape(dp_replicate=8))
    assert {row.mesh for row in words.meshes} == {mesh for family in mesh_families(8) for mesh in family.meshes}
    assert all(row.seconds >= first.seconds for row in others if row.state in (FITS, SLOWER))
    assert any(row.mesh.tp == 2 and row.state in (FITS, SLOWER) for row in others)
    assert words.plan.reasons["mesh"].startswith("fastest of ")
    assert "InfiniBand NDR 4x at 50 GB/s a card between the 2 nodes" in words.plan.reasons["time"]
    assert "over dp_" in words.plan.reasons["communication"]


def test_layers_are_cut_within_a_node_unless_nothing_else_fits(words):
    refused = {str(row.mesh): row.remark for row in words.meshes if row.state == REFUSED}
    assert "it cuts layers over several nodes" in refused["tp=8"]
    assert "num_key_value_heads = 2 does not divide" in refused["dp_shard=2,tp=4"]
    one_sample = find_mesh_plan(Tied(), request(2, 2, 1))
    assert one_sample.plan is not None
    assert one_sample.meshes[0].mesh == MeshShape(tp=2)
    assert "over several nodes" in one_sample.plan.reasons["mesh"]
    refused = {str(row.mesh): row.remark for row in one_sample.meshes[1:]}
    assert "it shares a parameter with net.model.embed_tokens" in refused.pop("pp=2")
    assert set(refused.values()) == {"2 ranks take samples of their own, and the global batch has 1"}


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_stages_are_chosen_where_one_sample_is_all_and_what_they_send_is_timed():
    answer = find_mesh_plan(Words(), request(2, 2, 1))
    assert answer.plan is not None
    chosen = answer.meshes[0]
    assert (chosen.mesh, chosen.traced) == (MeshShape(pp=2), True)
    assert next(row for row in answer.meshes if row.mesh == MeshShape(tp=2)).state == REFUSED, "it would cross nodes"
    assert "send over pp" in answer.plan.reasons["communication"]
    assert answer.plan.step_seconds == chosen.seconds


@pytest.mark.slow
def test_a_mesh_that_is_slower_is_not_searched_and_its_least_time_is_below_what_it_takes(words):
    asked = request(8, 2, 64)
    slower = [row for row in words.meshes if row.state == SLOWER]
    assert slower
    for row in slower[:2]:
        assert row.peak is None
        assert words.plan.step_seconds <= row.seconds
        # tensors so small that a part of four ranks is padded, which the mesh that was traced does and others do not
        assert row.seconds <= plan_of(Words(), asked, row).chosen.seconds * 1.03


def test_experts_are_divided_where_one_sample_is_all_and_only_where_there_are_some(words):
    answer = find_mesh_plan(Mixture(), request(2, 1, 1))
    rows = {str(row.mesh): row for row in answer.meshes}
    assert rows["ep=2"].state in (CHOSEN, FITS, SLOWER)
    assert not any(row.mesh.ep > 1 for row in words.meshes)


def test_nets_that_cannot_be_cut_are_planned_without(words):
    answer = find_mesh_plan(Unplanned(), request(4, 1, 16))
    assert answer.plan is not None
    refused = [row for row in answer.meshes if row.state == REFUSED]
    assert {(row.mesh.pp, row.mesh.tp) for row in refused} == {(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)}
    remarks = {row.mesh.tp: row.remark for row in refused if row.mesh.pp == 1 or row.mesh.tp == 1}
    assert "no tensor-parallel plan for MambaForCausalLM" in remarks[2]
    assert "no pipeline plan for MambaForCausalLM" in remarks[1]
    with pytest.raises(InputError, match="zero2 carries no mesh"):
        find_mesh_plan(Unplanned(), request(4, 1, 16, engine="zero2"))


@pytest.mark.slow
def test_state_that_no_card_holds_is_sharded_and_the_estimates_are_those_of_full_plans():
    roomy = find_mesh_plan(LARGE, request(8, 2, 8))
    replicas = next(row for row in roomy.meshes if row.mesh == MeshShape(dp_replicate=8))
    assert replicas.state in (CHOSEN, FITS)
    sharded = next(row for row in roomy.meshes if row.mesh == MeshShape(dp_shard=8))
    tight = with_memory(CARD, (sharded.peak + replicas.peak) // 2)
    asked = request(8, 2, 8, tight)
    answer = find_mesh_plan(LARGE, asked)
    assert answer.plan is not None
    assert answer.plan.engine == "fsdp2"
    fitting = [row for row in answer.meshes if row.state in (CHOSEN, FITS)]
    for row in fitting:
        full = plan_of(LARGE, asked, row)
        assert full.plan is not None
        assert row.seconds == pytest.approx(full.chosen.seconds, rel=0.02)
        assert row.peak == pytest.approx(max(p["process_bytes"] for p in full.plan.phases.values()), rel=0.05)
    for row in answer.meshes:
        if row.state == TOO_LARGE:
            full = plan_of(LARGE, asked, row)
            assert full.plan is None
            assert row.peak <= max(phase.process_bytes for phase in full.floor.footprint.phases.values()) * 1.05


@pytest.mark.slow
def test_where_no_mesh_fits_the_smallest_says_what_is_lacking():
    answer = find_mesh_plan(LARGE, request(4, 1, 4, with_memory(CARD, 500 << 20)))
    assert answer.plan is None
    assert {row.state for row in answer.meshes} <= {TOO_LARGE, REFUSED}
    assert answer.floor.footprint.headroom_bytes < 0


@pytest.mark.parametrize("pipelines", [1, 4])
def test_meshes_are_planned_in_full_until_one_fits(pipelines, monkeypatch):
    """A pipeline is estimated with one micro-batch on its way, so that several may not fit when they are traced."""
    rows = [
        MeshRow(mesh=MeshShape(pp=2 + i), engine="fsdp2", state=FITS, seconds=1.0 + i, remark="estimated")
        for i in range(pipelines)
    ]
    rows += [MeshRow(mesh=MeshShape(dp_shard=2 + i), engine="fsdp2", state=FITS, seconds=9.0 + i) for i in range(4)]
    planned = []

    def plan_of(job, request, row):
        planned.append(row.mesh)
        return Answer(plan=None, chosen=None, floor=None, alternatives=())

    def traced(row, answer):
        return replace(row, state=FITS if row.mesh.pp == 1 else TOO_LARGE, traced=True, seconds=row.seconds + 5)

    monkeypatch.setattr(mesh_choice, "_plan_of", plan_of)
    monkeypatch.setattr(mesh_choice, "_traced_row", traced)
    answer = mesh_choice._planned(Words(), None, rows)
    assert (answer.meshes[0].state, answer.meshes[0].mesh) == (CHOSEN, MeshShape(dp_shard=2))
    assert len(planned) == max(mesh_choice.TRACED, pipelines + 1)


def test_without_nodes_the_search_is_the_one_of_a_single_node():
    asked = PlanRequest(name="job", global_batch=8, device=CARD, devices=2)
    assert find_any_plan(Words(), asked, None).meshes == ()
    assert find_any_plan(Words(), replace(asked, mesh=MeshShape(dp_shard=2)), 1).meshes == ()
    with pytest.raises(InputError, match="leave --nodes out"):
        find_any_plan(Words(), replace(asked, devices=1), 1)
    with pytest.raises(InputError, match="rates of unknown are not known"):
        find_any_plan(Words(), replace(asked, device=replace(CARD, key="unknown", bandwidth=None)), 1)
