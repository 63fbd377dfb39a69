"""Views, pointwise and structured operators on the virtual device against real ones: shape, stride, offset, type,
aliasing."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit.device.virtual import meta_kernels
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu

CALLS = {
    "view of a dimension of one": lambda a, b: a.transpose(0, 1)[:, :1].transpose(0, 2).view(4, 1, 1, 3),
    "view": lambda a, b: a.view(3, 8),
    "reshape that copies": lambda a, b: a.transpose(0, 2).reshape(-1),
    "transpose, then a slice": lambda a, b: a.transpose(0, 2)[1:, ::2],
    "expand": lambda a, b: b.expand(2, 3, 4),
    "split": lambda a, b: a.split([1, 2], dim=1),
    "unbind": lambda a, b: a.unbind(2),
    "select": lambda a, b: a[1, :, 2],
    "detach": lambda a, b: a.detach(),
    "as_strided": lambda a, b: a.as_strided((2, 2), (4, 2), 3),
    "broadcast product": lambda a, b: a * b,
    "product of permuted tensors": lambda a, b: a.permute(2, 0, 1) * a.permute(2, 0, 1),
    "sum with an integer tensor": lambda a, b: a.half() + b.long(),
    "quotient by a number": lambda a, b: a.bfloat16() / 3.0,
    "product with a 0-dimensional double": lambda a, b: a * torch.tensor(2.0, dtype=torch.float64),
    "comparison": lambda a, b: a > b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "clone": lambda a, b: a.transpose(0, 1).clone(),
    "contiguous": lambda a, b: a.transpose(0, 1).contiguous(),
    "gelu": lambda a, b: torch.nn.functional.gelu(a),
    "add_": lambda a, b: a.add_(b),
    "add_ to a view": lambda a, b: a[0].add_(b),
    "uniform_": lambda a, b: a.uniform_(),
    "masked_fill_": lambda a, b: a.masked_fill_(a > 0, 1.0),
    "to half of a permuted tensor": lambda a, b: a.permute(2, 0, 1).half(),
    "to half of every second": lambda a, b: a[:, ::2].half(),
    "matrix product": lambda a, b: a.view(6, 4) @ a.view(6, 4).t(),
    "batched matrix product": lambda a, b: torch.bmm(a, a.transpose(1, 2)),
    "matrix product onto a vector": lambda a, b: torch.addmm(b, a.view(6, 4), a.view(6, 4)[:4]),
    "sum over dimensions": lambda a, b: a.permute(2, 0, 1).sum((0, 2)),
    "sum of all": lambda a, b: a.half().sum(),
    "mean that keeps dimensions": lambda a, b: a.mean(-1, keepdim=True),
    "norm": lambda a, b: torch.linalg.vector_norm(a, dim=1),
    "cat": lambda a, b: torch.cat([a, b.expand(2, 1, 4)], 1),
    "cat of permuted tensors": lambda a, b: torch.cat([a.permute(2, 0, 1)] * 2, 2),
    "softmax": lambda a, b: torch.softmax(a, 1),
    "log_softmax of half": lambda a, b: torch.log_softmax(a.half(), -1, dtype=torch.float32),
    "cumsum": lambda a, b: a.cumsum(1),
    "argmax": lambda a, b: a.argmax(-1),
    "topk": lambda a, b: a.topk(2),
    "sort": lambda a, b: a.transpose(0, 2).sort(dim=0),
    "gather": lambda a, b: a.gather(2, torch.zeros(2, 3, 2, dtype=torch.long, device=a.device)),
    "index_add": lambda a, b: a.index_add(0, torch.zeros(2, dtype=torch.long, device=a.device), a),
    "indices": lambda a, b: a[torch.zeros(5, dtype=torch.long, device=a.device)],
    "singular vectors": lambda a, b: torch.linalg.svd(torch.zeros(3, 5, 4, device=a.device)),
    "triu": lambda a, b: a.triu(),
    "pooling of channels last": lambda a, b: torch.nn.functional.max_pool2d(
        torch.zeros(2, 3, 8, 8, device=a.device).to(memory_format=torch.channels_last), 3, 2, 1
    ),
    "mean pooling": lambda a, b: torch.nn.functional.avg_pool2d(torch.zeros(2, 3, 8, 8, device=a.device), 2),
    "bilinear upsampling of channels last": lambda a, b: torch.nn.functional.interpolate(
        torch.zeros(2, 3, 4, 4, device=a.device).to(memory_format=torch.channels_last), scale_factor=2, mode="bilinear"
    ),
    "like a permuted tensor": lambda a, b: [
        make(a.permute(2, 0, 1)) for make in (torch.empty_like, torch.zeros_like, torch.ones_like)
    ],
    "like every second": lambda a, b: [torch.zeros_like(a[:, ::2]), torch.full_like(a[:, ::2], 2, dtype=torch.half)],
    "like, contiguous": lambda a, b: torch.zeros_like(a.permute(2, 0, 1), memory_format=torch.contiguous_format),
    "square roots of a list": lambda a, b: torch._foreach_sqrt([a, b, a.permute(2, 0, 1), a[:, ::2], b[:0]]),
    "square roots of whole numbers": lambda a, b: torch._foreach_sqrt([a.long(), b.half()]),
    "norms of a list": lambda a, b: torch._foreach_norm([a, b.half(), a[0]], 2),
    "products of two lists": lambda a, b: torch._foreach_mul([a.permute(2, 0, 1), b], [a.permute(2, 0, 1), b]),
    "a list times a number": lambda a, b: torch._foreach_mul([a, b.half()], 2.0),
    "a list times a tensor": lambda a, b: torch._foreach_mul([a, b.half()], b[0]),
    "a list of quotients": lambda a, b: torch._foreach_addcdiv([a], [a], [a], 0.5),
    "copy to a device": lambda a, b: a.permute(2, 0, 1).cpu().to(a.device, copy=True),
    "copy of every second to a device, as half": lambda a, b: a[:, ::2].cpu().to(a.device, torch.half, copy=True),
    "copy to a device in channels last": lambda a, b: (
        a.view(1, 2, 3, 4).cpu().to(a.device, memory_format=torch.channels_last, copy=True)
    ),
    "view_as_complex": lambda a, b: torch.view_as_complex(a.view(2, 3, 2, 2)).conj(),
}


def described(call, device):
    a = torch.zeros(2, 3, 4, device=device)
    b = torch.zeros(4, device=device)
    return [
        (
            tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out is a, out.is_conj(),
            out.untyped_storage().nbytes(),
            [out.untyped_storage()._cdata == item.untyped_storage()._cdata for item in (a, b)],
        )
        for out in tree_leaves(call(a, b))
    ]  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_outputs_are_those_of_a_real_run(call):
    expected = described(call, "cpu")
    with virtual_cpu() as virtual:
        assert described(call, virtual.device) == expected


def test_views_pointwise_and_structured_operators_are_run_by_torchs_kernels(monkeypatch):
    asked = []
    run = meta_kernels.run
    monkeypatch.setattr(meta_kernels, "run", lambda func, *rest: asked.append((func, run(func, *rest))) or asked[-1][1])
    with virtual_cpu() as virtual:
        x = torch.zeros(2, 37, 11, device=virtual.device)
        x.view(74, 11).mul(x.view(74, 11)).uniform_()
        x.view(74, 11).cumsum(0).sum(0).half()
    handled = {str(func): out for func, out in asked if isinstance(out, Tensor)}
    assert handled.keys() == {
        "aten.view.default", "aten.mul.Tensor", "aten.uniform_.default", "aten.cumsum.default", "aten.sum.dim_IntList",
        "aten._to_copy.default",
    }  # fmt: skip


def test_shapes_that_do_not_broadcast_are_refused():
    with virtual_cpu() as virtual, pytest.raises(RuntimeError, match="broadcast"):
        torch.zeros(3, 5, device=virtual.device) + torch.zeros(4, device=virtual.device)


def test_tensors_of_two_devices_are_refused(gpu):
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device="cuda") + torch.zeros(3, device="cpu")


def test_out_arguments_without_a_kernel_for_meta_tensors_are_given_back(gpu):
    """What inductor calls for a compiled Float8 layer: its output is allocated before."""
    rows, columns = (torch.empty(32, 16, device=gpu.device, dtype=torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.ones(32, 1, device=gpu.device), torch.ones(1, 32, device=gpu.device)]
    out = torch.empty(32, 32, device=gpu.device, dtype=torch.bfloat16)
    given = torch.ops.aten._scaled_mm.out(rows, columns.t(), *scales, out_dtype=torch.bfloat16, out=out)
    assert given is out
    assert (out.shape, out.dtype, out.fake_device.type) == ((32, 32), torch.bfloat16, gpu.device.type)


def test_an_out_argument_whose_size_data_tell_is_not_taken_for_the_result():
    assert not meta_kernels.outs_without_kernel(torch.ops.aten.masked_select.out)


QUANTIZED = {
    "of a tensor": lambda x, scale, zero: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "by a tensor": lambda x, scale, zero: torch.fake_quantize_per_tensor_affine(
        x, scale[0].detach(), zero[0].int(), -128, 127
    ),
    "by channel": lambda x, scale, zero: torch.fake_quantize_per_channel_affine(
        x, scale.detach(), zero.int(), 1, -8, 7
    ),
    "learnt": lambda x, scale, zero: torch._fake_quantize_learnable_per_tensor_affine(
        x, scale[:1], zero[:1], -128, 127, 0.1
    ),
    "learnt by channel": lambda x, scale, zero: torch._fake_quantize_learnable_per_channel_affine(
        x, scale, zero, 1, -8, 7, 0.1
    ),
}


def _quantized(name, device):
    """What a quantization that is trained through gives, and the gradients."""
    x = torch.ones(6, 4, 5, device=device).transpose(0, 2).requires_grad_()
    scale = torch.full((4,), 0.1, device=device, requires_grad=True)
    zero = torch.zeros(4, device=device, requires_grad=True)
    out = QUANTIZED[name](x, scale, zero)
    out.sum().backward()
    return [out, *(each.grad for each in (x, scale, zero) if each.grad is not None)]


WITHOUT_KERNELS = {
    "Gamma": lambda x: torch.distributions.Gamma(x.contiguous(), 1.0).rsample(),
    "Dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "Binomial": lambda x: torch.distributions.Binomial(3, probs=x.detach()).sample() * x,
    "multi_margin_loss": lambda x: torch.nn.functional.multi_margin_loss(
        x[0], torch.zeros(len(x[0]), dtype=torch.long, device=x.device)
    ),
    "multilabel_margin_loss": lambda x: torch.nn.functional.multilabel_margin_loss(
        x[0], torch.zeros(x[0].shape, dtype=torch.long, device=x.device)
    ),
    "fractional_max_pool3d": lambda x: torch.nn.functional.fractional_max_pool3d(
        x[None, None], 2, output_size=2, _random_samples=torch.full((1, 1, 3), 0.5, device=x.device)
    ),
}


def _gradient(name, device):
    """What an operator gives, and the gradient of its input."""
    x = torch.full((4, 5, 6), 0.5, device=device).transpose(0, 2).requires_grad_()
    out = WITHOUT_KERNELS[name](x)
    return [out, *torch.autograd.grad(out.sum(), x)]


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("make", "name"), [*((_quantized, name) for name in QUANTIZED), *((_gradient, name) for name in WITHOUT_KERNELS)]
)
def test_operators_without_shapes_for_meta_tensors_have_those_of_a_real_run(make, name, enter):
    def kinds(device):
        return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in make(name, device)]

    real = kinds("cpu")
    with enter() as virtual:
        assert kinds(virtual.device) == real


def _windows(device):
    """Bytes of the storages of windows, and of what is folded of them, as forwards and backwards make them."""
    x = torch.ones(2, 3, 8, 8, device=device, requires_grad=True)
    windows = torch.nn.functional.unfold(x, 3, stride=2)
    few = torch.nn.functional.unfold(x, 2, stride=4)
    folded = torch.nn.functional.fold(windows, (8, 8), 3, stride=2)
    gradients = torch.autograd.grad(folded.square().sum() + few.square().sum(), [windows, few, x])
    return [tensor.untyped_storage().nbytes() for tensor in (windows, few, folded, *gradients)]


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_folds_keep_the_storage_that_they_are_made_in(enter):
    real = _windows("cpu")
    with enter() as virtual:
        assert _windows(virtual.device) == real
