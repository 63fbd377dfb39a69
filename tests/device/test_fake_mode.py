"""What the mode remembers equals what FakeTensorMode computes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.device.virtual import fake_mode
from memfit.device.virtual.virtual_device import virtual_cpu
from tests.device.minimal_tracer import MinimalTracer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.batch_norm = nn.BatchNorm2d(3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        h = nn.functional.silu(self.norm(self.conv(self.batch_norm(x))))
        h = h.flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h)[0]
        return self.head(h[:, ::2].chunk(2, 1)[0])


def step(net, optimizer, batch, device="cpu"):
    net(torch.rand(batch, 3, 8, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class StockVirtual:
    """FakeTensorMode as it is, for the tracer."""

    device = torch.device("cpu")

    def __init__(self):
        self.on_resize = []

    def intercept(self, *args):
        from memfit.device.virtual.data_dependent import NOT_HANDLED

        return NOT_HANDLED


def events(virtual, batches):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with MinimalTracer(virtual) as tracer:
        for batch in batches:
            step(net, optimizer, batch)
    return tracer.events, tracer.ops


def test_same_events_as_fake_tensor_mode(no_memory, no_gc):
    with virtual_cpu() as cpu:
        ours = events(cpu, (2, 2, 3, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        stock = events(StockVirtual(), (2, 2, 3, 2))
    assert ours[1] == stock[1]
    assert ours[0] == stock[0]


CALLS = {
    "view": lambda x: x.view(3, 8),
    "slice": lambda x: x[1:, ::2],
    "transpose": lambda x: x.transpose(0, 2).contiguous(),
    "expand": lambda x: x[:1].expand(5, -1, -1),
    "add": lambda x: x + x.double(),
    "add scalar": lambda x: x + 1,
    "add float": lambda x: x + 1.5,
    "compare": lambda x: x > 0,
    "sum": lambda x: x.sum(1, keepdim=True),
    "max": lambda x: x.max(-1),
    "topk": lambda x: x.topk(2),
    "split": lambda x: x.split(2, 2),
    "unbind": lambda x: x.unbind(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x[:]]),
    "chunk": lambda x: x.chunk(2, -1),
    "empty_like": lambda x: torch.empty_like(x.transpose(0, 1)),
    "in place": lambda x: x.mul_(2).add_(x),
    "out": lambda x: torch.add(x, x, out=torch.empty(2, 3, 4)),
    "half": lambda x: x.half(),
    "layer_norm": lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 5), 3),
    "zeros": lambda x: torch.zeros(2, 3),
    "zeros int": lambda x: torch.zeros(2, 3, dtype=torch.int32),
    "arange": lambda x: torch.arange(7),
    "linspace": lambda x: torch.linspace(0, 1, 5),
    "index": lambda x: x[torch.zeros(5, dtype=torch.long)],
    "foreach": lambda x: torch._foreach_add([x, x[:1]], 1.0),
    "complex": lambda x: torch.fft.rfft(x),
    "squeeze": lambda x: x[:, :, :1].squeeze(-1),
    "dropout": lambda x: torch.native_dropout(x, 0.1, True),
}


def described(out):
    return [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes(), t.device)
        for t in torch.utils._pytree.tree_leaves(out)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_remembered_outputs(no_memory, name):
    call = CALLS[name]
    with FakeTensorMode():
        expected = described(call(torch.empty(2, 3, 4)))
    with virtual_cpu():
        first, again = (call(torch.empty(2, 3, 4)) for _ in range(2))
        assert described(first) == described(again) == expected
        assert type(first) is type(again)


def test_views_share_their_storage(no_memory):
    with virtual_cpu():
        for _ in range(2):
            x = torch.empty(2, 3)
            assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x


def test_default_dtype_counts(no_memory):
    with virtual_cpu():
        assert torch.zeros(2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.zeros(2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_second_call_is_remembered(no_memory):
    with virtual_cpu():
        x = torch.empty(2, 3)
        x + x
        count = len(fake_mode._calls)
        x + x
        assert len(fake_mode._calls) == count > 0


LAZY_CALLS = {
    "conj": lambda z: z.conj(),
    "conj of conj": lambda z: z.conj().conj(),
    "view of conj": lambda z: z.conj().t(),
    "imag of conj": lambda z: z.conj().imag,
    "resolved": lambda z: z.conj().resolve_conj(),
    "zeros": lambda z: torch._efficientzerotensor(2, 3),
    "view of zeros": lambda z: torch._efficientzerotensor(2, 3).t(),
    "product with zeros": lambda z: torch._efficientzerotensor(2, 3) * z,
}


def test_the_memory_tells_tensors_apart_by_what_is_computed_later(no_memory):
    """A view of conjugated numbers has the shape of a plain view, and zeros without memory that of a plain tensor."""

    def bits():
        z = torch.empty(2, 3, dtype=torch.complex64)
        outs = {name: call(z) for name, call in LAZY_CALLS.items()}
        return {name: (t.is_conj(), t.is_neg(), t._is_zerotensor(), t.stride()) for name, t in outs.items()}

    real = bits()
    with virtual_cpu():
        for _ in range(3):
            assert bits() == real


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "l1_loss"])
def test_a_reduced_loss_holds_the_storage_of_its_real_one(name, reduction):
    def bytes_of_a_loss(target):
        loss = getattr(nn.functional, name)(torch.rand(16, 8), target, reduction=reduction)
        return loss.shape, loss.untyped_storage().nbytes()

    real = torch.rand(16, 8)
    with virtual_cpu():
        fake = bytes_of_a_loss(torch.rand(16, 8))
        fake_of_a_real_target = bytes_of_a_loss(real)
    assert fake == fake_of_a_real_target == bytes_of_a_loss(real)


def test_a_library_operator_that_is_composed_of_others_decomposes_once(gpu):
    with torch.library._scoped_library("memfit_composite", "DEF") as library:
        library.define("made(str name, str? other=None) -> Tensor")
        library.impl("made", lambda name, other=None: torch.ones(3), "CompositeImplicitAutograd")
        assert torch.ops.memfit_composite.made("name").shape == (3,)
