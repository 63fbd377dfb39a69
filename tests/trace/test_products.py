"""The backward of products allocates in a trace what the allocator sees in real runs."""

import pytest
import torch
from torch.autograd import forward_ad

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.trace import products
from tests.trace.test_autograd_formulas import large, leaf, of_trace
from tests.trace.test_gradient_accumulation import of_real_run


class ProductCase:
    def of_all():
        leaf().prod().backward()

    def along_a_dimension():
        leaf().prod(1).sum().backward()

    def with_the_dimension_kept():
        torch.prod(leaf(), 0, keepdim=True).sum().backward()

    def cumulative():
        leaf().cumprod(1).sum().backward()

    def transmittance():
        opaque = leaf().sigmoid()
        seen = torch.cumprod(1 - opaque, dim=-1)
        (torch.cat([torch.ones_like(seen[:, :1]), seen[:, :-1]], 1) * opaque).sum().backward()

    def gradient_penalty():
        x = leaf()
        (grad,) = torch.autograd.grad(x.cumprod(1).sum(), x, create_graph=True)
        grad.square().sum().backward()

    def without_gradients():
        with torch.no_grad():
            leaf().cumprod(1).prod(0)


CASES = {name: case for name, case in vars(ProductCase).items() if callable(case) and name[0] != "_"}


def as_the_formula_says(real):
    """Without the mask in 8-byte integers, which is memory within one operator."""
    return [nbytes for nbytes in real if nbytes != 48 * 32 * 8]


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_products_allocate_what_they_do_in_a_real_run(name, enter, monkeypatch):
    real = as_the_formula_says(large(of_real_run(CASES[name])))
    assert large(of_trace(enter, CASES[name])) == real

    monkeypatch.setattr(products, "_has_formula_for_zeros", lambda factors: False)
    assert (large(of_trace(enter, CASES[name])) == real) is (name == "without_gradients")


@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_products_are_torchs_own_in_transforms_and_forward_mode(name):
    def run():
        x = leaf()
        torch.func.vmap(lambda row: getattr(x, name)(0) * row)(torch.ones(3, 32))
        torch.func.jvp(lambda y: getattr(y, name)(1), (x,), (torch.ones_like(x),))
        torch.func.grad(lambda y: getattr(y, name)(1).sum())(x)
        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(getattr(forward_ad.make_dual(x, torch.ones_like(x)), name)(1)).tangent.shape

    of_trace(virtual_cpu, run)


def test_functions_of_torch_are_put_back():
    before = torch.prod, torch.cumprod, torch.Tensor.prod, torch.Tensor.cumprod
    of_trace(virtual_cpu, ProductCase.cumulative)
    assert (torch.prod, torch.cumprod, torch.Tensor.prod, torch.Tensor.cumprod) == before
    assert "prod" not in vars(torch.Tensor)
