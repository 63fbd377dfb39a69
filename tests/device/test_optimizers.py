"""Foreach and fused optimizers on fake tensors make the events of real ones, on a CPU that is made to take foreach."""

import gc

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.card_rules import card_rules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from tests.device.minimal_tracer import MinimalTracer
from tests.trace.test_gradient_accumulation import of_real_run

STEP_COUNT = 64
"""Bytes above the largest scalar: optimizers' counts of steps are made in another way."""


def two_steps(name, device="cpu", **options):
    """Parameters of three shapes and two types, clipped and stepped twice."""
    parameters = [torch.nn.Parameter(torch.ones(64, 32 + 8 * (i % 3), device=device)) for i in range(6)]
    parameters += [torch.nn.Parameter(torch.ones(64, dtype=torch.float64, device=device)) for _ in range(2)]
    optimizer = getattr(torch.optim, name)(parameters, **{"foreach": True} | options)
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": torch.tensor(0.1)}),
        ("Adagrad", {}),
    ],
)
def test_fused_steps_on_a_card_hold_what_they_do_on_a_cpu(no_gc, name, options):
    """Every event, though torch has no functions of shapes for some of these steps."""
    fused = {"foreach": None, "fused": True, **options}
    with virtual_gpu(card_rules(find_device("rtx4090"))) as gpu, MinimalTracer(gpu) as tracer:
        two_steps(name, gpu.device, **fused)
    traced = sorted(nbytes for nbytes in tracer.events if nbytes > STEP_COUNT)
    gc.collect()
    real = sorted(nbytes for nbytes in of_real_run(lambda: two_steps(name, **fused)) if nbytes > STEP_COUNT)
    assert traced == real
