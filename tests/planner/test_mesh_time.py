"""pytest tests/planner/test_mesh_time.py: seconds of collectives by dimension, and what computation hides of them."""

import dataclasses

import numpy as np
import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.device.hardware.cluster import cluster_of
from memfit.job import Job, Loss, Shape
from memfit.mesh import parse_mesh
from memfit.planner.mesh_nets import rank_nets
from memfit.planner.predict import plain_nets
from memfit.planner.request import PlanRequest
from memfit.planner.timing.collective_time import collective_rows, gather_seconds, reduce_seconds, seconds_by_collective
from memfit.planner.timing.mesh_time import DataTraffic, MeshCommunication
from memfit.planner.timing.roofline import operator_seconds
from memfit.trace.step import Tracing, trace_job
from tests.engine.tensor_jobs import Own

H100, GB = find_device("h100"), 10**9
CLUSTER = cluster_of(H100, 64, 8)


def links(text, cluster=CLUSTER):
    mesh = parse_mesh(text)
    asked = PlanRequest(name="job", global_batch=64, device=H100, devices=mesh.data_ranks, mesh=mesh, cluster=cluster)
    return asked.links


def quick(text):
    """Links whose steps take no time."""
    joined = links(text)
    return {key: dataclasses.replace(link, step_seconds=0, node_step_seconds=0) for key, link in joined.items()}


def test_an_all_reduce_is_a_scatter_and_a_gather():
    link = quick("dp_replicate=8,dp_shard=8")["dp_shard"]
    assert gather_seconds(8 * GB, link) == pytest.approx(7 * GB / 450e9)
    assert reduce_seconds(8 * GB, link) == 2 * gather_seconds(8 * GB, link)
    assert gather_seconds(GB, links("tp=8")[""]) > 0
    assert gather_seconds(GB, dataclasses.replace(link, ranks=1)) == 0


def test_sharding_within_a_node_carries_replicas_gradients_alone_between_nodes():
    traffic = DataTraffic(nbytes=32 * GB, pieces=32)
    everywhere = MeshCommunication(engine="fsdp2", traffic=traffic, links=quick("dp_shard=64")).window_seconds(3)
    hybrid = MeshCommunication(
        engine="fsdp2", traffic=traffic, links=quick("dp_replicate=8,dp_shard=8")
    ).window_seconds(3)
    assert everywhere == pytest.approx(
        {
            "all_gather over dp_shard": 6 * 32 * GB * 63 / 64 / 400e9,
            "reduce_scatter over dp_shard": 3 * 32 * GB * 63 / 64 / 400e9,
        }
    )
    assert hybrid == pytest.approx(
        {
            "all_gather over dp_shard": 6 * 32 * GB * 7 / 8 / 450e9,
            "reduce_scatter over dp_shard": 3 * 32 * GB * 7 / 8 / 450e9,
            "all_reduce over dp_replicate": 3 * 2 * 4 * GB * 7 / 8 / 50e9,
        }
    )


def test_experts_are_gathered_from_the_ranks_alone_that_hold_parts_of_them():
    mesh = "dp_shard=4,dp_shard_in_ep=2"
    traffic = DataTraffic(nbytes=8 * GB, pieces=4, expert_bytes=2 * GB)
    seconds = MeshCommunication(engine="fsdp2", traffic=traffic, links=quick(mesh)).window_seconds(1)
    once = (8 * GB * 7 / 8 + 2 * GB * 3 / 4) / 450e9
    assert seconds == pytest.approx({"all_gather over dp_shard": 2 * once, "reduce_scatter over dp_shard": once})
    alone = quick("dp_shard_in_ep=8") | {"dp_shard": quick("dp_shard=8")["dp_shard"]}
    seconds = MeshCommunication(engine="fsdp2", traffic=traffic, links=alone).window_seconds(1)
    assert seconds["reduce_scatter over dp_shard"] == pytest.approx(8 * GB * 7 / 8 / 450e9)
    sequences = quick("dp_shard=2,dp_shard_in_ep=2,cp=2")
    seconds = MeshCommunication(engine="fsdp2", traffic=traffic, links=sequences).window_seconds(1)
    once = (8 * GB * 7 / 8 + 2 * GB * 1 / 2) / 450e9
    assert seconds["reduce_scatter over dp_shard"] == pytest.approx(once), "ranks of cp divide experts too"


def test_replicas_tell_each_other_once_a_window_however_many_micro_batches_there_are():
    ddp = MeshCommunication(
        engine="ddp", traffic=DataTraffic(nbytes=8 * GB, pieces=320), links=quick("dp_replicate=64")
    )
    assert ddp.window_seconds(1) == ddp.window_seconds(5)
    assert sum(ddp.window_seconds(1).values()) == pytest.approx(2 * 8 * GB * 63 / 64 / 400e9)
    cut = MeshCommunication(
        engine="fsdp2", traffic=DataTraffic(nbytes=8 * GB, pieces=4), links=quick("dp_replicate=8,tp=8")
    )
    once = {"all_reduce over dp_replicate": pytest.approx(2 * 8 * GB * 7 / 8 / 50e9)}
    assert cut.window_seconds(1) == cut.window_seconds(5) == once
    assert cut(5, 100.0) == cut(1) == sum(cut.window_seconds(1).values()), (
        "after the last backward, which hides nothing"
    )


def test_computation_hides_all_but_the_first_piece_and_what_lasts_longer():
    fsdp2 = MeshCommunication(
        engine="fsdp2", traffic=DataTraffic(nbytes=32 * GB, pieces=32), links=quick("dp_shard=64")
    )
    busy = sum(fsdp2.window_seconds(2).values())
    assert fsdp2(2) == pytest.approx(busy)
    assert fsdp2(2, 100.0) == pytest.approx(busy / 32)
    assert fsdp2(2, busy / 2) == pytest.approx(busy / 2)
    ddp = MeshCommunication(engine="ddp", traffic=DataTraffic(nbytes=8 * GB, pieces=4), links=quick("dp_replicate=64"))
    assert ddp(4, 100.0) == pytest.approx(sum(ddp.window_seconds(4).values()) / 4)
    assert ddp(4) == pytest.approx(sum(ddp.window_seconds(4).values()))


def test_collectives_inside_of_layers_are_timed_by_their_own_link():
    mesh = parse_mesh("dp_shard=4,tp=2")
    trace = trace_job(Own(), Shape(items=2), Tracing(device=H100, engine="fsdp2", world=8, mesh=mesh))
    joined = links("dp_shard=4,tp=2", cluster_of(H100, 8, 1))
    names = {name for name in trace.names if " over " in name}
    assert {"all_reduce over tp", "all_reduce over dp_shard"} <= names
    rows, seconds = collective_rows(trace, joined)
    by_name = seconds_by_collective(trace, joined)
    assert sum(by_name.values()) == pytest.approx(seconds.sum())
    first = next(row for row in rows if trace.names[trace.operator_name[row]] == "all_reduce over tp")
    nbytes = trace.operator_bytes[first] / 2
    plain = operator_seconds(trace, H100, "fp32")
    timed = operator_seconds(trace, H100, "fp32", links=joined)
    assert timed[first] == pytest.approx(reduce_seconds(nbytes, joined["tp"]))
    others = np.setdiff1d(np.arange(len(plain)), rows)
    assert np.array_equal(plain[others], timed[others])
    assert not any("wait_tensor" in name for name in trace.names), "it takes no memory and no time of its own"


def test_a_rank_whose_layers_are_cut_carries_less():
    nets = plain_nets(Own())
    whole, cut = (rank_nets(Own(), parse_mesh(text), nets) for text in ("dp_shard=4", "dp_shard=4,tp=2"))
    elements = {"embedding": 32 * 12, "cut": 12 * 20 + 20 + 20 * 12, "bias": 12, "norm": 24, "head": 12 * 32 + 32}
    assert whole.trained_bytes == 4 * sum(elements.values())
    assert cut.trained_bytes == 4 * (sum(elements.values()) - elements["cut"] // 2)
    assert whole.frozen_bytes == cut.frozen_bytes == 0
    assert cut.traffic("fsdp2").nbytes == cut.trained_bytes


class Frozen(Job):
    def nets(self):
        return {"net": torch.nn.Linear(4, 4), "still": torch.nn.Linear(8, 8).requires_grad_(False)}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.zeros(shape.items, 4)

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).sum(), len(batch))


def test_frozen_nets_are_carried_by_nobody():
    counted = rank_nets(Frozen(), parse_mesh("dp_shard=4"), plain_nets(Frozen()))
    assert (counted.trained_bytes, counted.frozen_bytes) == (4 * 20, 4 * 72)
