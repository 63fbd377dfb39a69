"""Whether a plan's checkpoints are copied first, and that the copy is in its figures.

python -m pytest tests/planner/test_checkpoint_writing.py
"""

import pytest
import torch

from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.job import Shape
from memfit.planner.cpu_margin import HOST_MARGIN, HOST_MARGIN_BYTES
from memfit.planner.plan_json import plan_json
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.trace.step_phases import synthetic_micro_batch
from memfit.train.checkpoint.state import state_of
from memfit.train.checkpoint.state_codec import encode
from testing.nets import JOBS


def state_bytes(job) -> int:
    train_state = build(job, "cpu")
    run_window(train_state, [synthetic_micro_batch(job, Shape(items=4), torch.device("cpu"))])
    state = {name: value for name, value in state_of(train_state).items() if name != "random"}
    return sum(tensor.nbytes for tensor in encode(state, "test")[1].values())


@pytest.mark.parametrize("name", ["convolution", "gan"])
def test_the_copy_is_taken_where_the_budget_holds_it_and_is_in_every_phase(name):
    job, copy = JOBS[name](), state_bytes(JOBS[name]())
    alone = find_plan(
        job, PlanRequest(name=name, global_batch=4, device=with_memory(find_device("t4"), 8 << 30), micro_batch=4)
    ).plan
    roomy = find_plan(
        job, PlanRequest(name=name, global_batch=4, device=with_memory(local_cpu(), 1 << 30), micro_batch=4)
    )
    plan = roomy.plan
    assert plan.checkpoint_writing == "asynchronous"
    assert alone.checkpoint_writing == "asynchronous"
    assert "pinned host memory" in alone.reasons["checkpoint_writing"]
    before = plan.phases["train"]["allocated_bytes"] - copy
    assert sum(plan.phases["save"]["categories"].values()) == plan.phases["save"]["allocated_bytes"]
    assert plan_json(roomy)["phases"]["train"]["allocated_bytes"] == before + copy

    margin = HOST_MARGIN_BYTES + 1
    for spare, how in ((copy, "asynchronous"), (copy - 1024, "synchronous")):
        budget = int((before + spare + margin) / (1 - HOST_MARGIN)) + 2
        tight = find_plan(
            job, PlanRequest(name=name, global_batch=4, device=with_memory(local_cpu(), budget), micro_batch=4)
        ).plan
        assert tight.checkpoint_writing == how
        assert how in tight.reasons["checkpoint_writing"]
        assert tight.phases["train"]["allocated_bytes"] == before + (copy if how == "asynchronous" else 0)
