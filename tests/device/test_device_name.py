"""The name of the virtual GPU, which code reads as cuda."""

import warnings

import pytest
import torch
from torch import nn

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.device_name import named_cuda


def test_an_error_of_torch_names_cuda(gpu):
    with pytest.raises(RuntimeError, match=r"at least two devices, (cpu and cuda:0|cuda:0 and cpu)!"):
        nn.Linear(8, 8).cuda()(torch.zeros(2, 8))
    with pytest.raises(RuntimeError, match="cuda"):
        torch.zeros(2, 8, device="cuda") @ torch.zeros(8, 2)


def test_a_warning_of_torch_names_cuda(monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))
    with named_cuda(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"{NAME}:0 is slow, the {NAME}s are not", UserWarning, stacklevel=1)
    assert shown == [f"cuda:0 is slow, the {NAME}s are not"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_takes_any_type_as_on_a_card(gpu, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled("cuda")
            assert nn.Linear(8, 8, device="cuda")(torch.zeros(2, 8, device="cuda").half()).dtype is dtype


def test_the_accelerator_and_the_default_device_are_cuda(gpu):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_default_device() == torch.device("cpu")
    torch.set_default_device(torch.accelerator.current_accelerator())
    assert torch.get_default_device() == torch.device("cuda", 0)
    assert torch.zeros(2).device == torch.device("cuda", 0)
