"""Sums of gradients in a trace are those of the allocator's own events in real runs."""

import gc
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.trace import gradient_accumulation
from tests.device.minimal_tracer import MinimalTracer

SCALAR = 8
"""Bytes of the largest tensor that holds a Python number; a card keeps these on the host."""


class AccumulatingTracer(MinimalTracer):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        if gradient_accumulation.sums_in_place(func, args, node):
            args[0].add_(args[1])
            return args[0]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if node is not None:
            for leaf in torch.utils._pytree.tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    gradient_accumulation.made_in(node, leaf)
        return out


def of_real_run(run):
    """Bytes allocated (+) and freed (-), in order, as the profiler saw the allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = []

    def walk(node):
        if node.tag.name == "Allocation":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
        for child in node.children:
            walk(child)

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        walk(root)
    return [nbytes for _, nbytes in sorted(events, key=lambda event: event[0]) if abs(nbytes) > SCALAR]


def of_trace(enter, run):
    with enter() as virtual, torch.device(virtual.device):
        gc.collect()
        gc.disable()
        try:
            with AccumulatingTracer(virtual) as tracer:
                run()
        finally:
            gc.enable()
    return [nbytes for nbytes in tracer.events if abs(nbytes) > SCALAR]


def leaf(*shape):
    return torch.empty(*shape).fill_(0.1).requires_grad_()


held = []


class KeepsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        held.append(grad * 2)
        return held[-1]


class AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        first, second = grad * 2, grad * 3
        total = first + second
        del first, second
        return total


class SumCase:
    """Runs whose every event is the same; the operators in them have no scratch of their own on the CPU."""

    def two_branches():
        h = leaf(8, 8) * leaf(8, 8)
        (torch.tanh(h) + torch.sigmoid(h)).sum().backward()

    def three_branches():
        h = leaf(8, 8) * leaf(8, 8)
        (torch.tanh(h) + torch.sigmoid(h) + torch.exp(h)).sum().backward()

    def residual_left():
        h = torch.exp(leaf(8, 8) * leaf(8, 8))
        h = h + torch.tanh(h)
        h = h + torch.sigmoid(h)
        torch.tanh(h).sum().backward()

    def residual_right():
        h = torch.exp(leaf(8, 8) * leaf(8, 8))
        h = torch.tanh(h) + h
        h = torch.sigmoid(h) + h
        torch.tanh(h).sum().backward()

    def square():
        h = leaf(8, 8) * leaf(8, 8)
        (h * h).sum().backward()

    def transposed():
        h = leaf(8, 8) * leaf(8, 8)
        (torch.tanh(h).sum() + torch.tanh(h.t()).sum()).backward()

    def slices():
        x = leaf(4, 32) * 1
        (x[:, :16].tanh() + x[:, 16:].sigmoid()).sum().backward()

    def concatenation():
        x = leaf(4, 8) * 1
        y = torch.cat([x, x.tanh()], -1)
        (y * y).sum().backward()

    def gradient_held_by_python_first():
        held.clear()
        h = leaf(8, 8) * leaf(8, 8)
        (KeepsItsGradient.apply(h) + torch.tanh(h)).sum().backward()
        held.clear()

    def gradient_held_by_python_second():
        held.clear()
        h = leaf(8, 8) * leaf(8, 8)
        (torch.tanh(h) + KeepsItsGradient.apply(h)).sum().backward()
        held.clear()

    def addition_in_a_custom_backward():
        h = leaf(8, 8) * leaf(8, 8)
        (AddsInBackward.apply(h) + h.tanh()).sum().backward()

    def addition_in_a_formula():
        x = leaf(8, 8) * 1
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        ((x - mean) * torch.rsqrt(variance + 1e-5)).sum().backward()

    def hook():
        h = leaf(8, 8) * leaf(8, 8)
        h.register_hook(lambda grad: grad * 2)
        (torch.tanh(h) + torch.sigmoid(h)).sum().backward()

    def retained_gradient():
        h = leaf(8, 8) * leaf(8, 8)
        t = torch.tanh(h)
        t.retain_grad()
        (t * 2 + t + h).sum().backward()

    def micro_batches():
        net, x = nn.Linear(16, 16), leaf(4, 16)
        for _ in range(3):
            net(x).tanh().sum().backward()

    def expanded_gradients_are_cloned():
        weight = leaf(8, 8)
        weight.sum().backward()
        weight.sum().backward()

    def broadcast_parameter():
        p, x = leaf(1, 8, 8), leaf(4, 8, 8)
        ((x + p).tanh() + p).sum().backward()


CASES = {name: function for name, function in vars(SumCase).items() if callable(function) and name[0] != "_"}


@cache
def of_real_case(name):
    return of_real_run(CASES[name])


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_every_event_of_a_real_run(name, enter):
    assert of_trace(enter, CASES[name]) == of_real_case(name)


@pytest.mark.parametrize("name", ["two_branches", "residual_left", "gradient_held_by_python_second"])
def test_without_the_rule_a_trace_differs(name, monkeypatch):
    monkeypatch.setattr(gradient_accumulation, "sums_in_place", lambda *args: False)
    without = of_trace(virtual_cpu, CASES[name])
    assert (without == of_real_case(name)) is (name == "gradient_held_by_python_second")


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        ("_only_the_engine_holds", "gradient_held_by_python_second"),
        ("_is_a_sum_of_the_engine", "addition_in_a_formula"),
    ],
)
def test_each_condition_is_needed(condition, name, monkeypatch):
    monkeypatch.setattr(gradient_accumulation, condition, lambda *args: True)
    assert of_trace(virtual_cpu, CASES[name]) != of_real_case(name)


def residual_net():
    """Frees at its end come in another order than a real run's; the peak does not."""
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=False)
    x = leaf(4, 16)
    for _ in range(2):
        h = x
        for layer in layers:
            h = h + F.tanh(layer(h))
        h.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak(events):
    live = most = 0
    for nbytes in events:
        live += nbytes
        most = max(most, live)
    return most


def test_a_residual_net_with_its_optimizer():
    traced, real = of_trace(virtual_cpu, residual_net), of_real_run(residual_net)
    assert peak(traced) == peak(real)
    assert sorted(traced) == sorted(real)
