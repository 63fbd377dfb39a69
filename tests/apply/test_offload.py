"""pytest tests/apply/test_offload.py: what waits on the host, and that nothing changes by it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from memfit.apply.offload import LEAST, _OffloadedTensor, saved_tensors_on_host

WIDE = LEAST // 4 // 8
"""Columns of eight rows that make a storage just large enough."""


class SharedLayer(nn.Module):
    """Two products of one input, and a view of it: autograd saves the same storage three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, 16), nn.Linear(WIDE, 16)

    def forward(self, x):
        x = x.exp()
        return (self.a(x) * self.b(x)).sum() + (x[:, : WIDE // 2] * x[:, WIDE // 2 :]).sum()


def packed(module, x):
    """What the module's operators saved, as it was put away, and the gradients."""
    collected = []
    hooks = saved_tensors_on_host(module)
    pack = hooks.pack_hook
    hooks.pack_hook = lambda tensor: collected.append(pack(tensor)) or collected[-1]
    with hooks:
        loss = module(x)
    loss.backward()
    return collected, [p.grad for p in module.parameters()] + [x.grad]


def test_a_storage_is_copied_once_and_the_weights_stay():
    torch.manual_seed(0)
    module, x = SharedLayer(), torch.randn(8, WIDE, requires_grad=True)
    answer, gradients = packed(module, x)
    away = [item for item in answer if isinstance(item, _OffloadedTensor)]
    assert len(away) >= 4
    assert len({id(item._copy) for item in away}) == 1
    assert away[0]._copy._there is None
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert weights & {item.untyped_storage().data_ptr() for item in answer if not isinstance(item, _OffloadedTensor)}
    plain, y = SharedLayer(), x.detach().clone().requires_grad_()
    plain.load_state_dict(module.state_dict())
    plain(y).backward()
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(gradients, [*(p.grad for p in plain.parameters()), y.grad], strict=True)
    )


def test_a_tensor_that_was_written_to_is_copied_again():
    x = torch.randn(8, WIDE, requires_grad=True)
    with saved_tensors_on_host(nn.Module()):
        y = x * 1
        first = y.sin()
        with torch.no_grad():
            kept = y.clone()
        second = (y * 1).add_(1).sin()
        loss = first.sum() + second.sum()
    loss.backward()
    assert torch.allclose(x.grad, kept.cos() + (kept + 1).cos())


def test_it_can_be_gone_through_twice():
    module, x = SharedLayer(), torch.randn(8, WIDE, requires_grad=True)
    with saved_tensors_on_host(module):
        loss = module(x)
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_tensors_that_are_cut_over_ranks_wait_on_the_host_too(mesh):
    def on_the_mesh(tensor):
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    values, weights = torch.randn(8, WIDE), torch.randn(WIDE, 16)
    expected, x = values.clone().requires_grad_(), values.clone().requires_grad_()
    (expected.exp() @ weights).sin().sum().backward()
    put_away = []
    hooks = saved_tensors_on_host(nn.Module())
    pack = hooks.pack_hook
    hooks.pack_hook = lambda tensor: put_away.append(pack(tensor)) or put_away[-1]
    with hooks:
        loss = (on_the_mesh(x).exp() @ on_the_mesh(weights)).sin().sum()
    loss.to_local().backward()
    assert sum(isinstance(item, _OffloadedTensor) for item in put_away) >= 2
    assert torch.equal(x.grad, expected.grad)
