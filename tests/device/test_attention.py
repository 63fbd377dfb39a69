import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.device.virtual.attention import choose
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_gpu
from tests.device.minimal_tracer import MinimalTracer

T4, A100, L40S, H100, H100_OLD_CUDNN, RTX5090 = (
    CardRules(compute_capability=(7, 5)),
    CardRules(compute_capability=(8, 0)),
    CardRules(compute_capability=(8, 9)),
    CardRules(compute_capability=(9, 0)),
    CardRules(compute_capability=(9, 0), cudnn_attention_first=False),
    CardRules(compute_capability=(12, 0)),
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIB = 2**20


def inputs(dtype, d=64, heads=8, kv_heads=8, lq=1024, lk=1024, grad=True):
    shapes = ((2, heads, lq, d), (2, kv_heads, lk, d), (2, kv_heads, lk, d))
    return tuple(torch.empty(shape, device=NAME, dtype=dtype, requires_grad=grad) for shape in shapes)


@pytest.mark.parametrize(
    ("card", "dtype", "changes", "options", "kernel"),
    [
        (A100, BF16, {}, {}, "flash"),
        (A100, FP16, {"d": 36}, {}, "flash"),
        (A100, FP16, {"d": 256}, {}, "flash"),
        (A100, FP16, {"d": 320}, {}, "efficient"),
        (A100, FP16, {"d": 260}, {}, "math"),
        (A100, FP16, {"lk": 77}, {"is_causal": True}, "efficient"),
        (A100, FP16, {"lk": 77}, {}, "flash"),
        (A100, FP16, {}, {"dropout_p": 0.1}, "flash"),
        (A100, BF16, {}, {"attn_mask": torch.bool}, "efficient"),
        (A100, FP32, {}, {}, "efficient"),
        (A100, FP32, {"d": 30}, {}, "math"),
        (A100, FP32, {}, {"attn_mask": FP32}, "efficient"),
        (A100, torch.float64, {}, {}, "math"),
        (A100, BF16, {"kv_heads": 2}, {"enable_gqa": True}, "flash"),
        (A100, FP32, {"kv_heads": 2}, {"enable_gqa": True}, "math"),
        (A100, FP32, {}, {"enable_gqa": True}, "efficient"),
        (A100, BF16, {"kv_heads": 2}, {"enable_gqa": True, "attn_mask": BF16}, "math"),
        (T4, FP16, {}, {}, "efficient"),
        (T4, BF16, {}, {}, "math"),
        (T4, FP32, {"d": 30}, {}, "efficient"),
        (L40S, FP16, {"d": 192}, {}, "flash"),
        (L40S, FP16, {"d": 200}, {}, "efficient"),
        (L40S, FP16, {"d": 200, "grad": False}, {}, "flash"),
        (L40S, FP16, {"d": 256}, {}, "flash"),
        (L40S, FP16, {"d": 256}, {"dropout_p": 0.1}, "efficient"),
        (RTX5090, FP16, {"d": 200}, {}, "efficient"),
        (H100, BF16, {}, {}, "cudnn"),
        (H100, BF16, {}, {"attn_mask": torch.bool}, "cudnn"),
        (H100, BF16, {}, {"dropout_p": 0.1}, "flash"),
        (H100, BF16, {"d": 36}, {}, "flash"),
        (H100, BF16, {"d": 256}, {}, "flash"),
        (H100, FP32, {}, {}, "efficient"),
        (H100_OLD_CUDNN, BF16, {}, {}, "flash"),
    ],
)
def test_choice(card, dtype, changes, options, kernel):
    with virtual_gpu(card):
        q, k, v = inputs(dtype, **changes)
        if "attn_mask" in options:
            mask = torch.empty(2, 1, 1024, 1024, device=NAME, dtype=options["attn_mask"])
            options = options | {"attn_mask": mask}
        assert choose(card, q, k, v, **options) == kernel
        assert F.scaled_dot_product_attention(q, k, v, **options).shape == (*q.shape[:3], v.shape[3])


def test_kernels_may_be_forbidden(gpu):
    q, k, v = inputs(BF16)
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(A100, q, k, v) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose(A100, q, k, v) == "efficient"


def test_cudnn_can_be_deprioritized(gpu, monkeypatch):
    q, k, v = inputs(BF16)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(H100, q, k, v) == "flash"


def kept(card, dtype, mask=None, **changes):
    """(bytes saved for backward, bytes alive after the forward that were not before), without the random state's."""
    saved = {}

    def pack(tensor):
        if tensor.device.type == "cuda":
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with virtual_gpu(card) as gpu:
        q, k, v = inputs(dtype, **changes)
        attn_mask = mask and torch.empty(1, 1, 1024, 1024, device=NAME, dtype=mask)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), MinimalTracer(gpu) as tracer:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask)
        assert out.requires_grad is q.requires_grad
        small = sum(nbytes for nbytes in saved.values() if nbytes < 64)
        return sum(saved.values()) - small, tracer.live - tracer.live % 64


SIZE = 2 * 8 * 1024 * 64
LSE = 2 * 8 * 1024 * 4


@pytest.mark.parametrize(
    ("card", "dtype", "options", "saved", "grown"),
    [
        (A100, BF16, {}, 4 * 2 * SIZE + LSE, 2 * SIZE + LSE),
        (H100, BF16, {}, 4 * 2 * SIZE + LSE, 2 * SIZE + LSE),
        (T4, FP16, {}, 4 * 2 * SIZE + LSE, 2 * SIZE + LSE),
        (A100, FP32, {}, 4 * 4 * SIZE + LSE, 4 * SIZE + LSE),
        (A100, FP16, {"mask": torch.bool}, 4 * 2 * SIZE + LSE + 2 * MIB, 2 * SIZE + LSE + 2 * MIB),
        (A100, FP16, {"d": 36}, 4 * 2 * SIZE * 40 // 64 + LSE, 4 * 2 * SIZE * 40 // 64 + LSE),
        (A100, FP16, {"d": 320}, 4 * 2 * SIZE * 5 + LSE, 2 * SIZE * 5 + LSE),
        (A100, BF16, {"grad": False}, 0, 2 * SIZE),
    ],
)
def test_what_is_kept(no_gc, card, dtype, options, saved, grown):
    """q, k, v, the output and a number per row; nothing of the size L x L."""
    assert kept(card, dtype, **options) == (saved, grown)


def test_math_keeps_the_attention_matrix(no_gc):
    saved, grown = kept(A100, FP32, d=30)
    assert saved > 2 * 8 * 1024 * 1024 * 4
    assert grown > 2 * 8 * 1024 * 1024 * 4


def test_masks_are_padded_to_8_elements(gpu, no_gc):
    q, k, v = (torch.empty(2, 8, 77, 64, device=NAME, dtype=FP16) for _ in range(3))
    mask = torch.empty(2, 1, 77, 77, device=NAME, dtype=FP16)
    with MinimalTracer(gpu) as tracer:
        F.scaled_dot_product_attention(q, k, v, mask)
    assert 2 * 77 * 80 * 2 in tracer.events


def test_inference_mode_takes_the_same_kernel(gpu):
    q, k, v = inputs(BF16, grad=False)
    with MinimalTracer(gpu) as tracer, torch.inference_mode():
        F.scaled_dot_product_attention(q, k, v)
    assert tracer.ops == ["aten._scaled_dot_product_flash_attention.default"]


def test_backward_runs(gpu):
    for dtype, changes in ((BF16, {}), (FP32, {}), (FP32, {"d": 30}), (FP16, {"d": 36})):
        q, k, v = inputs(dtype, **changes)
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        assert q.grad.shape == q.shape
