"""inductor's plan of a compiled function: on the CPU, what the really compiled function allocates."""

import shutil

import pytest
import torch

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.virtual import compiled_functions
from memfit.device.virtual.assumptions import EAGER, PLANNED
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.inductor_plan import compiled_plan
from memfit.device.virtual.virtual_device import virtual_gpu
from tests.device.minimal_tracer import MinimalTracer

MIB = 1 << 20


def orthogonal_step(weight, gradient):
    """Products of matrices, whose results are buffers, and what is fused around them."""
    scaled = gradient / gradient.norm()
    for _ in range(2):
        scaled = 1.5 * scaled - 0.5 * (scaled @ scaled.T) @ scaled
    weight.sub_(scaled * 0.1)


def step_by_blocks(weight, gradient):
    blocks = gradient.view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True)
    weight.sub_((blocks / scale).view(weight.shape) * 0.1)


def half_of(x):
    return x / 2


def peak_of(kernels):
    live, peak, sizes = 0, 0, {}
    for kernel in kernels:
        sizes.update(kernel.allocates)
        live += sum(nbytes for _, nbytes in kernel.allocates)
        peak = max(peak, live)
        live -= sum(sizes[name] for name in kernel.frees)
    return peak, live


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for the CPU with g++")
@pytest.mark.parametrize("function", [orthogonal_step, step_by_blocks])
def test_the_plan_for_the_cpu_is_what_the_compiled_function_allocates(function, no_gc):
    tensors = [torch.randn(512, 1024), torch.randn(512, 1024)]
    planned, left = peak_of(compiled_plan(function, tensors, torch.device("cpu")))
    assert left == 0
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    with torch.no_grad():
        compiled(*tensors)
        with AllocatorEvents() as events, events.phase("step"):
            compiled(*tensors)
    assert events.peaks()["step"].allocated_bytes == planned


@pytest.mark.slow
def test_products_of_matrices_have_buffers_on_a_card():
    tensors = [torch.empty(512, 1024), torch.empty(512, 1024)]
    kernels = compiled_plan(orthogonal_step, tensors)
    assert kernels is not None
    assert peak_of(kernels)[0] >= 2 * 512 * 1024 * 4


@pytest.mark.slow
def test_what_one_kernel_makes_and_uses_takes_no_memory_on_a_card():
    tensors = [torch.empty(512, 1024), torch.empty(512, 1024)]
    kernels = compiled_plan(step_by_blocks, tensors)
    assert kernels is not None
    assert peak_of(kernels)[0] < 512 * 1024 * 4, "eager code holds two tensors of this size"


@pytest.mark.slow
def test_a_compiled_step_takes_its_plan_and_says_so(no_gc):
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        compiled = torch.compile(step_by_blocks)
        weight, gradient = (torch.zeros(512, 1024, device="cuda") for _ in range(2))
        with torch.no_grad():
            assert compiled(weight, gradient) is None
        assert gpu.assumptions.compiled == {PLANNED}
        assert tracer.peak < 2 * 2 * MIB + 2 * MIB, "the two tensors, and no whole one beside them"
        assert "not validated" in gpu.assumptions.of_sizes()[0]


@pytest.mark.slow
def test_a_function_that_returns_something_is_a_region_and_has_no_plan_for_any_shape(monkeypatch):
    tried = []
    plan = compiled_functions.compiled_plan
    monkeypatch.setattr(compiled_functions, "compiled_plan", lambda *args: tried.append(args) or plan(*args))
    with virtual_gpu(CardRules()) as gpu, torch.no_grad():
        halved = torch.compile(half_of)
        for length in (3, 4, 5):
            assert halved(torch.ones(length, device="cuda")).shape == (length,)
        assert gpu.assumptions.compiled == {PLANNED}
    assert len(tried) == 1


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager"}, {"mode": "reduce-overhead"}])
def test_another_backend_than_inductor_is_what_was_written(options):
    with virtual_gpu(CardRules()) as gpu:
        net = torch.compile(torch.nn.Linear(3, 2), **options).cuda()
        assert not gpu.assumptions.compiled
        net(torch.ones(4, 3, device="cuda"))
        assert gpu.assumptions.compiled == {EAGER}
