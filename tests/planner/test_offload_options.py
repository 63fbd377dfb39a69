"""Optimizers' state on the host is taken where nothing cheaper fits, and predicted part by part."""

from dataclasses import replace

import torch
from torch import nn

from memfit.apply.state_streaming import PART
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Job, Loss, Shape
from memfit.plan import read_plan, write_plan
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan

CARD = replace(find_device("a100-40gb"), context_bytes=0, context_low=0, context_high=0)
WEIGHTS = 16 * 2048 * 2048 * 4


class Wide(Job):
    """256 MiB of weights, and activations of next to nothing."""

    kind: str = "AdamW"
    ema: float | None = None

    def nets(self):
        return {"net": nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))}

    def optimizers(self, nets):
        return {"net": getattr(torch.optim, self.kind)(nets["net"].parameters(), lr=0.01)}

    def batch(self, shape):
        return torch.randn(shape.items, 2048)

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().mean(1).sum(), len(batch))


def planned(job, mib):
    return find_plan(job, PlanRequest(name="wide", global_batch=4, device=with_memory(CARD, mib << 20)))


def option(plan, name):
    return next(option for option in plan.options if option.name == name)


def test_it_is_taken_where_nothing_else_fits(tmp_path):
    result = planned(Wide(), 700)
    assert result.plan is not None
    assert (result.plan.optimizer_state, result.plan.average) == ("host", "device")
    applied = option(result.plan, "optimizer state on the host")
    assert applied.applied
    assert not applied.changes_learning
    assert 2 * WEIGHTS - PART <= applied.saves["train"] < 2 * WEIGHTS, "less what visits the card"
    assert applied.saves["save"] == 2 * WEIGHTS
    assert applied.seconds == 4 * WEIGHTS / CARD.link_bytes
    assert result.plan.step_seconds > applied.seconds
    write_plan(result.plan, tmp_path / "plan.toml")
    plan = read_plan(tmp_path / "plan.toml")
    again = predict(Wide(), "wide", Shape(items=4), with_memory(CARD, 700 << 20), plan=plan)
    peak = again.footprint.phases["train"]
    assert peak.allocated_bytes == plan.phases["train"]["allocated_bytes"]
    assert 2 * WEIGHTS < peak.allocated_bytes < 2 * WEIGHTS + 2 * PART
    assert 0 < peak.categories["optimizer"] <= PART


def test_it_is_left_where_there_is_room():
    plan = planned(Wide(), 4096).plan
    assert plan.optimizer_state == "device"
    left = option(plan, "optimizer state on the host")
    assert not left.applied
    assert 2 * WEIGHTS - PART <= left.saves["train"] < 2 * WEIGHTS, "less what visits the card"
    assert left.saves["save"] == 2 * WEIGHTS
    assert left.reason == "the plan fits without it"


def test_the_average_follows_where_that_is_not_enough():
    plan = planned(Wide(ema=0.99), 700).plan
    assert (plan.optimizer_state, plan.average) == ("host", "host")
    assert option(plan, "average of the weights on the host").saves["train"] == WEIGHTS


def test_an_optimizer_that_cannot_is_named():
    class Own(torch.optim.SGD):
        """Of a class that nobody knows."""

    torch.optim.Own = Own
    try:
        result = planned(Wide(kind="Own"), 4096)
    finally:
        del torch.optim.Own
    assert "'net' (Own)" in option(result.plan, "optimizer state on the host").reason
