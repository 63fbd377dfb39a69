"""Modules and parameters of a net, without ``Module.modules``."""

from __future__ import annotations

from torch import nn

from memfit.torch_compat.attributes import each_module, each_parameter


class Shared(nn.Module):
    """Two names for one module, a name for none, and modules within modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        self.again = self.first[1]
        self.absent = None
        self.register_module("nothing", None)
        self.last = nn.ModuleDict({"a": nn.LayerNorm(3), "b": nn.Linear(3, 1, bias=False)})


def test_modules_come_as_torch_gives_them() -> None:
    net = Shared()
    assert list(each_module(net)) == list(net.modules())


def test_every_parameter_comes() -> None:
    net = Shared()
    assert set(each_parameter(net)) == set(net.parameters())
