import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.device.virtual import workspace
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.card_scratch import card_scratch
from tests.device.minimal_tracer import MinimalTracer

V100, T4, A100, H100 = (CardRules(compute_capability=cc) for cc in ((7, 0), (7, 5), (8, 0), (9, 0)))


class ScratchTracer(MinimalTracer):
    """Collects (operator, blocks) of everything that takes scratch."""

    def __init__(self, virtual, card):
        super().__init__(virtual)
        self.card, self.found = card, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        blocks = workspace.scratch(self.card, func, args)
        if blocks:
            self.found.append(blocks)
        return super().__torch_dispatch__(func, types, args, kwargs)


def found(gpu, run, card=A100):
    with ScratchTracer(gpu, card) as tracer:
        run()
    return tracer.found


def test_cublas(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert workspace.cublas_workspace(A100) == workspace.cublas_workspace(T4) == 8_519_680
    assert workspace.cublas_workspace(H100) == 32 * 2**20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert workspace.cublas_workspace(H100) == 32 * 2**20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:4096:2")
    assert workspace.cublas_workspace(A100) == (16 * 8 + 4096 * 2) * 1024


X, WEIGHT, OUT = 2 * 8 * 16 * 16, 4 * 8 * 3 * 3, 2 * 4 * 16 * 16


@pytest.mark.parametrize(
    ("change", "card", "blocks"),
    [
        ({}, A100, [(4 * (X + WEIGHT + OUT),) * 2]),
        ({"leaf": False}, A100, [(4 * (X + WEIGHT + OUT),)]),
        ({"dtype": torch.float16}, A100, [(2 * (X + WEIGHT + OUT),) * 2]),
        ({"dtype": torch.float16}, T4, [(2 * (X + WEIGHT + OUT),) * 2]),
        ({}, T4, []),
        ({"kernel_size": 1, "padding": 0}, A100, []),
        ({"groups": 8, "out_channels": 8}, A100, []),
        ({"groups": 2}, A100, [(4 * (X + WEIGHT // 2 + OUT),) * 2]),
        ({"memory_format": torch.channels_last}, A100, []),
    ],
)
def test_convolutions_backward(gpu, change, card, blocks):
    options = {"in_channels": 8, "out_channels": 4, "kernel_size": 3, "padding": 1}
    options |= {name: value for name, value in change.items() if name not in ("leaf", "dtype", "memory_format")}
    dtype = change.get("dtype", torch.float32)
    net = nn.Conv2d(**options, device="cuda", dtype=dtype)
    x = torch.ones(2, 8, 16, 16, device="cuda", dtype=dtype)
    if "memory_format" in change:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_(change.get("leaf", True))
    grad = torch.ones_like(net(x))
    assert found(gpu, lambda: net(x).backward(grad), card) == blocks


def test_convolution_without_tf32(gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.ones(2, 8, 16, 16, device="cuda")
    net = nn.Conv2d(8, 4, 3, padding=1).cuda()
    grad = torch.ones_like(net(x))
    assert found(gpu, lambda: net(x).backward(grad)) == []


def attention(dtype, heads=8, kv_heads=8, lq=1000, d=64):
    q = torch.empty(2, heads, lq, d, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.empty(2, kv_heads, lq, d, device="cuda", dtype=dtype) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads).backward(torch.ones_like(q))


def test_flash_backward(gpu):
    """Rows are padded to 128: 1000 -> 1024; head 80 -> 96."""
    rows = 2 * 8 * 1024
    assert found(gpu, attention(torch.bfloat16)) == [(rows * 4 + rows * 64 * 4,)]
    assert found(gpu, attention(torch.bfloat16, d=80)) == [(rows * 4 + rows * 96 * 4,)]
    assert found(gpu, attention(torch.bfloat16, kv_heads=2)) == [
        (rows * 4 + rows * 64 * 4 + 2 * 2 * 1000 * 8 * 64 * 2,)
    ]


def test_flash_forward_splits_keys_over_idle_multiprocessors(gpu):
    """1 x 8 x 4 blocks on 216 slots, 4 blocks of keys: 4 splits fill 128 of them."""
    q = torch.empty(1, 8, 256, 64, device="cuda", dtype=torch.float16)
    k = torch.empty(1, 8, 1024, 64, device="cuda", dtype=torch.float16)
    assert card_scratch(A100, workspace.flash_forward_call(q, k, 0.0)) == 4 * 8 * 256 * 65 * 4
    assert workspace.flash_forward_call(q, k, 0.1) == ""
    full = torch.empty(16, 8, 256, 64, device="cuda", dtype=torch.float16)
    assert card_scratch(A100, workspace.flash_forward_call(full, k, 0.0)) == 0


def test_efficient_backward(gpu):
    per_row = 2 * 8 * 1000 * 4
    assert found(gpu, attention(torch.float32)) == [(2 * 8 * 1000 * 64 * 4 + per_row,)]
    half = (torch.empty(2, 8, 1000, 64, device="cuda", dtype=torch.float16),) * 3
    call = workspace.efficient_backward_call(*half)
    assert card_scratch(T4, call) == per_row + 2 * 8 * 16 * (64 * 64 * 4 + 16)
    assert card_scratch(V100, call) == per_row + 2 * 8 * 1000 * 64 * 4


def test_convolutions_copy_what_has_another_layout(gpu):
    """Plain weights, channels-last input: the weight is copied; backward copies the gradient of another layout."""
    net = nn.Conv2d(8, 4, 3, padding=1).cuda()
    x = torch.ones(2, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    plain = torch.ones(2, 4, 16, 16, device="cuda")
    assert found(gpu, lambda: net(x).backward(plain)) == [(4 * WEIGHT,), (4 * (WEIGHT + OUT),)]
    line = nn.Conv1d(8, 8, 7, padding=3, groups=8).cuda()
    rows = torch.ones(2, 100, 8, device="cuda")
    grad = torch.ones(2, 8, 100, device="cuda")
    assert found(gpu, lambda: line(rows.transpose(1, 2)).backward(grad)) == [(4 * rows.numel(),)] * 2


def test_copies_for_rows_and_matrices(gpu):
    x = torch.ones(6, 8, 10, device="cuda")
    columns = x.transpose(1, 2)
    assert found(gpu, lambda: columns.softmax(-1)) == [(4 * 480,)]
    assert found(gpu, lambda: x.softmax(-1)) == []
    assert found(gpu, lambda: F.layer_norm(columns, (8,))) == [(4 * 480,)]
    assert found(gpu, lambda: torch.bmm(columns, x)) == []
    assert found(gpu, lambda: torch.bmm(x[:, :, ::2], x[:, :5])) == [(4 * 240,)]
    assert found(gpu, lambda: torch.mm(x[0].t(), x[0])) == []
    assert found(gpu, lambda: torch.mm(x[0, :, :5], x[0, :5])) == []
