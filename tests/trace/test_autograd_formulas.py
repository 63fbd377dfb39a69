"""Formulas of autograd that spread a gradient over zeros allocate in a trace what the allocator sees in real runs."""

import gc

import pytest
import torch
from torch import nn

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.events import ALLOCATE
from memfit.trace import autograd_formulas, tracer
from memfit.trace.tracer import Tracer
from tests.trace.test_gradient_accumulation import of_real_run

ROWS, COLUMNS = 48, 32
NBYTES = ROWS * COLUMNS * 4


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.empty(ROWS, COLUMNS).fill_(0.1))


def places(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


class OwnSpread(torch.autograd.Function):
    """A backward that a person wrote, in new memory."""

    @staticmethod
    def forward(ctx, x):
        return x[:, 0].clone()

    @staticmethod
    def backward(ctx, grad):
        index = torch.zeros(ROWS, 1, dtype=torch.int64, device=grad.device)
        return torch.zeros(ROWS, COLUMNS, device=grad.device).scatter_add(1, index, grad[:, None])


class SpreadCase:
    def gather():
        leaf().gather(1, places(ROWS)[:, None]).sum().backward()

    def take_along_dim():
        torch.take_along_dim(leaf(), places(ROWS)[:, None], 1).sum().backward()

    def index():
        leaf()[places(5)].sum().backward()

    def index_of_two_dimensions():
        leaf()[places(5), places(5)].sum().backward()

    def index_select():
        leaf().index_select(1, places(5)).sum().backward()

    def take():
        leaf().take(places(5)).sum().backward()

    def largest_along_a_dimension():
        leaf().max(1).values.sum().backward()

    def median_along_a_dimension():
        leaf().median(1).values.sum().backward()

    def sort():
        leaf().sort(1).values.sum().backward()

    def topk():
        leaf().topk(3).values.sum().backward()

    def gradient_penalty():
        x = leaf()
        (grad,) = torch.autograd.grad(x.square().gather(1, places(ROWS)[:, None]).sum(), x, create_graph=True)
        grad.square().sum().backward()

    def own_function():
        OwnSpread.apply(leaf()).sum().backward()


CASES = {name: case for name, case in vars(SpreadCase).items() if callable(case) and name[0] != "_"}


def of_trace(enter, run):
    """Bytes of allocations, in order."""
    with enter() as virtual, torch.device(virtual.device):
        gc.collect()
        with Tracer(virtual).recording() as seen:
            run()
    return [seen.nbytes[i] for kind, i in zip(seen.kind, seen.storage, strict=True) if kind == ALLOCATE]


def large(allocations):
    """Those of a gradient or more."""
    return [nbytes for nbytes in allocations if nbytes >= NBYTES]


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_spread_where_a_real_run_spreads_them(name, enter, monkeypatch):
    real = large(of_real_run(CASES[name]))
    assert large(of_trace(enter, CASES[name])) == real

    monkeypatch.setattr(tracer, "writes_into_zeros", lambda node, target: False)
    without_the_rule = large(of_trace(enter, CASES[name]))
    assert len(without_the_rule) == len(real) + (name != "own_function")


def test_a_function_written_in_python_spreads_as_it_is_written(monkeypatch):
    real = large(of_real_run(SpreadCase.own_function))
    monkeypatch.setattr(autograd_formulas, "BackwardCFunction", ())
    assert len(large(of_trace(virtual_cpu, SpreadCase.own_function))) == len(real) - 1
