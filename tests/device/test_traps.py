"""Each of these traps changes a number, or fails, where its cure is removed; each test removes it."""

import copy
import weakref

import pytest
import torch
import torch._meta_registrations
import torch.optim.optimizer as optimizers
import torch.utils._foreach_utils
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.apply.build_nets import move_as_fakes
from memfit.device.virtual import cuda_kernels, fake_mode, redirect, virtual_device
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.fake_mode import VirtualMode
from memfit.device.virtual.virtual_device import virtual_gpu
from memfit.installation import release_number
from memfit.torch_compat.operators import has_operator
from tests.device.minimal_tracer import MinimalTracer

PLAIN_CONVOLUTIONS = torch._C._conv_determine_backend_memory_format
WITHOUT_OUR_HINT = torch._meta_registrations.device_hint


@pytest.mark.parametrize("cures", [("mode", "redirect"), ("mode",), ("redirect",), ()])
def test_tensor_of_data_needs_no_device(monkeypatch, no_memory, cures):
    """The mode cures it in the thread that enters it, the redirect in every other one too."""
    if "mode" not in cures:
        monkeypatch.setattr(VirtualMode, "avoid_device_init", False)
    if "redirect" not in cures:
        monkeypatch.delitem(redirect.INSTEAD, torch.tensor)
    with virtual_gpu(CardRules()) as gpu:
        if cures:
            assert torch.tensor([1.0, 2.0], device=gpu.device).device.type == "cuda"
        else:
            with pytest.raises(NotImplementedError, match="empty_strided"):
                torch.tensor([1.0, 2.0], device=gpu.device)


def test_module_moves_in_place(gpu):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    before = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.to(gpu.device).half()
    assert net[0].weight is net[1].weight is before is optimizer.param_groups[0]["params"][0]
    assert (before.device.type, before.dtype) == ("cuda", torch.float16)


def test_module_does_not_move_where_weak_references_are_seen(gpu, monkeypatch, no_memory):
    monkeypatch.setattr(torch.utils, "weakref", weakref)
    net = nn.Linear(4, 4)
    reference = weakref.ref(net.weight)
    with pytest.raises(RuntimeError, match="swap"):
        net.to(gpu.device)
    assert reference() is net.weight


def test_mode_keeps_no_weak_reference(gpu):
    assert weakref.getweakrefs(nn.Linear(5, 7, device=gpu.device).weight) == []


@pytest.mark.parametrize("cured", [True, False])
def test_deep_copy_stays_in_its_mode(gpu, monkeypatch, cured):
    if not cured:
        monkeypatch.delattr(VirtualMode, "__deepcopy__")
    net = nn.BatchNorm1d(4, device=gpu.device)
    same = copy.deepcopy(net).running_mean.fake_mode is net.running_mean.fake_mode
    assert same is cured


@pytest.mark.parametrize("cured", [True, False])
def test_optimizers_take_foreach(gpu, no_gc, cured):
    """8 equal layers of 16 KiB: AdamW's temporaries are all parameters at once, not three of them."""
    net = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8)).to(gpu.device)
    with MinimalTracer(gpu) as tracer:
        for parameter in net.parameters():
            parameter.data = torch.empty_like(parameter)
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.step()
        if not cured:
            for supported in (optimizers._foreach_supported_types, torch.utils._foreach_utils._foreach_supported_types):
                supported.remove(FakeTensor)
        tracer.peak = start = tracer.live
        optimizer.step()
    assert tracer.peak - start == (8 if cured else 3) * 64 * 64 * 4


@pytest.mark.parametrize("cured", [True, False])
def test_meta_kernels_take_cudas_branch(gpu, monkeypatch, no_memory, cured):
    """cuSOLVER gives V of an SVD row by row, LAPACK column by column."""
    if not cured:
        monkeypatch.setattr(torch._meta_registrations, "device_hint", WITHOUT_OUR_HINT)
    v = torch.linalg.svd(torch.empty(3, 5, 4, device=gpu.device))[2]
    assert v.stride() == ((16, 4, 1) if cured else (16, 1, 4))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("cured", [True, False])
def test_tied_weights_that_were_real_are_counted_once(no_gc, cured):
    net = Tied()
    with virtual_gpu(CardRules()) as gpu:
        with MinimalTracer(gpu) as tracer:
            if cured:
                move_as_fakes([net], gpu.device)
            net.to(gpu.device)
            assert tracer.live == (1 if cured else 2) * 100 * 16 * 4
        assert (net.head.weight is net.embedding.weight) is cured


@pytest.mark.parametrize("cured", [True, False])
def test_resized_storages_are_seen(gpu, no_gc, cured):
    with MinimalTracer(gpu) as tracer:
        weight = torch.empty(1000, device=gpu.device)
        if not cured:
            gpu.on_resize.clear()
        weight.untyped_storage().resize_(0)
        assert tracer.live == (0 if cured else 4000)
        gpu.on_resize[:] = [tracer.resized]
        weight.untyped_storage().resize_(4000)
        assert tracer.live == 4000


def grow_in_backward(gpu, function, count):
    """Bytes above what is alive before a backward, at its peak."""
    with MinimalTracer(gpu) as tracer:
        x = torch.ones(count, device=gpu.device, requires_grad=True)
        y = function(x)
        grad = torch.ones_like(y)
        tracer.peak = start = tracer.live
        y.backward(grad)
    return tracer.peak - start


@pytest.mark.parametrize("cured", [True, False])
@pytest.mark.parametrize("function", [nn.functional.silu, nn.functional.mish])
def test_derivatives_that_are_one_kernel_on_cuda(monkeypatch, no_memory, no_gc, function, cured):
    """A backend without kernels of its own gets them in steps, with temporaries."""
    if not cured:
        monkeypatch.setattr(cuda_kernels, "FUSED_ON_CUDA", ())
    with virtual_gpu(CardRules()) as gpu:
        grown = grow_in_backward(gpu, function, 1000)
    assert grown == 4000 if cured else grown >= 12000


@pytest.mark.parametrize("cured", [True, False])
def test_rms_norm_keeps_its_input_and_a_number_per_row(monkeypatch, cured):
    if not cured:
        monkeypatch.setattr(cuda_kernels, "FUSED_ON_CUDA", ())
    with virtual_gpu(CardRules()) as gpu:
        x = torch.ones(4, 256, device=gpu.device, requires_grad=True)
        weight = torch.ones(256, device=gpu.device, requires_grad=True)
        saved = {}

        def pack(tensor):
            saved[tensor.untyped_storage()._cdata] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = nn.functional.rms_norm(x, (256,), weight)
    assert y.shape == (4, 256)
    kept = sum(saved.values())
    fused = cured and has_operator("_fused_rms_norm_backward.default")
    assert kept == 4 * 256 + 256 + 4 if fused else kept > 2 * 4 * 256


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"), [(nn.LSTM, {}), (nn.LSTM, {"proj_size": 4}), (nn.GRU, {}), (nn.RNN, {"dropout": 0.1})]
)
def test_recurrent_nets_run(gpu, kind, options, bias):
    net = kind(6, 8, num_layers=2, bias=bias, batch_first=True, bidirectional=True, **options).to(gpu.device)
    out, _ = net(torch.ones(3, 5, 6, device=gpu.device))
    assert out.shape == (3, 5, 2 * options.get("proj_size", 8))
    out.sum().backward()
    assert all(p.grad.shape == p.shape for p in net.parameters())


@pytest.mark.parametrize("cured", [True, False])
def test_convolutions_keep_channels_last(monkeypatch, no_memory, cured):
    """cuDNN runs channels last where the input or the weight is; another layout's weight gets its gradient cloned."""
    with virtual_gpu(CardRules()) as gpu:
        if not cured:
            monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", PLAIN_CONVOLUTIONS)
        net = nn.Conv2d(4, 8, 3, padding=1, device=gpu.device)
        x = torch.ones(2, 4, 8, 8, device=gpu.device).to(memory_format=torch.channels_last)
        y = net(x)
        assert y.is_contiguous(memory_format=torch.channels_last) is cured
        with MinimalTracer(gpu) as tracer:
            y.sum().backward()
        assert ("aten.new_empty_strided.default" in tracer.ops) is cured
        assert net.weight.grad.is_contiguous()
        if not cured:
            monkeypatch.undo()


@pytest.mark.parametrize("cured", [True, False])
def test_log_sigmoid_keeps_no_buffer(monkeypatch, no_memory, cured):
    if not cured:
        monkeypatch.setattr(fake_mode, "cuda_outputs", lambda func, args, out: out)
    with virtual_gpu(CardRules()) as gpu:
        buffer = torch.ops.aten.log_sigmoid_forward(torch.ones(100, device=gpu.device))[1]
        assert buffer.numel() == (0 if cured else 100)


@pytest.mark.parametrize("cured", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_group_norm_copies_channels_last(monkeypatch, no_gc, inference, cured):
    if not cured:
        monkeypatch.setattr(cuda_kernels, "COMPOSITES", {})
        monkeypatch.setattr(virtual_device, "COMPOSITES", {})
    with virtual_gpu(CardRules()) as gpu:
        x = torch.ones(2, 8, 4, 4, device=gpu.device).to(memory_format=torch.channels_last)
        net = nn.GroupNorm(2, 8, device=gpu.device)
        with torch.inference_mode(inference), MinimalTracer(gpu) as tracer:
            y = net(x)
        assert ("aten.clone.default" in tracer.ops) is cured
        assert y.is_contiguous() is (cured or release_number(torch.__version__) == (2, 14))
