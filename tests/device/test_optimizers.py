"""Foreach optimizers on fake tensors make the events of real ones: here on the CPU, which is made to take foreach."""

import gc

import pytest
import torch

from memfit.device.virtual.virtual_device import virtual_cpu
from tests.device.minimal_tracer import MinimalTracer
from tests.trace.test_gradient_accumulation import of_real_run

STEP_COUNT = 64
"""Bytes above the largest scalar: optimizers' counts of steps are made in another way."""


def two_steps(name, **options):
    """Parameters of three shapes and two types, clipped and stepped twice."""
    parameters = [torch.nn.Parameter(torch.ones(64, 32 + 8 * (i % 3))) for i in range(6)]
    parameters += [torch.nn.Parameter(torch.ones(64, dtype=torch.float64)) for _ in range(2)]
    optimizer = getattr(torch.optim, name)(parameters, foreach=True, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("Adam", {"weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
        ("SGD", {"lr": 0.1}),
        ("RMSprop", {}),
        ("Adagrad", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
    ],
)
def test_every_event_of_a_real_step(no_gc, name, options):
    with virtual_cpu() as cpu, MinimalTracer(cpu) as tracer:
        two_steps(name, **options)
    traced = [nbytes for nbytes in tracer.events if abs(nbytes) > STEP_COUNT]
    gc.collect()
    real = [nbytes for nbytes in of_real_run(lambda: two_steps(name, **options)) if abs(nbytes) > STEP_COUNT]
    assert traced == real
