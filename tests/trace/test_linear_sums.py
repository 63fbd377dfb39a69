"""A linear layer's bias is added in a trace where a real run adds it.

python -m pytest tests/trace/test_linear_sums.py
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.trace.linear_sums import LinearSums
from tests.trace.test_autograd_formulas import of_trace
from tests.trace.test_gradient_accumulation import of_real_run

ROWS, LENGTH, WIDTH = 4, 24, 32
LEAST = ROWS * LENGTH * WIDTH * 4


class Seen(TorchDispatchMode):
    """A dispatch mode of somebody else's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def transposed():
    return torch.empty(ROWS, WIDTH, LENGTH).fill_(0.1).transpose(1, 2)


def trained(out):
    out.square().sum().backward()


class LinearCase:
    def transposed_input():
        trained(nn.Linear(WIDTH, 2 * WIDTH)(transposed()))

    def four_dimensions():
        trained(nn.Linear(WIDTH, 2 * WIDTH)(torch.empty(ROWS, WIDTH, 4, 6).fill_(0.1).permute(0, 2, 3, 1)))

    def without_gradients():
        with torch.no_grad():
            nn.Linear(WIDTH, 2 * WIDTH)(transposed())

    def projected_states():
        with torch.no_grad():
            nn.LSTM(WIDTH, 2 * WIDTH, 2, proj_size=8, batch_first=True)(transposed())


class SumCase:
    """The sum is a tensor of its own in a real run, too."""

    def two_calls():
        layer = nn.Linear(WIDTH, 2 * WIDTH)
        trained(transposed() @ layer.weight.t() + layer.bias)

    def in_a_loop():
        layer = nn.Linear(WIDTH, WIDTH)
        x = transposed()
        for _ in range(3):
            x = torch.matmul(x, layer.weight) + layer.bias
        trained(x)

    def contiguous_input():
        trained(nn.Linear(WIDTH, 2 * WIDTH)(transposed().contiguous()))

    def without_bias():
        layer, bias = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Parameter(torch.empty(2 * WIDTH))
        trained(layer(transposed()) + bias)

    def behind_another_mode():
        weight, bias = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH))
        with Seen():
            out = functional.linear(transposed(), weight, bias)
        trained(out)


LINEAR = {name: case for name, case in vars(LinearCase).items() if callable(case) and name[0] != "_"}
SUMS = {name: case for name, case in vars(SumCase).items() if callable(case) and name[0] != "_"}


def large(allocations):
    return [nbytes for nbytes in allocations if nbytes >= LEAST]


@pytest.mark.parametrize("name", LINEAR)
def test_the_bias_is_added_into_the_product(name, monkeypatch):
    real = large(of_real_run(LINEAR[name]))
    assert large(of_trace(virtual_cpu, LINEAR[name])) == real
    on_card = of_trace(lambda: virtual_gpu(CardRules()), LINEAR[name])

    monkeypatch.setattr(LinearSums, "is_in_place", lambda *_: False)
    without_the_rule = large(of_trace(virtual_cpu, LINEAR[name]))
    assert len(without_the_rule) > len(real)
    computed_by_cudnn = name == "projected_states"
    assert (of_trace(lambda: virtual_gpu(CardRules()), LINEAR[name]) == on_card) == computed_by_cudnn


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_is_none_of_a_linear_layer_is_a_tensor_of_its_own(name):
    assert large(of_trace(virtual_cpu, SUMS[name])) == large(of_real_run(SUMS[name]))
