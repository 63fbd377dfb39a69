"""Forward-mode autograd in a trace allocates what the allocator sees in real runs."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp

from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.events import ALLOCATE
from memfit.trace.tracer import Tracer
from tests.trace.test_gradient_accumulation import SCALAR, of_real_run


class ForwardCase:
    def product():
        x = torch.ones(16, 24)
        made = nn.Linear(24, 64)
        for _ in range(3):
            jvp(made, (x,), (torch.ones_like(x),))

    def backward():
        x = torch.ones(16, 24)
        made = nn.Linear(24, 64)
        for _ in range(3):
            out, tangent = jvp(made, (x,), (torch.ones_like(x),))
            (out + tangent).mean().backward()

    def dual_numbers():
        x = torch.ones(16, 24)
        made = nn.Linear(24, 64)
        for _ in range(3):
            with forward_ad.dual_level():
                forward_ad.unpack_dual(made(forward_ad.make_dual(x, torch.ones_like(x))))

    def some_weights():
        made = nn.Linear(24, 64)
        weights = {"weight": made.weight.detach()}
        for _ in range(2):
            x = torch.ones(16, 24)
            tangents = {"weight": torch.ones_like(weights["weight"])}
            jvp(lambda values, x=x: functional_call(made, values, (x,)), (weights,), (tangents,))


CASES = {name: case for name, case in vars(ForwardCase).items() if callable(case) and name[0] != "_"}


def most(changes):
    """The most bytes that are alive at once."""
    alive = peak = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("name", CASES)
def test_tangents_of_what_has_none_hold_no_memory(name):
    real = most(of_real_run(CASES[name]))
    with virtual_cpu() as virtual, Tracer(virtual).recording() as seen:
        CASES[name]()
    traced = [seen.nbytes[i] * (1 if kind == ALLOCATE else -1) for kind, i in zip(seen.kind, seen.storage, strict=True)]
    assert most([nbytes for nbytes in traced if abs(nbytes) > SCALAR]) == real
