"""pytest tests/planner/test_mesh_options.py: what a plan says of its options and ranks, where one window is shared by a
group of devices."""

from dataclasses import replace

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import MeshShape, parse_mesh
from memfit.planner.live_bytes import live_bytes_of
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.planner.suggestions.larger_hardware import larger_hardware
from memfit.torch_compat.pipelining import OLDEST
from memfit.trace.step import Tracing, trace_job
from tests.engine.pipeline_jobs import Counted
from tests.engine.tensor_jobs import Words

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"
)
CARD = find_device("h100")
MESHES = {"pp=2": Counted, "tp=2": Words, "dp_shard=2": Counted, "dp_replicate=2": Counted, "pp=2,dp_shard=2": Counted}


def planned(name):
    mesh = parse_mesh(name)
    request = PlanRequest(name="job", global_batch=16, micro_batch=2, device=CARD, devices=mesh.data_ranks, mesh=mesh)
    return find_plan(MESHES[name](), request)


@pytest.fixture(scope="module")
def plans():
    return {name: planned(name).plan for name in MESHES}


@pytest.mark.parametrize("name", MESHES)
def test_no_line_says_that_the_plan_is_of_one_device(plans, name):
    plan = plans[name]
    assert plan.ranks > 1
    options = {option.name: option for option in plan.options}
    option = options["no DDP for one device"]
    assert (option.applied, option.reason) == (False, "the plan uses several devices")
    assert set(option.saves.values()) == {0}
    assert options["gradients as bucket views"].applied == (plan.engine == "ddp")
    said = [*plan.reasons.values(), *(each.reason for each in plan.options)]
    assert not [line for line in said if "one device" in line or "without DDP" in line]


@pytest.mark.parametrize("name", MESHES)
def test_what_the_window_waits_for_is_said_of_data_parallel_ranks_where_there_are_some(plans, name):
    reason = plans[name].reasons["communication"]
    assert ("for data-parallel ranks" in reason) == ("dp_" in name)
    assert ("what the window waits for the ranks of" in reason) == ("pp" in name or "tp" in name)


def test_sharding_of_stages_saves_what_a_trace_of_their_replicas_needs_more(plans):
    plan, peaks = plans["pp=2,dp_shard=2"], {}
    (sharding,) = (option for option in plan.options if option.name == "sharding")
    assert sharding.applied
    for rank in (0, 2):
        for mesh in (plan.mesh_shape, MeshShape(pp=2, dp_replicate=2)):
            how = Tracing(
                device=CARD, engine=plan.engine, world=4, mesh=mesh, rank=rank, implementation=plan.implementation,
                engine_choices=plan.engine_choices, validation=plan.validation, saving=plan.saving,
                micro_batches=len(plan.micro_batches[0]), checkpointing=plan.checkpointing,
            )  # fmt: skip
            peaks[rank, str(mesh)] = live_bytes_of(trace_job(Counted(), Shape(items=2), how), CARD).peaks()["train"]
    rank = max((0, 2), key=lambda rank: peaks[rank, str(plan.mesh_shape)])
    assert sharding.saves["train"] == peaks[rank, "pp=2,dp_replicate=2"] - peaks[rank, str(plan.mesh_shape)]


def test_more_devices_are_suggested_beside_those_that_shard_already():
    footprint = planned("dp_shard=2").floor.footprint
    over = replace(footprint, limiting_phase="train", headroom_bytes=-1)

    def first(**ranks):
        return larger_hardware(over, "fp32", CARD, Tracing(device=CARD, **ranks))[0]

    assert first(engine="ddp", world=2).endswith("memfit predict --engine fsdp2")
    assert first(engine="fsdp2", world=2).startswith("shard over 4 devices")
    assert first(engine="fsdp2", world=4, mesh=MeshShape(dp_shard=2, tp=2)).endswith("--mesh dp_shard=4,tp=2")
    assert not first(engine="fsdp2", world=2, mesh=MeshShape(pp=2)).startswith("shard")
