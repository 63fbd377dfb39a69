"""A compiled net in a trace: what it keeps for the backward, and its peaks, are those of the really compiled net."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.virtual.assumptions import EAGER, PLANNED
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.fake_group import fake_world
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.script.compiled_kernels import compiled_kernels
from tests.device.minimal_tracer import MinimalTracer


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(128), Block(128))
        self.head = nn.Linear(128, 1000)

    def forward(self, x):
        return self.head(self.blocks(x))


class Activations(nn.Module):
    """Two activations in a row around products: eager code keeps the input of each, compiled code one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(torch.sigmoid(functional.gelu(functional.silu(self.up(x)) * 2)))


NETS = {"decoder": (Decoder, (4, 64, 128)), "activations": (Activations, (64, 256))}


def real_bytes(net, x):
    """(kept after the forward, peak of the forward, peak of the backward) of a really compiled net, beyond the net."""
    compiled = torch.compile(net)
    for _ in range(2):
        compiled(x).sum().backward()
        net.zero_grad(set_to_none=True)
    with AllocatorEvents() as events:
        with events.phase("forward"):
            loss = compiled(x).sum()
        with events.phase("kept"):
            loss.detach()
        with events.phase("backward"):
            loss.backward()
    return tuple(events.peaks()[name].allocated_bytes for name in ("kept", "forward", "backward"))


def traced_bytes(net, x, tracer):
    before = tracer.live
    tracer.peak = before
    loss = net(x).sum()
    kept, forward = tracer.live - before, tracer.peak - before
    tracer.peak = tracer.live
    loss.backward()
    return kept, forward, tracer.peak - before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for the CPU with g++")
@pytest.mark.parametrize("name", NETS)
def test_a_trace_for_the_cpu_keeps_what_the_really_compiled_net_keeps(name, no_gc):
    kind, shape = NETS[name]
    measured = real_bytes(kind(), torch.randn(shape))
    with virtual_cpu() as cpu, MinimalTracer(cpu) as tracer:
        net = torch.compile(kind())
        x = torch.randn(shape)
        traced = traced_bytes(net, x, tracer)
        assert cpu.assumptions.compiled == {PLANNED}
    assert traced == measured


class AsksForData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


@pytest.mark.slow
def test_on_a_card_a_compiled_net_keeps_less_than_an_eager_one_and_says_so(no_gc):
    shape = (64, 256)
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        eager = Activations().cuda()
        as_written = traced_bytes(eager, torch.zeros(shape, device="cuda"), tracer)
        eager.zero_grad(set_to_none=True)
        compiled = torch.compile(eager)
        planned = traced_bytes(compiled, torch.zeros(shape, device="cuda"), tracer)
        assert gpu.assumptions.compiled == {PLANNED}
        assert "not validated on a card" in gpu.assumptions.of_sizes()[0]
    wide = 64 * 1024 * 4
    assert as_written[0] - planned[0] == wide, "the input of gelu is computed again"


@pytest.mark.slow
def test_a_compiled_net_under_autocast_keeps_half_precision_on_a_card(no_gc):
    kept = []
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        for enabled in (False, True):
            net = torch.compile(Activations().cuda())
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
                kept.append(traced_bytes(net, torch.zeros((4096, 256), device="cuda"), tracer)[0])
        assert gpu.assumptions.compiled == {PLANNED}
    assert kept[1] < 0.6 * kept[0]


def test_a_compiled_net_that_asks_for_data_runs_as_written_and_says_so():
    with virtual_gpu(CardRules()) as gpu:
        net = torch.compile(AsksForData().cuda())
        net(torch.ones(4, 8, device="cuda")).sum().backward()
        assert gpu.assumptions.compiled == {EAGER}


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(128), Block(128)])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.slow
def test_recomputed_blocks_with_attention_are_compiled_on_a_card(no_gc):
    kept = []
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        for kind in (Recomputed, Decoder):
            net = torch.compile(kind().to("cuda", torch.bfloat16))
            x = torch.zeros((4, 64, 128), device="cuda", dtype=torch.bfloat16, requires_grad=True)
            kept.append(traced_bytes(net, x, tracer)[0])
        assert gpu.assumptions.compiled == {PLANNED}
    assert kept[0] < kept[1] / 4, "one input for each block"


@pytest.mark.slow
def test_module_compile_takes_the_code_of_inductor_too():
    with virtual_gpu(CardRules()) as gpu:
        net = Activations().cuda()
        net.compile()
        net(torch.ones(4, 256, device="cuda")).sum().backward()
        assert net.up.weight.grad is not None
        assert gpu.assumptions.compiled == {PLANNED}


class GathersFirst(nn.Module):
    """As ``fully_shard`` leaves a module: its weight exists from a hook on, which allocates and is not compiled."""

    def __init__(self):
        super().__init__()
        self.layer = Activations()
        self.register_forward_pre_hook(lambda module, args: torch._dynamo.disable(self.gather, recursive=True)(args))
        self.gathered = 0

    def gather(self, args):
        self.gathered += torch.empty(1000, device="cuda").numel()

    def forward(self, x):
        return self.layer(x)


@pytest.mark.slow
def test_hooks_of_a_compiled_module_allocate_on_the_card():
    with virtual_gpu(CardRules()) as gpu:
        net = GathersFirst().cuda()
        net.compile(fullgraph=True)
        net(torch.ones(4, 256, device="cuda")).sum().backward()
        assert (net.gathered, gpu.assumptions.compiled) == (1000, {PLANNED})
        assert "forward" not in vars(net), "it is compiled in its call alone"


@pytest.mark.slow
def test_code_that_names_cuda_is_compiled_for_the_card():
    def ramp(x):
        return x * torch.arange(x.shape[-1], device="cuda")

    with virtual_gpu(CardRules()) as gpu:
        out = torch.compile(ramp)(torch.ones(4, 256, device="cuda", requires_grad=True))
        out.sum().backward()
        assert gpu.assumptions.compiled == {PLANNED}
    assert out.device.type == "vgpu"


def test_a_rank_of_several_has_two_functions_of_streams_since_dynamo_refuses_an_alias():
    with virtual_gpu(CardRules()), fake_world(2):
        assert torch.accelerator.current_stream is not torch.cuda.current_stream
        assert torch.accelerator.current_stream() == torch.cuda.current_stream()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 384)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        return flex_attention.flex_attention(q, k, v).transpose(1, 2).reshape(b, t, d)


@pytest.mark.slow
def test_flex_attention_in_a_compiled_net_has_its_kernel_s_tensors(no_gc):
    """Kept: the projection with query, key and value, the output, and one float32 log-sum-exp for each query."""
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer, compiled_kernels(print):
        net = Attends().to("cuda", torch.bfloat16)
        x = torch.zeros((4, 256, 128), device="cuda", dtype=torch.bfloat16)
        net.compile()
        kept, _, backward = traced_bytes(net, x, tracer)
        assert gpu.assumptions.compiled == {PLANNED}
    rows = 4 * 256
    out, log_sum = rows * 128 * 2, rows * 4 * 4
    assert kept == pytest.approx(3 * out + out + log_sum, abs=4096)
    assert backward - kept >= 3 * out + log_sum
