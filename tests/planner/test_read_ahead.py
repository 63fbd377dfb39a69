"""What batches that are read and copied ahead take of a card: an upper bound, and only where the card has room.

python -m pytest tests/planner/test_read_ahead.py
"""

import random
from dataclasses import replace
from functools import cache

import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.footprint import Footprint
from memfit.job import Shape
from memfit.planner.cpu_margin import planned_process_bytes
from memfit.planner.predict import predict
from memfit.planner.read_ahead import ON_CARD, copy_ahead
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.replay.caching_allocator import CachingAllocator
from testing.nets import JOBS

CARD = find_device("t4")


@cache
def predicted(micro_batch: int) -> Footprint:
    return predict(JOBS["convolution"](), "convolution", Shape(items=micro_batch), CARD).footprint


def footprint_of(batch: int) -> Footprint:
    footprint = predicted(2)
    train = footprint.phases["train"]
    return replace(footprint, phases={"train": replace(train, categories={**train.categories, "inputs": batch})})


@pytest.mark.parametrize("seed", range(40))
def test_two_batches_of_any_tensors_take_no_more_than_the_bound(seed):
    chance = random.Random(seed)
    scale = 10 ** chance.uniform(1, 8)
    tensors = [int(chance.uniform(1, scale)) for _ in range(chance.randint(1, 40))]
    allocator, storage = CachingAllocator(), 0
    for _ in range(ON_CARD):
        for nbytes in tensors:
            storage += 1
            allocator.malloc(storage, nbytes, stream=1)
    allowed = copy_ahead(footprint_of(sum(tensors)), with_memory(CARD, 1 << 50)).nbytes
    assert allowed is not None
    assert allocator.peak_reserved <= allowed


def test_a_plan_prices_the_copies_where_the_card_has_room_and_has_none_where_not():
    name = "convolution"
    plan = find_plan(JOBS[name](), PlanRequest(name=name, global_batch=4, device=CARD, micro_batch=4)).plan
    assert plan is not None
    assert plan.copy_ahead_bytes > 0
    assert "on a stream of their own" in plan.reasons["copy_ahead_bytes"]
    most = max(phase["process_bytes_high"] for phase in plan.phases.values())
    peak = max(phase["process_bytes"] for phase in plan.phases.values())
    assert planned_process_bytes(plan) == peak + plan.copy_ahead_bytes
    assert most + plan.copy_ahead_bytes <= plan.budget_bytes

    footprint = predicted(4)
    high = max(max(p.process_bytes, p.process_bytes_high) for p in footprint.phases.values())
    enough = replace(CARD, usable_bytes=high + plan.copy_ahead_bytes)
    assert copy_ahead(footprint, enough).nbytes == plan.copy_ahead_bytes
    without = copy_ahead(footprint, replace(CARD, usable_bytes=high + plan.copy_ahead_bytes - 1))
    assert without.nbytes == 0
    assert "copies wait for what is computed before" in without.reason
