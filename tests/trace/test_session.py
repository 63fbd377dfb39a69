"""Micro-batches and steps of a session on an engine that holds parts.

python -m pytest tests/trace/test_session.py
"""

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.trace.session import open_session
from memfit.trace.step import Tracing
from testing.nets import JOBS, SHAPES

SHAPE = Shape(items=SHAPES["dit"][0], length=SHAPES["dit"][1])


def resident(traced):
    return int(traced.trace.nbytes[traced.trace.made_by < 0].sum())


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_parts_are_stepped_and_gradients_held_as_the_stage_has_it(engine):
    how = Tracing(device=find_device("cpu"), engine=engine, world=2)
    with open_session(JOBS["dit"](clip=1.0), how, SHAPE) as session:
        train_state = session.train_state
        (optimizer,) = train_state.optimizers.values()
        parts = sum(part.nbytes for part in train_state.engine.stepped(optimizer))
        first = session.micro_batch(SHAPE, {}, accumulated=False)
        later = session.micro_batch(SHAPE, {}, accumulated=True)
        complete = sum(getattr(p, "ds_numel", p.numel()) * 4 for p in train_state.stepped["dit"])
        assert resident(later) - resident(first) == {"zero1": complete, "zero2": parts, "zero3": 0}[engine]
        steps = [session.optimizer_step(kind) for kind in ("job", "foreach", "loop")]
        again = session.micro_batch(SHAPE, {}, accumulated=False)
    assert complete <= 2 * parts < 1.1 * complete
    assert resident(again) == resident(first)
    for step in steps:
        ran = {step.trace.names[name] for name in step.trace.operator_name}
        assert any("sqrt" in name for name in ran)
        assert any("norm" in name for name in ran)


@pytest.mark.parametrize(
    ("engine", "choices"),
    [
        ("zero1", {"offload_optimizer": True}), ("zero2", {"offload_optimizer": True}),
        ("zero3", {"offload_optimizer": True, "offload_param": True}), ("fsdp2", {"cpu_offload": True}),
    ],
)  # fmt: skip
def test_gradients_that_an_engine_keeps_on_the_host_outlast_a_trace(engine, choices):
    how = Tracing(device=find_device("rtx4090"), engine=engine, world=2, engine_choices=choices)
    with open_session(JOBS["dit"](), how, SHAPE) as session:
        session.micro_batch(SHAPE, {}, accumulated=False)  # DeepSpeed keeps the norms of its gradients
        first = session.micro_batch(SHAPE, {}, accumulated=False)
        assert session.optimizer_step() is not None
        again = session.micro_batch(SHAPE, {}, accumulated=False)
    assert resident(again) == resident(first)
