"""Parameters of a class of their own, and operators of libraries, as bitsandbytes has them."""

import pytest
import torch
from torch import nn

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError


@torch.library.custom_op("memfit_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() // 2, dtype=torch.uint8, device=x.device)


@halved.register_fake
def _(x):
    return torch.empty(x.numel() // 2, dtype=torch.uint8, device=x.device)


@torch.library.custom_op("memfit_tests::outliers", mutates_args=())
def outliers(x: torch.Tensor) -> torch.Tensor:
    return x[x > 1]


@outliers.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


class Packed(nn.Parameter):
    """Quantizes itself where it is moved."""

    def __new__(cls, data=None, requires_grad=False, scale=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.scale = scale
        return self

    def to(self, *args, **kwargs):
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or self.scale is not None:
            return Packed(super().to(*args, **kwargs), scale=self.scale)
        moved = self.data.to(device)
        self.data = halved(moved)
        self.scale = moved.abs().max()
        return self


def net():
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = Packed(layer.weight.data)
    return nn.Sequential(layer)


@pytest.mark.parametrize("made_on", ["cpu", "device"])
@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())])
def test_a_parameter_keeps_its_class_and_quantizes(enter, made_on):
    with enter() as virtual:
        with torch.device("cpu" if made_on == "cpu" else virtual.device):
            layers = net()
        weight = layers.to(virtual.device)[0].weight
        assert type(weight).__name__ == "Packed"
        assert isinstance(weight, Packed)
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((16,), torch.uint8, False)
        assert weight.fake_device.type == weight.scale.fake_device.type == virtual.device.type


def test_data_of_another_device_keeps_the_parameter():
    with virtual_gpu(CardRules()):
        weight = nn.Parameter(torch.ones(3))
        before = id(weight)
        weight.data = weight.data.cuda()
        assert (id(weight), weight.device.type, weight.requires_grad) == (before, "cuda", True)
        assert isinstance(weight, nn.Parameter)
        (weight * 2).sum().backward()
        assert weight.grad.fake_device.type == NAME


def test_shapes_that_depend_on_data_are_refused():
    with (
        virtual_gpu(CardRules()),
        pytest.raises(InputError, match=r"memfit_tests\.outliers.*depend on what its inputs"),
    ):
        outliers(torch.ones(3, device="cuda"))


def test_a_library_for_cuda_finds_the_current_stream():
    with virtual_gpu(CardRules()):
        assert torch._C._cuda_getCurrentRawStream(0) == 0
    assert hasattr(torch._C, "_cuda_getCurrentRawStream") == torch.backends.cuda.is_built()
