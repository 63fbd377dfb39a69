"""Tensors that hold others, as torchao's quantized ones do."""

import pytest
import torch

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from tests.device.minimal_tracer import MinimalTracer

aten = torch.ops.aten


class Halves(torch.Tensor):
    """Bytes and scales in place of numbers, which asks for its device as a library does."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, attributes, size=None, stride=None):
        return cls(inner["codes"], inner["scale"])

    def numbers(self):
        table = torch.arange(256, device=self.device, dtype=torch.float32)
        return table[self.codes.int()] * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args = [arg.numbers() if isinstance(arg, Halves) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def halves(device):
    return Halves(torch.zeros(64, 32, dtype=torch.uint8, device=device), torch.ones((), device=device))


def test_a_wrapper_on_the_card_says_cuda_and_its_parts_are_traced(no_gc):
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        held = halves("cuda")
        assert (held.device, held.is_cuda) == (torch.device("cuda", 0), True)
        assert tracer.live == 64 * 32 + 4
        product = torch.ones(8, 64, device="cuda") @ held
        assert product.device.type == "cuda"
        assert torch.empty_like(product, device=held.device).fake_device.type == NAME


def test_what_a_class_does_with_its_parts_is_that_of_a_real_run():
    with virtual_cpu():
        traced = torch.ones(8, 64) @ halves("cpu")
    really = torch.ones(8, 64) @ halves("cpu")
    assert (traced.shape, traced.dtype) == (really.shape, really.dtype)


def test_the_class_is_as_it_was_afterwards():
    before = dict(vars(Halves)), vars(torch.Tensor).get("_make_wrapper_subclass")
    with virtual_gpu(CardRules()):
        halves("cuda")
        assert vars(Halves)["__torch_dispatch__"] is not before[0]["__torch_dispatch__"]
    assert (dict(vars(Halves)), vars(torch.Tensor).get("_make_wrapper_subclass")) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wrapper_on_the_host_stays_there(device):
    with virtual_gpu(CardRules()):
        assert halves(device).device.type == device
