"""pytest tests/planner/test_pipeline_time.py: what stages of a pipeline wait for, by formulas and by a simulation."""

import dataclasses

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.device.hardware.cluster import GroupLink, cluster_of
from memfit.installation import release_number
from memfit.job import Loss, Shape
from memfit.mesh import MeshShape, parse_mesh
from memfit.planner.pipeline.stage_model import on_their_way
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.planner.search.traced_job import open_traced_job
from memfit.planner.timing import interleaved_time
from memfit.planner.timing.interleaved_time import interleaved_seconds
from memfit.planner.timing.mesh_time import DataTraffic, MeshCommunication
from memfit.planner.timing.pipeline_time import PipelineTime
from memfit.planner.timing.schedule_time import schedule_seconds
from memfit.torch_compat.pipelining import OLDEST
from memfit.trace.step import Tracing
from tests.engine.pipeline_jobs import Counted
from tests.planner.simulated_pipeline import simulated_1f1b

GB = 10**9
LINK = GroupLink(ranks=4, nodes=1, bytes=10 * GB, step_seconds=0.0, node_step_seconds=0.0)
"""One gigabyte takes 0.1 s."""


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_that_send_in_no_time_wait_for_the_first_and_the_last_micro_batch(stages):
    for count in (stages, 2 * stages, 5 * stages):
        waits = PipelineTime(stages=stages).waits(count, 3.0, GB)
        assert waits == 3.0 * (stages - 1)
        assert simulated_1f1b(stages, count, 1.0, 2.0, 0.0) == pytest.approx(3.0 * count + waits)


@pytest.mark.parametrize("seconds", [(1.0, 3.0), (3.0, 1.0), (1.0, 2.0, 6.0, 2.5), (6.0, 1.0, 1.0), (1.0, 1.0)])
def test_stages_of_different_times_wait_as_in_the_simulation_of_the_schedule(seconds):
    slowest, stages = max(seconds), len(seconds)
    shares = tuple((each / slowest / 4, 3 * each / slowest / 4) for each in seconds)
    time = PipelineTime(stages=stages, shares=shares)
    for count in (stages, 2 * stages, 5 * stages, 11 * stages):
        forward, backward = [each / 4 for each in seconds], [3 * each / 4 for each in seconds]
        simulated = simulated_1f1b(stages, count, forward, backward, 0.0)
        assert count * slowest + time.waits(count, slowest, GB) == pytest.approx(simulated)


def test_with_fewer_micro_batches_than_stages_all_forwards_come_first():
    assert schedule_seconds([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 2) == 1 + 1 + 2 + 2 * 3 + 2
    assert schedule_seconds([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 1) == 9


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_waits_for_sends_are_those_of_the_schedule(stages):
    time = PipelineTime(stages=stages, link=LINK)
    assert time.send_seconds(GB) == pytest.approx(0.1)
    for count in (2 * stages, 5 * stages, 20 * stages):
        more = 3.0 * count + time.waits(count, 3.0, GB) - simulated_1f1b(stages, count, 1.0, 2.0, 0.1)
        assert more == pytest.approx(0.0 if stages == 2 else 0.1), "one send more, of any number"


def test_sends_of_gpipe_are_hidden_by_the_next_micro_batch_unless_they_are_longer():
    time = PipelineTime(stages=4, link=LINK)
    assert time.waits(3, 3.0, GB) == pytest.approx(3 * (3.0 + 0.2))
    assert time.waits(3, 3.0, 15 * GB) == pytest.approx(3 * (3.0 + 3.0) + 2 * 0.5)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_two_stages_on_each_rank_wait_half_as_long_and_with_backwards_in_two_parts_less(stages):
    """(p - 1) t / 2 (Narayanan and others, 2021, section 2.2), where a rank computes a micro-batch in t seconds."""
    shares = ((1 / 6, 1 / 3),) * (2 * stages)
    interleaved, zero_bubble = (
        PipelineTime(stages=stages, shares=shares, schedule=name)
        for name in ("interleaved_1f1b", "interleaved_zero_bubble")
    )
    for count in (stages, 2 * stages, 5 * stages, 11 * stages):
        assert interleaved.waits(count, 6.0, GB) == pytest.approx(6.0 * (stages - 1) / 2)
        assert zero_bubble.waits(count, 6.0, GB) < 6.0 * (stages - 1) / 2
    rest = 2 * stages + 1
    assert interleaved.waits(rest, 6.0, GB) == pytest.approx(
        interleaved.waits(2 * stages, 6.0, GB) + interleaved.waits(1, 6.0, GB)
    ), "a schedule of its own"


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_micro_batches_that_are_not_followed_take_as_long_as_the_slowest_rank(name, monkeypatch):
    forward, backward = [1.0, 3.0, 2.0, 1.0, 1.0, 2.0], [2.0, 5.0, 3.0, 2.0, 4.0, 4.0]
    short = interleaved_seconds(name, forward, backward, 3, 48, 0.25)
    monkeypatch.setattr(interleaved_time, "ROUNDS", 16)
    assert interleaved_seconds(name, forward, backward, 3, 48, 0.25) == pytest.approx(short)


def test_sends_of_interleaved_stages_run_beside_what_is_computed():
    time = PipelineTime(stages=2, link=LINK, shares=((1 / 6, 1 / 3),) * 4, schedule="interleaved_1f1b")
    more = [time.waits(count, 6.0, GB) - 3.0 for count in (8, 16)]
    assert 6 * 0.1 <= more[0] < 8 * 4 * 0.1, "three there and three back at least, and not each of them"
    assert time.sent_seconds(8, GB) == pytest.approx(4 * 8 * 0.1)


def test_gpipe_holds_all_micro_batches_and_waits_for_stages_as_1f1b_does():
    even = PipelineTime(stages=4, shares=((1 / 3, 2 / 3),) * 4, schedule="gpipe")
    assert even.waits(16, 3.0, GB) == pytest.approx(3.0 * 3)
    forward, backward = [1.0, 3.0], [4.0, 2.0]
    assert schedule_seconds(forward, backward, 3, gpipe=True) == 1 + 3 * 3 + 2 + 3 * 4
    assert schedule_seconds(forward, backward, 40, gpipe=True) == 1 + 40 * 3 + 2 + 40 * 4, "not all are followed"
    assert on_their_way("gpipe", 4, 16) == (16, 16, 16, 16)
    assert on_their_way("1f1b", 4, 16) == (4, 3, 2, 1)


def test_one_stage_waits_for_nothing_and_a_link_that_is_not_known_counts_nothing():
    assert PipelineTime().waits(8, 3.0, GB) == 0
    assert PipelineTime(stages=4).sent_seconds(8, GB) == 0
    assert PipelineTime(stages=4, link=LINK).sent_seconds(8, GB) == pytest.approx(16 * 0.1)


def test_stages_on_several_nodes_send_at_the_rate_of_the_network():
    cluster, mesh = cluster_of(find_device("h100"), 16, 2), parse_mesh("pp=2,dp_shard=8")
    link = cluster.joins(mesh, "pp")
    assert link.nodes == 2
    assert PipelineTime(stages=2, link=link).send_seconds(50 * GB) == pytest.approx(1.0, rel=0.01)


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_a_traced_job_says_what_a_stage_sends():
    how = Tracing(device=find_device("h100"), engine="fsdp2", world=2, mesh=MeshShape(pp=2))
    with open_traced_job(Counted(), how, Shape(items=2)) as traced_job:
        traced_job.kept(Shape(items=4), accumulated=False)
        assert traced_job.sent_bytes(Shape(items=4)) == 4 * 6 * 24 * 4, "samples, tokens, width, bytes of a number"
        assert traced_job.sent_bytes(Shape(items=3)) == 0, "it was not traced"


class Headed(Counted):
    """A wide embedding, which computes nothing, and a head that computes more than all blocks."""

    class Net(Counted.Net):
        def __init__(self):
            super().__init__(blocks=3)
            self.embed, self.head = nn.Embedding(32, 24), nn.Linear(48, 1 << 16)

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().sum(), len(batch))


@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_two_stages_take_no_less_than_half_the_time_of_one_device():
    def seconds(**asked):
        request = PlanRequest(name="headed", global_batch=4096, micro_batch=64, device=find_device("h100"), **asked)
        return find_plan(Headed(), request).plan.step_seconds

    assert seconds(mesh=MeshShape(pp=2), devices=1) > 0.5 * seconds()


def test_stages_gather_and_scatter_once_in_a_window():
    cluster, mesh = cluster_of(find_device("h100"), 16, 2), parse_mesh("pp=2,dp_shard=8")
    links = {name: dataclasses.replace(cluster.joins(mesh, name), step_seconds=0) for name in mesh.sizes()}
    communication = MeshCommunication(engine="fsdp2", traffic=DataTraffic(nbytes=8 * GB, pieces=4), links=links)
    once = 8 * GB * 7 / 8 / 450e9
    assert communication.window_seconds(5) == pytest.approx(
        {"all_gather over dp_shard": once, "reduce_scatter over dp_shard": once}
    )
    assert communication(5, computed=0.0) == pytest.approx(2 * once)
    assert communication(5, computed=1e6) == pytest.approx(once / 4 + once), "no computation hides the scattering"


def test_replicas_of_a_stage_sum_their_gradients_after_the_last_backward():
    cluster, mesh = cluster_of(find_device("h100"), 16, 2), parse_mesh("pp=2,dp_replicate=8")
    links = {name: dataclasses.replace(cluster.joins(mesh, name), step_seconds=0) for name in mesh.sizes()}
    communication = MeshCommunication(engine="fsdp2", traffic=DataTraffic(nbytes=8 * GB, pieces=4), links=links)
    sums = 2 * 8 * GB * 7 / 8 / 450e9
    assert communication.window_seconds(5) == pytest.approx({"all_reduce over dp_replicate": sums})
    assert communication(5, computed=1e6) == pytest.approx(sums), "no computation hides them"
