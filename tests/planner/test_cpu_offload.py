"""FSDP2's parts on the host: predicted, priced, and planned where nothing fits without it.

python -m pytest tests/planner/test_cpu_offload.py
"""

from dataclasses import replace

import pytest
from torch.distributed.tensor import DTensor

from memfit.apply.host_state import host_bytes
from memfit.apply.window import run_window
from memfit.cli import main
from memfit.device.hardware import process_limits
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.device.hardware.cluster import cluster_of
from memfit.errors import InputError
from memfit.job import Shape
from memfit.mesh import parse_mesh
from memfit.plan import read_plan, write_plan
from memfit.planner.mesh_search.mesh_choice import find_mesh_plan
from memfit.planner.mesh_search.mesh_row import CHOSEN, TOO_LARGE
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.trace.step import Tracing, trace_job, virtual_job
from memfit.trace.step_phases import synthetic_micro_batch
from tests.engine.tensor_jobs import Drawn, Words
from tests.planner.test_offload_options import CARD, WEIGHTS, Wide

OFFLOADED = {"cpu_offload": True}
TIGHT, ROOMY = 1400, 4096
"""MiB: more than what is gathered takes, with NCCL, and less than that with a rank's parts and state; more than all."""


def request(mib, **asked):
    return PlanRequest(name="wide", global_batch=4, device=with_memory(CARD, mib << 20), devices=2, **asked)


def test_it_is_planned_where_nothing_fits_without_it_and_says_what_the_host_holds(tmp_path):
    plan = find_plan(Wide(), request(TIGHT, engine="fsdp2")).plan
    assert plan.engine_choices == OFFLOADED
    assert plan.reasons["engine_choices"] == "nothing fits without cpu_offload"
    parts = 4 * WEIGHTS // 2  # parameters, gradients and two moments, of which a rank has half
    assert plan.state_on_host_bytes == parts
    (applied,) = (option for option in plan.options if option.name == "optimizer state on the host")
    assert applied.applied
    assert applied.saves["train"] > 2 * WEIGHTS // 2, "the two moments at least"
    assert 0 <= applied.saves["save"] - 3 * WEIGHTS // 2 < 1 << 14, "parameters, moments, and the moments' step counts"
    assert plan.reasons["state_on_host"].startswith(f"{parts >> 20} MiB of host memory for each rank")
    write_plan(plan, tmp_path / "plan.toml")
    read = read_plan(tmp_path / "plan.toml")
    again = predict(
        Wide(), "wide", Shape(items=read.micro_batch), with_memory(CARD, TIGHT << 20), engine=read.engine, world=2,
        micro_batches=len(read.micro_batches[0]), engine_choices=read.engine_choices, plan=read,
    )  # fmt: skip
    assert again.footprint.phases["train"].allocated_bytes == plan.phases["train"]["allocated_bytes"]


def test_it_is_left_where_there_is_room_and_where_a_person_says_no():
    plan = find_plan(Wide(), request(ROOMY, engine="fsdp2")).plan
    assert not plan.engine_choices
    assert "state_on_host" not in plan.reasons
    (left,) = (option for option in plan.options if option.name == "optimizer state on the host")
    assert "--engine-choice cpu_offload=true" in left.reason
    assert (left.applied, left.saves, left.unknown) == (False, {}, "bytes and time: cpu_offload was not traced")
    assert find_plan(Wide(), request(TIGHT, engine="fsdp2", engine_choices={"cpu_offload": False})).plan is None
    assert find_plan(Wide(), request(TIGHT, engine="fsdp2", keep=["optimizer"])).plan is None


def test_the_step_on_the_host_and_the_copies_are_in_the_time():
    without = find_plan(Wide(), request(ROOMY, engine="fsdp2")).plan
    asked = find_plan(Wide(), request(ROOMY, engine="fsdp2", engine_choices=OFFLOADED)).plan
    moved = 7 * WEIGHTS // 2  # AdamW reads parameters, gradients and moments, and writes all but the gradients
    assert asked.reasons["engine_choices"] == "--engine-choice sets cpu_offload"
    assert asked.step_seconds - without.step_seconds > 0.5 * moved / 5e9
    assert asked.phases["train"]["allocated_bytes"] < without.phases["train"]["allocated_bytes"] - 2 * WEIGHTS // 2


class Uncut(Wide):
    """Its layers stay whole: with tp=2 it would fit without parts on the host."""

    def parallelize(self, nets, mesh):
        raise InputError("net 'net' on tp", "its layers are not to be cut", "leave tp out of the mesh")


def test_a_search_of_meshes_takes_the_smallest_parts_where_no_mesh_fits():
    device = with_memory(CARD, TIGHT << 20)
    asked = PlanRequest(
        name="wide", global_batch=4, device=device, devices=2, cluster=cluster_of(device, 2, 1)
    )  # fmt: skip
    answer = find_mesh_plan(Uncut(), asked)
    assert answer.plan is not None
    assert answer.plan.engine_choices["cpu_offload"] is True
    chosen = [row for row in answer.meshes if row.state == CHOSEN]
    assert [row.mesh for row in chosen] == [parse_mesh("dp_shard=2")]
    assert all(row.state in (TOO_LARGE, "refused") for row in answer.meshes if row not in chosen)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "pp=2,dp_shard=2"])
def test_a_window_leaves_all_parts_and_state_on_the_host(mesh):
    shape = parse_mesh(mesh)
    how = Tracing(
        device=find_device("rtx4090"), engine="fsdp2", world=shape.world, mesh=shape, engine_choices=OFFLOADED
    )
    with virtual_job(Words(), how) as (virtual, tracer, train_state):
        micro = synthetic_micro_batch(train_state.job, Shape(items=2, length=6), virtual.device, tracer)
        run_window(train_state, [micro, micro] if shape.pp > 1 else [micro])
        net, average = train_state.nets["net"], train_state.ema["net"]
        parts = [p for module in (net, average) for p in module.parameters() if isinstance(p, DTensor)]
        assert parts
        assert {part.device.type for part in parts} == {"cpu"}
        (optimizer,) = train_state.optimizers.values()
        moments = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert {moment.device.type for moment in moments} == {"cpu"}
        stepped = sum(part.to_local().nbytes for part in net.parameters() if isinstance(part, DTensor))
        assert 4 * stepped <= host_bytes(train_state) < 4.5 * stepped  # with what the shards are padded by
        if shape.pp == 1:
            state = train_state.engine.state_of_parts(train_state.nets, train_state.optimizers)
            train_state.engine.load_state_of_parts(train_state.nets, train_state.optimizers, state)
            assert {part.device.type for part in net.parameters()} == {"cpu"}


def test_nets_that_are_built_without_values_get_theirs_on_the_host():
    how = Tracing(device=find_device("rtx4090"), engine="fsdp2", world=2, engine_choices=OFFLOADED)
    trace = trace_job(Drawn(), Shape(items=2, length=6), how)
    kept = trace_job(Drawn(), Shape(items=2, length=6), replace(how, engine_choices={}))
    resident = [int(t.nbytes[t.category == 0].sum()) for t in (trace, kept)]
    assert resident[0] < resident[1]


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "pp=2,dp_replicate=2"])
def test_a_mesh_that_shards_nothing_has_no_parts_to_offload(mesh):
    shape = parse_mesh(mesh)
    how = Tracing(
        device=find_device("rtx4090"), engine="fsdp2", world=shape.world, mesh=shape, engine_choices=OFFLOADED
    )
    with pytest.raises(InputError, match=r"cpu_offload on the mesh .*: it is of sharded nets \(dp_shard\)"):
        trace_job(Words(), Shape(items=2, length=6), how)


def test_a_run_whose_ranks_hold_more_than_this_machine_is_not_started_where_a_mock_stands_for_the_cards(
    tmp_path, monkeypatch, capsys
):
    plan = find_plan(Wide(), request(ROOMY, engine="fsdp2")).plan
    job = "tests/planner/test_offload_options.py:Wide"
    write_plan(replace(plan, job=job, state_on_host_bytes=1 << 44), tmp_path / "plan.toml")
    monkeypatch.setattr(process_limits, "check_cards", lambda *given: None)
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert "2 ranks do not fit on this machine" in said
    assert "each rank takes about 16384." in said
