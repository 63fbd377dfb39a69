"""Gradients of parameters that are whole on every rank of tp: no two in the same memory.

python -m pytest tests/engine/test_own_gradients.py
"""

import copy

import pytest
import torch
from torch import nn

from memfit.device.virtual.fake_group import predicted_ranks
from memfit.engine.local_parameters import replicate_parameters
from memfit.engine.process_group import mesh_of_ranks
from memfit.mesh import MeshShape
from memfit.torch_compat.attributes import local_tensor, storage_id_of

DIM = 4


class Beside(nn.Module):
    """A token before all others, and their positions: of one sample, the gradient of the first is a part of that of
    the second."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.positions = nn.Parameter(torch.zeros(1, 3, DIM))

    def forward(self, x):
        return (torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions).square().sum()


class Summed(nn.Module):
    """Two parameters whose sum is what is used."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        return (x * (self.left + self.right)).sum()


@pytest.mark.parametrize("kind", [Beside, Summed])
def test_gradients_are_those_of_one_device_whatever_adds_to_or_scales_them(kind):
    torch.manual_seed(0)
    net = kind()
    whole, samples = copy.deepcopy(net), [torch.randn(1, 2, DIM) for _ in range(3)]
    for sample in samples:
        whole(sample).backward()
    with predicted_ranks(2):
        replicate_parameters(net, mesh_of_ranks("cpu", MeshShape(tp=2))["tp"])
        for sample in samples:
            net(sample).backward()
        gradients = [local_tensor(parameter.grad) for parameter in net.parameters()]
        assert len(set(map(storage_id_of, gradients))) == len(gradients)
        for gradient, expected in zip(gradients, whole.parameters(), strict=True):
            torch.testing.assert_close(gradient, expected.grad)


def test_a_gradient_that_is_alone_is_not_copied():
    net, given = Beside(), []
    with predicted_ranks(2):
        replicate_parameters(net, mesh_of_ranks("cpu", MeshShape(tp=2))["tp"])
        summed = net(torch.randn(2, 2, DIM))
        node = next(
            each for each, _ in summed.grad_fn.next_functions[0][0].next_functions[0][0].next_functions
            if "OwnGradient" in type(each).__name__
        )  # fmt: skip
        node.register_prehook(lambda gradients: given.append(storage_id_of(gradients[0])))
        summed.backward()
        assert given == [storage_id_of(local_tensor(net.positions.grad))]
