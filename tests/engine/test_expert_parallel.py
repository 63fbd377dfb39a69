"""Experts that are divided over ranks: what a rank holds, what is refused, and what the ranks wait for.

python -m pytest tests/engine/test_expert_parallel.py
"""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.engine.expert_parallel import has_experts, plans_of
from memfit.errors import InputError
from memfit.events import CATEGORIES
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import parse_mesh
from memfit.planner.mesh_nets import rank_nets
from memfit.planner.predict import plain_nets
from memfit.torch_compat.context_parallel import OLDEST
from memfit.trace.step import Tracing, trace_job
from tests.engine.context_jobs import DividedMixture
from tests.engine.expert_jobs import CARRIED, REFUSED, Mixture, Three
from tests.engine.tensor_jobs import Adapted, Words

SENT, SENT_BOTH = "dp_shard_in_ep=2", "dp_shard=2,dp_shard_in_ep=2"


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
    assert held.trained_bytes + held.frozen_bytes == whole - sum(parameter.nbytes for parameter in experts) * 3 // 4


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


@pytest.mark.parametrize(("mesh", "group"), [(SENT, "default_pg"), (SENT_BOTH, "dp_shard_in_ep")])
def test_a_rank_sends_its_tokens_to_the_ranks_of_their_experts_and_gets_as_many(mesh, group):
    trace = traced(Mixture(), mesh)
    name = trace.names.index(f"all_to_all_single over {group}")
    rows = trace.made_by[trace.category == CATEGORIES.index("activations")]
    sent = [trace.nbytes[trace.made_by == row].max() for row in np.flatnonzero(trace.operator_name == name)]
    assert rows.size
    assert set(sent) == {2 * 6 * 2 * 32 * 4}, "each token goes to two experts"
    assert len(sent) == 2 * 2 * 4, "in two windows, of two layers: there and back, and their gradients"
    assert any("a rank whose experts get more needs more" in line for line in trace.assumed)


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses cp before torch 2.13")
def test_ranks_of_a_sequence_send_each_other_tokens_too():
    trace = traced(DividedMixture(precision="bf16"), "dp_shard=2,dp_shard_in_ep=2,cp=2")
    name = trace.names.index("all_to_all_single over dp_shard_in_ep_cp")
    assert (trace.operator_name == name).any()
    assert any("each of the 4 ranks of dp_shard_in_ep and cp" in line for line in trace.assumed)
    job = DividedMixture()
    experts = [p for name, p in plain_nets(job)["net"].named_parameters() if ".experts." in name]
    held = rank_nets(job, parse_mesh("dp_shard_in_ep=2,cp=2"), plain_nets(job))
    assert held.expert_bytes == sum(p.nbytes for p in experts) // 4
    with pytest.raises(InputError, match="its 3 experts do not divide by 4; write another dp_shard_in_ep"):
        traced(DividedMixture(experts=3), "dp_shard_in_ep=2,cp=2")


@pytest.mark.parametrize("case", CARRIED)
def test_a_rank_that_sends_tokens_holds_its_experts_and_parts_of_all_else(case):
    job = CARRIED[case]()
    nets = plain_nets(job)
    experts = [p for name, p in nets["net"].named_parameters() if ".experts." in name]
    whole = sum(parameter.nbytes for parameter in nets["net"].parameters())
    held = rank_nets(job, parse_mesh("dp_shard=2,dp_shard_in_ep=4"), nets)
    assert held.trained_bytes + held.frozen_bytes == whole - sum(p.nbytes for p in experts) * 3 // 4
    assert held.expert_bytes == sum(p.nbytes for p in experts if p.requires_grad) // 4


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_is_refused_by_its_name_where_tokens_are_sent(kind):
    with pytest.raises(InputError) as refused:
        traced(kind(), SENT)
    assert REFUSED[kind].replace("ep=2", SENT).replace("another ep", "another dp_shard_in_ep") in str(refused.value)


def test_parts_on_the_host_are_refused_where_tokens_are_sent():
    mesh = parse_mesh(SENT)
    how = Tracing(device=find_device("h100"), engine="fsdp2", world=2, mesh=mesh, engine_choices={"cpu_offload": True})
    with pytest.raises(InputError, match=r"cpu_offload on the mesh dp_shard_in_ep=2: experts .* are on the device"):
        trace_job(Mixture(), Shape(items=2), how)


def test_all_nets_without_experts_are_named():
    nets = {"judge": nn.Linear(2, 2), "maker": nn.Linear(2, 2)}
    with pytest.raises(InputError, match=r"nets 'judge' \(Linear\), 'maker' \(Linear\) on ep=2"):
        plans_of(nets, 2)
