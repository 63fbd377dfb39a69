"""Every option states its bytes in each phase, its cost, whether it changes what is learned, and its reason."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Job, Loss, Shape
from memfit.plan import MemoryOption, PhasePolicy
from memfit.planner.live_bytes import live_bytes_of
from memfit.planner.options.option_context import memory_option
from memfit.planner.plan_json import plan_json
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.show.plan_table import memory_of
from memfit.trace.step import Tracing, trace_job
from tests.planner.test_offload_options import CARD, Wide, planned

NAMES = {
    "for-each optimizer", "fused optimizer", "8-bit optimizer", "expandable allocator", "no DDP for one device",
    "gradients as bucket views", "average of the weights on the host", "checkpointing by module",
    "offload of saved activations", "optimizer state on the host", "accumulation", "sharding", "bf16 autocast",
    "free gradients", "sliced decode in validation", "smaller validation batch",
    "optimizer state aside in validation", "validation in a separate process", "skip validation",
}  # fmt: skip


class Validated(Wide):
    """Its validation decodes all items at once, or so many, into 128 MiB each."""

    at_once: int = 4
    zero_grad: str = "after_forward"
    validates: ClassVar = True
    validation_options: ClassVar = {"sliced decode in validation": {"at_once": 1}}

    def validate(self, nets, batch):
        for part in batch.split(self.at_once):
            nets["net"](part).repeat(1, 16384)
        return {}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Deep(Job):
    """Blocks, an average, and a validation under autocast, whose net's activations are most of what it takes."""

    ema: float | None = 0.9
    zero_grad: str = "after_forward"
    at_once: int = 16
    validation_options: ClassVar = {"sliced decode": {"at_once": 2}}

    def nets(self):
        return {"net": nn.Sequential(*(Block() for _ in range(6)))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), lr=0.01)}

    def batch(self, shape):
        return torch.randn(shape.items, 512, 64)

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            return Loss(nets["net"](batch).float().square().mean((1, 2)).sum(), len(batch))

    def validate(self, nets, batch):
        with self.autocast(batch.device):
            for part in batch.split(self.at_once):
                nets["net"](part).repeat(1, 1, 64).sum()
        return {}


def options_of(plan) -> dict[str, MemoryOption]:
    return {option.name: option for option in plan.options}


def traced_peaks(job, plan, device, *, items=None, precision=None, **other: Any):
    """The whole plan traced with one thing otherwise."""
    count = max(map(len, plan.micro_batches))
    how = Tracing(
        device=device, implementation=plan.implementation, validation=plan.validation, saving=plan.saving,
        micro_batches=count, checkpointing=plan.checkpointing, optimizer_state=plan.optimizer_state,
        average=plan.average,
    )  # fmt: skip
    job = type(job)(precision=precision) if precision else job
    shape = Shape(items=items or plan.micro_batch)
    return live_bytes_of(trace_job(job, shape, replace(how, **other)), device).peaks()


def test_all_of_them_in_the_json():
    result = plan_json(planned(Validated(ema=0.9), 4096))
    options = {option["name"]: option for option in result["options"]}
    assert options.keys() == NAMES
    assert all(option["reason"] and option["costs"] for option in options.values())
    assert {name for name, option in options.items() if option["changes_learning"]} == {
        "8-bit optimizer",
        "bf16 autocast",
    }
    applied = {name for name, option in options.items() if option["applied"]}
    assert {"fused optimizer", "no DDP for one device", "free gradients"} <= applied
    assert CARD.compute_capability == (8, 0)
    assert "no bf16 units" not in options["bf16 autocast"]["reason"]
    for name, option in options.items():
        assert option["saves"].keys() == {"train", "validate", "save"}, name
        assert option["saves_bytes"] == max(*option["saves"].values(), 0)
        assert (option["seconds"] is None) == option["unknown"].startswith("time: "), name


def test_what_an_option_of_validation_brought_is_what_was_replayed():
    """Training takes 1,024 MiB and next to nothing, validation 768 and 128 for each item that is decoded at once."""
    plan = planned(Validated(zero_grad="after_step"), 1150).plan
    option = next(item for item in plan.options if item.name.startswith("sliced"))
    assert option.applied
    assert option.saves == {"train": 0, "validate": 3 * ((128 << 20) + 2048 * 4), "save": 0}
    assert plan.validation.settings == {"at_once": 1}
    assert plan.optimizer_state == "device"


@pytest.fixture(scope="module", params=["a100-40gb", "cpu"])
def deep(request):
    device = CARD if request.param != "cpu" else with_memory(find_device("cpu"), 4 << 30)
    job = Deep()
    request = PlanRequest(name="deep", global_batch=16, micro_batch=16, device=device, keep=("optimizer",))
    plan = find_plan(job, request).plan  # without micro_batch a busy processor, which is timed, may choose another
    return job, plan, device


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("sliced decode", {"validation": PhasePolicy(settings={"at_once": 2})}),
        ("smaller validation batch", {"validation": PhasePolicy(items=1)}),
        ("accumulation", {"items": 8, "micro_batches": 2}),
        ("fused optimizer", {"implementation": "fused"}),
        ("checkpointing by module", {"checkpointing": {f"net.{i}": "full" for i in range(6)}}),
        ("bf16 autocast", {"precision": "bf16"}),
    ],
)
def test_one_that_was_left_saves_what_a_trace_with_it_saves(deep, name, other):
    job, plan, device = deep
    option = options_of(plan)[name]
    before, after = traced_peaks(job, plan, device), traced_peaks(job, plan, device, **other)
    assert not option.applied
    if name == "fused optimizer":  # its counts of steps are the card's
        assert all(0 <= option.saves[phase] - (before[phase] - after[phase]) <= 24 * 512 for phase in before)
        return
    assert option.saves == {phase: before[phase] - after[phase] for phase in before}
    assert option.saves_bytes > 0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("optimizer state aside in validation", {"validation": PhasePolicy(optimizer="aside")}),
        ("optimizer state on the host", {"optimizer_state": "host"}),
        ("offload of saved activations", {"checkpointing": {f"net.{i}": "offload" for i in range(6)}}),
        ("average of the weights on the host", {"average": "host"}),
    ],
)
def test_one_that_moves_tensors_to_the_host_does_on_a_card(deep, name, other):
    job, plan, device = deep
    option = options_of(plan)[name]
    if not device.is_cuda:
        assert option.saves_bytes == 0 or name.startswith("optimizer state aside")
        return
    before, after = traced_peaks(job, plan, device), traced_peaks(job, plan, device, **other)
    assert option.saves == {phase: before[phase] - after[phase] for phase in before}
    assert option.seconds > 0
    assert option.saves_bytes > 0


def test_gradients_that_are_freed_would_otherwise_stay(deep):
    job, plan, device = deep
    option = options_of(plan)["free gradients"]
    keep = PhasePolicy(gradients="keep")
    without = traced_peaks(job, plan, device, validation=keep, saving=keep)
    assert option.applied
    assert option.saves == {phase: without[phase] - nbytes for phase, nbytes in traced_peaks(job, plan, device).items()}
    assert option.saves["validate"] > 0


@pytest.mark.parametrize(("mib", "average"), [(950, "device"), (700, "host")])
def test_state_on_the_host_that_was_taken_saves_what_the_device_would_need(mib, average):
    job = Wide(ema=0.9)
    card = with_memory(CARD, mib << 20)
    plan = find_plan(job, PlanRequest(name="wide", global_batch=4, device=card)).plan
    here = traced_peaks(job, plan, card)
    for name, other in (
        ("optimizer state on the host", "optimizer_state"),
        ("average of the weights on the host", "average"),
    ):
        option = options_of(plan)[name]
        if option.applied:
            there = traced_peaks(job, plan, card, **{other: "device"})
            assert option.saves == {phase: there[phase] - here[phase] for phase in here}
    assert plan.optimizer_state == "host"


def test_an_average_that_was_left_would_be_gone_from_saving_too():
    """Its part that visits the card is no part of saving, and the step is higher than an update."""
    weights = 16 * 2048 * 2048 * 4
    option = options_of(planned(Wide(ema=0.9), 4096).plan)["average of the weights on the host"]
    assert option.saves == {"train": weights, "save": weights}


def test_eight_bit_state_is_a_byte_an_element_and_a_scale_a_block():
    """Two states of 16 matrices, each of 2048 x 2048 elements; the step makes nothing beside."""
    option = options_of(planned(Wide(), 4096).plan)["8-bit optimizer"]
    elements = 2048 * 2048
    assert option.saves == dict.fromkeys(("train", "save"), 2 * 16 * (4 * elements - elements - 4 * elements // 256))
    assert (option.seconds, option.unknown[:5]) == (None, "time:")


def test_shards_over_two_devices_are_traced():
    plan = find_plan(Wide(), PlanRequest(name="wide", global_batch=8, device=CARD, devices=2)).plan
    option = options_of(plan)["sharding"]
    weights = 16 * 2048 * 2048 * 4
    assert plan.engine == "ddp"
    assert not option.applied
    assert option.saves["save"] == 3 * weights // 2 + (16 * 4 // 2 if option.saves["save"] % 2 else 0)
    assert option.seconds > 0


def test_what_does_not_apply_saves_nothing_and_says_why():
    options = options_of(find_plan(Deep(ema=None), PlanRequest(name="deep", global_batch=1, device=CARD)).plan)
    reasons = {
        "smaller validation batch": "its batch is already one item",
        "accumulation": "the micro-batch cannot be smaller",
        "average of the weights on the host": "the job keeps no average of the weights",
    }
    for name, reason in reasons.items():
        assert (options[name].reason, options[name].seconds, options[name].unknown) == (reason, 0.0, "")
        assert options[name].saves == {"train": 0, "validate": 0, "save": 0}


class Refusing(Deep):
    """Its validation does not run in half precision."""

    def validate(self, nets, batch):
        if self.precision != "fp32":
            raise RuntimeError("no halves here")
        return super().validate(nets, batch)


def test_what_validation_refuses_is_unknown_and_says_why():
    option = options_of(find_plan(Refusing(), PlanRequest(name="refusing", global_batch=16, device=CARD)).plan)[
        "bf16 autocast"
    ]
    assert option.saves.keys() == {"train", "save"}
    assert "no halves here" in option.unknown
    assert "validate" not in memory_of(option)


def test_a_validation_that_is_too_long_to_trace_again_says_so(monkeypatch):
    monkeypatch.setattr("memfit.planner.search.validation_choice.TRACED", 60)
    options = options_of(find_plan(Deep(), PlanRequest(name="deep", global_batch=2, device=CARD)).plan)
    first, dear = options["sliced decode"], options["smaller validation batch"]
    assert {"train", "validate", "save"} == first.saves.keys()
    assert "validate" not in dear.saves
    assert re.match(r"bytes and time: no trace was made of this validation's \d+ operators once more", dear.unknown)
    assert memory_of(dear) == "unknown"


def test_what_becomes_of_each_phase_is_told():
    option = MemoryOption(name="", applied=False, saves_bytes=0, costs="", reason="")
    assert memory_of(replace(option, saves={"train": 2 << 30, "validate": 400 << 20, "save": 0})) == (
        "train -2.00 GiB, validate -400 MiB"
    )
    assert memory_of(replace(option, saves={"train": 1 << 30, "validate": 1 << 30})) == "all -1.00 GiB"
    assert memory_of(replace(option, saves={"train": -(1 << 30), "validate": 1})) == "train +1.00 GiB"
    assert memory_of(replace(option, saves={"train": 0})) == "nothing"


@pytest.mark.parametrize(("more", "less"), [(0.1 + 0.2, 0.3), (0.3, 0.1 + 0.2)])
def test_last_digits_of_two_sums_of_seconds_are_no_cost(more, less):
    context: Any = SimpleNamespace(phases=("train",))
    option = memory_option(context, "fused optimizer", False, {}, "it is equal", seconds=more - less)
    assert (option.seconds, option.costs) == (0.0, "nothing")
