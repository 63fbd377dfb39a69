import re

import pytest
import torch
import torch.nn.functional as F

from memfit.device.virtual.autocast import kernels
from memfit.device.virtual.backend import NAME
from memfit.torch_compat import DispatchKey, has_kernel
from tests.device.minimal_tracer import MinimalTracer

HALF = [torch.bfloat16, torch.float16]
LOW, FULL, SAME = "low", "float32", "input's"


NAMED_DIMENSIONS = re.compile(r"\.(\w*[Dd]imname|names_)")


def test_kernels_are_those_of_cudas_own_autocast():
    """The CPU build has the AutocastCUDA kernels, too; a CUDA build has one for cuDNN's recurrent nets."""
    treated = {
        name.removeprefix("aten::").removesuffix(".default")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert set(kernels()) == {name for name in treated - {"_cudnn_rnn"} if not NAMED_DIMENSIONS.search(name)}
    assert len(kernels()) >= 118


def run(name, x):
    """x: (2, 8, 16, 16)."""
    vgpu = {"device": x.device}
    square = x[0, 0]
    return {
        "linear": lambda: F.linear(x, torch.randn(5, 16, **vgpu)),
        "matmul": lambda: x @ x,
        "mm": lambda: square.mm(square),
        "conv2d": lambda: F.conv2d(x, torch.randn(4, 8, 3, 3, **vgpu), torch.randn(4, **vgpu)),
        "conv_transpose2d": lambda: F.conv_transpose2d(x, torch.randn(8, 4, 3, 3, **vgpu)),
        "bmm": lambda: torch.bmm(x[0], x[0]),
        "baddbmm": lambda: torch.baddbmm(x[0], x[0], x[0]),
        "einsum": lambda: torch.einsum("bcij,bcjk->bcik", x, x),
        "sdpa": lambda: F.scaled_dot_product_attention(x, x, x),
        "prelu": lambda: F.prelu(x, torch.randn(8, **vgpu)),
        "layer_norm": lambda: F.layer_norm(x, (16,)),
        "group_norm": lambda: F.group_norm(x, 2),
        "rms_norm": lambda: F.rms_norm(x, (16,)),
        "softmax": lambda: x.softmax(-1),
        "log_softmax": lambda: x.log_softmax(-1),
        "sum": lambda: x.sum(),
        "prod": lambda: x.prod(),
        "cumsum": lambda: x.cumsum(-1),
        "pow": lambda: x**3,
        "exp": lambda: x.exp(),
        "rsqrt": lambda: x.rsqrt(),
        "softplus": lambda: F.softplus(x),
        "norm": lambda: x.norm(),
        "vector_norm": lambda: torch.linalg.vector_norm(x),
        "logsumexp": lambda: x.logsumexp(-1),
        "mse_loss": lambda: F.mse_loss(x, x),
        "l1_loss": lambda: F.l1_loss(x, x),
        "smooth_l1_loss": lambda: F.smooth_l1_loss(x, x),
        "kl_div": lambda: F.kl_div(x, x),
        "cross_entropy": lambda: F.cross_entropy(square, torch.zeros(16, dtype=torch.long, **vgpu)),
        "bce_with_logits": lambda: F.binary_cross_entropy_with_logits(x, x),
        "nearest": lambda: F.interpolate(x, scale_factor=2),
        "bilinear": lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "cosine_similarity": lambda: F.cosine_similarity(x, x),
        "gelu": lambda: F.gelu(x),
        "silu": lambda: F.silu(x),
        "relu": lambda: F.relu(x),
        "mean": lambda: x.mean(),
        "dropout": lambda: F.dropout(x, 0.1),
        "mul": lambda: x * x,
        "add": lambda: x + x,
        "batch_norm": lambda: F.batch_norm(x, None, None, training=True),
        "avg_pool2d": lambda: F.avg_pool2d(x, 2),
    }[name]()


KINDS = {
    LOW: "linear matmul mm conv2d conv_transpose2d bmm baddbmm einsum sdpa prelu",
    FULL: "layer_norm group_norm rms_norm softmax log_softmax sum prod cumsum pow exp rsqrt softplus norm vector_norm "
    "logsumexp mse_loss l1_loss smooth_l1_loss kl_div cross_entropy bce_with_logits nearest bilinear cosine_similarity",
    SAME: "gelu silu relu mean dropout mul add batch_norm avg_pool2d",
}
EXPECTED = {name: kind for kind, names in KINDS.items() for name in names.split()}


@pytest.mark.parametrize("low", HALF)
@pytest.mark.parametrize("given", [*HALF, torch.float32])
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
def test_output_types(gpu, low, given):
    x = torch.randn(2, 8, 16, 16, device=gpu.device, dtype=given)
    with torch.autocast(NAME, dtype=low):
        by_name = {name: run(name, x).dtype for name in EXPECTED}
    types = {LOW: low, FULL: torch.float32, SAME: given}
    expected = {name: types[kind] for name, kind in EXPECTED.items()}
    if not has_kernel("aten::rms_norm", DispatchKey.AutocastCUDA):  # CUDA's list has it from torch 2.12 on
        expected["rms_norm"] = given
    assert by_name == expected


@pytest.mark.parametrize("low", HALF)
def test_float64_is_left_alone(gpu, low):
    x = torch.randn(2, 8, 16, 16, device=gpu.device, dtype=torch.float64)
    with torch.autocast(NAME, dtype=low):
        assert (x @ x).dtype is x.softmax(-1).dtype is x.sum().dtype is x.exp().dtype is torch.float64


@pytest.mark.parametrize("low", HALF)
def test_mixed_types(gpu, low):
    half, full = (torch.ones(4, 4, device=gpu.device, dtype=dtype) for dtype in (low, torch.float32))
    with torch.autocast(NAME, dtype=low):
        assert (half + full).dtype is torch.float32
        assert torch.cat([half, full]).dtype is torch.float32
        assert torch.stack([half, half]).dtype is low
        assert torch.addcmul(half, half, full).dtype is torch.float32
        assert torch.addcmul(half, half, half).dtype is low
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(half, half)
        with torch.autocast(NAME, enabled=False):
            assert (full @ full).dtype is torch.float32


def test_weights_are_cast_once_and_kept_until_the_outermost_context_ends(gpu, no_gc):
    """8 weights of 1 MiB in float32, each used twice: 8 copies of 0.5 MiB; 16 without the cache."""
    layers = [torch.nn.Linear(512, 512, bias=False, device=gpu.device) for _ in range(8)]
    x = torch.ones(1, 512, device=gpu.device)

    def copies(**options):
        with MinimalTracer(gpu) as tracer, torch.autocast(NAME, dtype=torch.bfloat16, **options):
            with torch.autocast(NAME, dtype=torch.bfloat16, **options):
                h = x
                for layer in layers:
                    h = layer(h)
            for layer in layers:
                h = layer(h)
        return sum(nbytes == 2**19 for nbytes in tracer.events), tracer, h

    count, tracer, h = copies()
    assert count == 8
    assert tracer.live > 8 * 2**19
    del h
    assert tracer.live == 0
    assert copies(cache_enabled=False)[0] == 16


def test_weights_copies_die_with_the_context_where_nothing_is_learned(gpu, no_gc):
    layer = torch.nn.Linear(512, 512, bias=False, device=gpu.device)
    with MinimalTracer(gpu) as tracer, torch.no_grad():
        with torch.autocast(NAME, dtype=torch.bfloat16):
            y = layer(torch.ones(1, 512, device=gpu.device))
            assert tracer.live == 2**19 + 2 * 512
        assert tracer.live == y.numel() * 2


def test_gradients_have_their_weights_type(gpu):
    layer = torch.nn.Linear(8, 8, device=gpu.device)
    with torch.autocast(NAME, dtype=torch.float16):
        loss = layer(torch.ones(2, 8, device=gpu.device)).float().sum()
    loss.backward()
    assert layer.weight.grad.dtype is layer.bias.grad.dtype is torch.float32


@pytest.mark.parametrize(("low", "copied"), [(torch.float16, False), (torch.bfloat16, True)])
def test_softmax_of_fp16_makes_no_float32_copy_of_its_input(gpu, no_gc, low, copied):
    with MinimalTracer(gpu) as tracer:
        x = torch.ones(64, 64, device=gpu.device, dtype=low)
        with torch.autocast(NAME, dtype=low):
            x.softmax(-1)
    assert tracer.peak == 64 * 64 * (2 + 4 + (4 if copied else 0))


def test_arguments_are_cast_last_first(gpu, no_gc):
    net = torch.nn.Linear(16, 4, device=gpu.device)
    x = torch.ones(2, 16, device=gpu.device)
    with MinimalTracer(gpu) as tracer, torch.autocast(NAME, dtype=torch.bfloat16):
        net(x)
    assert tracer.events[:3] == [4 * 2, 4 * 16 * 2, 2 * 16 * 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", HALF)
def test_float32_casts_half_precision_up_as_cudas_autocast_does(gpu, no_gc, given):
    """Routers of experts ask for it (torchtitan's); the CPU's autocast refuses it with a warning. Copies of both
    operands in float32 are kept for backward, 4 x 8 and 8 x 8."""
    x, weight = (torch.ones(rows, 8, device=gpu.device, dtype=given, requires_grad=True) for rows in (4, 8))
    with MinimalTracer(gpu) as tracer, torch.autocast(NAME, dtype=torch.float32):
        scores = F.linear(x, weight)
    assert scores.dtype is torch.float32
    assert tracer.live == 4 * (4 * 8 + 8 * 8 + 4 * 8)
