"""pytest tests/apply/test_checkpointing.py: recomputing changes nothing but memory."""

import copy

import pytest
import torch
from torch import nn

from memfit.apply.checkpointing import recompute


def net() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 3, 3))
    return nn.Sequential(block, nn.BatchNorm2d(3))


def trained(model: nn.Module, mode: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients and buffers after two steps of two forwards each."""
    torch.manual_seed(1)
    with recompute({"net": model}, {"net.0": mode}):
        for _ in range(2):
            losses = [model(torch.randn(4, 3, 9, 9)).square().sum() for _ in range(2)]
            sum(losses).backward()
    return [p.grad for p in model.parameters()], list(model.buffers())


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_gradients_and_statistics_are_those_of_keeping_everything(mode):
    model = net()
    other = copy.deepcopy(model)
    for kept, again in zip(trained(model, "keep"), trained(other, mode), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert model[0][1].num_batches_tracked == 4


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_compiled_net_recomputes_too(mode):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3)), nn.Linear(3, 3))
    other = torch.compile(copy.deepcopy(model), backend="aot_eager")
    x = torch.randn(4, 3)
    with recompute({"net": other}, {"net._orig_mod.0": mode}):
        for item in (model, other):
            item(x).square().sum().backward()
    for kept, again in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(kept.grad, again.grad)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_net_at_rest_in_the_forward_alone_gets_no_gradients(mode):
    """A GAN's generator looks through the discriminator, whose parameters are at rest until the loss is there."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    gradients = []
    for modes in ({}, {"judge": mode}):
        with recompute({"judge": net}, modes):
            net.requires_grad_(False)
            loss = net(x).square().sum()
            net.requires_grad_(True)
            (gradient,) = torch.autograd.grad(loss, x)
        gradients.append(gradient)
        assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_it_is_taken_off_again():
    model = net()
    with recompute({"net": model}, {"net.0": "full"}):
        assert "forward" in model[0].__dict__
    assert "forward" not in model[0].__dict__


class Worn(nn.Module):
    """Writes buffers of its own: a counter, a vector that is replaced, and those of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm((self.inner(x) * (1 + self.calls) + self.mean)[..., None].expand(-1, -1, 3) ** 2).mean(2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_buffers_are_as_in_the_first_forward_and_are_not_written_twice(mode):
    """A block that is shared runs twice before its backward: each recomputing has the buffers of its own forward."""
    learned = []
    for modes in ({}, {"net": mode}):
        torch.manual_seed(0)
        net = Worn()
        with recompute({"net": net}, modes):
            for _ in range(2):
                net(net(torch.randn(5, 4))).square().sum().backward()
        assert net.calls == 4
        learned.append([*(p.grad for p in net.parameters()), *net.buffers()])
    assert all(torch.equal(kept, again) for kept, again in zip(*learned, strict=True))


def test_what_trained_in_the_forward_trains_in_its_recomputing():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), torch.randn(3, 4)
    gradients = []
    for modes in ({}, {"net": "full"}):
        with recompute({"net": net}, modes):
            loss = net.eval()(x).sum()
            net.train()
            gradients.append(torch.autograd.grad(loss, net[0].weight)[0])
        assert net[1].training
    assert torch.equal(*gradients)


def test_a_graph_may_be_gone_back_through_twice():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    collected = []
    for modes in ({}, {"net": "full"}):
        with recompute({"net": net}, modes):
            (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            collected.append(torch.autograd.grad(slope.square().sum(), net[0].weight)[0])
    assert torch.equal(*collected)
