"""pytest tests/apply/test_selective_checkpoint.py: what selective recompute keeps, and what it lets go of."""

import torch
from torch import nn

from memfit.apply.checkpointing import recompute
from memfit.apply.selective_checkpoint import selective_contexts
from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.torch_compat.selective_checkpoint import RECOMPUTE
from memfit.trace.step import Tracing, trace_job
from tests.engine.rank_steps import Stages


class Block(nn.Module):
    """The last product is only added to the input: nothing that is recomputed ever reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stored(block, x):
    """(output, whether each product of a checkpointed forward is kept, in their order)."""
    kept = []

    def contexts():
        first, again = selective_contexts()
        kept.append(again)
        return first, again

    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    products = [calls for operator, calls in kept[0].storage.items() if "aten.mm" in str(operator)]
    entries = [entry for calls in products for entry in (calls.values() if isinstance(calls, dict) else calls)]
    return out, [entry is not RECOMPUTE for entry in entries]


def test_a_product_that_only_the_output_needs_is_let_go_of():
    x = torch.randn(4, 8, requires_grad=True)
    out, kept = stored(Block(), x)
    assert kept == [True, False]
    out.sum().backward()
    assert x.grad is not None


def test_a_product_that_is_multiplied_afterwards_stays():
    class Scaled(Block):
        def forward(self, x):
            return x * self.down(torch.nn.functional.gelu(self.up(x)))

    x = torch.randn(4, 8, requires_grad=True)
    out, kept = stored(Scaled(), x)
    assert kept == [True, True]
    out.sum().backward()
    assert x.grad is not None


def test_gradients_are_the_same_where_recomputing_does_not_stop_early():
    net = nn.Sequential(Block(), Block())
    x = torch.randn(4, 8)
    net(x).square().sum().backward()
    kept = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with recompute({"net": net}, {"net.0": "selective"}), torch.utils.checkpoint.set_checkpoint_early_stop(False):
        net(x).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, net.parameters(), strict=True))


class OnACard(Stages):
    def batch(self, shape):
        return torch.randn(shape.items, 4)


def products(modes):
    """Matrix products of a micro-batch on one of two ranks, each of whose blocks is gathered as it runs."""
    how = Tracing(device=find_device("rtx4090"), checkpointing=modes, engine="fsdp2", world=2)
    trace = trace_job(OnACard(), Shape(items=8), how)
    names = [trace.names[name] for name in trace.operator_name]
    return sum(name in ("aten.addmm.default", "aten.mm.default") for name in names) // 2


def test_what_an_engine_does_around_blocks_inside_is_not_counted():
    """On a card FSDP2 gathers anew in the backward, with more operators than in the forward (and fewer gathers)."""
    stages = ("net.0", "net.1")
    kept = products({})
    assert kept == 8 + 2 * 8 - 1  # a product in the forward and two in the backward, without the input's
    assert products(dict.fromkeys(stages, "selective")) == kept
    assert products(dict.fromkeys(stages, "full")) > kept
