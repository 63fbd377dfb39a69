"""Experts that are divided over ranks: what a rank holds, what is refused, and what the ranks wait for.

python -m pytest tests/engine/test_expert_parallel.py
"""

import sys

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.engine.expert_parallel import has_experts, plans_of
from memfit.errors import InputError
from memfit.job import Shape
from memfit.mesh import parse_mesh
from memfit.planner.mesh_nets import rank_nets
from memfit.planner.predict import plain_nets
from memfit.trace.step import Tracing, trace_job
from tests.engine.expert_jobs import CARRIED, REFUSED, Mixture, Three
from tests.engine.tensor_jobs import Adapted, Words


def traced(job, text):
    mesh = parse_mesh(text)
    how = Tracing(device=find_device("h100"), engine="fsdp2", world=mesh.world, mesh=mesh, scratch=False)
    return trace_job(job, Shape(items=2), how)


@pytest.mark.parametrize("case", CARRIED)
def test_a_rank_holds_its_part_of_the_experts_and_the_rest_whole(case):
    job = CARRIED[case]()
    nets = plain_nets(job)
    experts = [p for name, p in nets["net"].named_parameters() if ".experts." in name]
    held = rank_nets(job, parse_mesh("ep=4"), nets)
    whole = sum(parameter.nbytes for parameter in nets["net"].parameters())
    assert held.trained_bytes == whole - sum(parameter.nbytes for parameter in experts) * 3 // 4


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_is_refused_by_its_name(kind):
    with pytest.raises(InputError) as refused:
        traced(kind(), "ep=2")
    assert REFUSED[kind] in str(refused.value)


def test_experts_that_do_not_divide_so_divide_otherwise():
    assert traced(Three(), "ep=3").names


def test_a_parameter_that_the_plan_of_transformers_leaves_out_is_refused():
    nets = Mixture().nets()
    del nets["net"].ep_plan["model.layers.*.mlp.experts.down_proj"]
    with pytest.raises(
        InputError, match=r"net\.model\.layers\.0\.mlp\.experts on ep=2: .* does not divide its down_proj"
    ):
        plans_of(nets, 2)


def test_a_layout_that_is_not_carried_is_refused_by_its_module():
    nets = Mixture().nets()
    nets["net"].ep_plan["model.layers.*.mlp.gate"] = "ep_router"
    with pytest.raises(InputError, match=r"net\.model\.layers\.0\.mlp\.gate on ep=2: its layout 'ep_router'"):
        plans_of(nets, 2)


def test_only_nets_whose_modules_the_plan_names_have_experts():
    assert has_experts(Mixture().nets())
    assert not has_experts(Words().nets())
    assert not has_experts(Adapted().nets())


def test_a_transformers_without_its_module_for_experts_is_refused_with_the_version_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(InputError, match=r"no transformers\.distributed\.expert_parallel; install transformers 5\.23"):
        traced(Mixture(), "ep=2")


@pytest.mark.parametrize(("mesh", "group"), [("ep=2", "default_pg"), ("dp_shard=2,ep=2", "ep")])
def test_what_ranks_sum_in_every_layer_is_in_the_trace(mesh, group):
    trace = traced(Mixture(), mesh)
    name = trace.names.index(f"all_reduce over {group}")
    moved = trace.operator_bytes[trace.operator_name == name].tolist()
    hidden, weights = 2 * 6 * 32 * 4, 2 * 6 * 2 * 4
    assert moved.count(2 * hidden) == 2 * 4, "in two windows, of two layers: the output and the gradient of the input"
    assert moved.count(2 * weights) == 2 * 2, "and the gradient of the router's weights"
