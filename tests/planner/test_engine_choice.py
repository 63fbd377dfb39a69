"""Which engine a plan for several devices names, and why.

python -m pytest tests/planner/test_engine_choice.py
"""

from dataclasses import replace

import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner.predict import plain_nets, predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.engine_choice import communication_model, engine_candidates, silent
from memfit.planner.search.search import find_plan
from testing.large_nets import Dit
from tests.verify.jobs import Sound, Unsynchronised

CARD = replace(find_device("a100-40gb"), context_bytes=0, context_low=0, context_high=0)
JOB = Dit(dim=512, depth=4, heads=4, frames=32)
NAME = "testing/large_nets.py:Dit"


@pytest.fixture(scope="module")
def between():
    """More than a rank of FSDP2 takes, and less than what one of DDP holds after its first step, whatever is kept."""
    ddp, fsdp2 = (
        predict(JOB, NAME, Shape(items=1, length=None), CARD, engine=engine, world=4).footprint.phases
        for engine in ("ddp", "fsdp2")
    )
    least, most = fsdp2["train"].process_bytes, ddp["save"].process_bytes
    assert least < most
    return with_memory(CARD, (least + most) // 2)


@pytest.mark.slow
def test_sharding_is_chosen_where_replicas_do_not_fit_and_the_reason_says_so(between):
    answer = find_plan(JOB, PlanRequest(name=NAME, global_batch=4, device=between, devices=4))
    assert answer.plan is not None
    assert answer.plan.engine == "fsdp2"
    assert answer.plan.reasons["engine"].startswith("ddp needs ")
    assert "of them between ranks" in answer.plan.reasons["engine"]
    assert 0 < answer.chosen.communication_seconds < answer.chosen.seconds
    again = predict(
        JOB, NAME, Shape(items=1), between, checkpointing=answer.plan.checkpointing, engine="fsdp2", world=4,
        plan=answer.plan,
    )  # fmt: skip
    assert again.footprint.phases["train"] == answer.chosen.footprint.phases["train"]
    assert find_plan(JOB, PlanRequest(name=NAME, global_batch=4, device=between, devices=4, engine="ddp")).plan is None


def test_replicas_are_kept_where_they_fit_as_they_are():
    answer = find_plan(Sound(), PlanRequest(name="Sound", global_batch=4, device=CARD, devices=2))
    assert answer.plan is not None
    assert answer.plan.engine == "ddp"
    assert answer.plan.reasons["engine"].endswith("fsdp2 could only add communication")


def test_an_engine_that_cannot_carry_the_job_is_refused_or_passed_over():
    with pytest.raises(InputError, match=r"--engine fsdp2.*write --engine ddp"):
        find_plan(
            Unsynchronised(), PlanRequest(name="Unsynchronised", global_batch=4, device=CARD, devices=2, engine="fsdp2")
        )
    answer = find_plan(Unsynchronised(), PlanRequest(name="Unsynchronised", global_batch=4, device=CARD, devices=2))
    assert answer.plan is not None
    assert answer.plan.engine == "ddp"


@pytest.mark.parametrize(
    ("engine", "devices", "said"),
    [("single", 2, "do not go together"), ("ddp", 1, "do not go together"), ("hsdp", 2, "no such engine")],
)
def test_engines_that_do_not_go_with_the_devices(engine, devices, said):
    with pytest.raises(InputError, match=said):
        engine_candidates(engine, devices)


def test_ranks_on_an_unknown_link_are_not_priced():
    nets = plain_nets(Sound())
    assert communication_model("ddp", nets, replace(CARD, link="smoke"), 2) is silent
    answer = communication_model("fsdp2", nets, CARD, 2)
    assert answer(2) > answer(1) > 0
