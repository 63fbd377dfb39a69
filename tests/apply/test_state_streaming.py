"""State that waits on the host learns what state on the device does, bit for bit, and visits part by part."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.apply import state_streaming
from memfit.apply.state_streaming import left_on_the_device, streamed, streams
from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window, stepping
from memfit.job import Job, Loss

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}], lr=0.01),
}


class Two(Job):
    """Two nets with an optimizer each, an average and a schedule."""

    kind: str = "adamw"
    ema: float | None = 0.9
    clip: float | None = 1.0

    def nets(self):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1)]
        return {"a": nn.Sequential(*layers), "b": nn.Linear(8, 1)}

    def optimizers(self, nets):
        make = OPTIMIZERS[self.kind]
        return {
            "a": make(list(nets["a"].parameters())),
            "b": torch.optim.SGD(nets["b"].parameters(), 0.1, momentum=0.9),
        }

    def schedules(self, optimizers, windows):
        return {name: torch.optim.lr_scheduler.StepLR(item, 1, 0.9) for name, item in optimizers.items()}

    def loss(self, nets, batch):
        return Loss(((nets["a"](batch) - nets["b"](batch)) ** 2).sum(), len(batch))


def trained(job, place, *, scaled=False, windows=4):
    train_state = build(job, "cpu", optimizer_state=place, average=place)
    if scaled:
        train_state.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    torch.manual_seed(1)
    for _ in range(windows):
        batch = torch.randn(6, 8)
        run_window(train_state, [MicroBatch(fetch=lambda batch=batch: batch, padded_units=6, units=6)])
    return train_state


def tensors(train_state):
    weights = [
        t for nets in (train_state.nets, train_state.ema) for net in nets.values() for t in net.state_dict().values()
    ]
    states = [
        value
        for optimizer in train_state.optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return [t for t in (*weights, *states) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_bit_for_bit(kind, scaled, monkeypatch):
    monkeypatch.setattr(state_streaming, "PART", 300)
    here, there = (trained(Two(kind=kind), place, scaled=scaled) for place in ("device", "host"))
    seen = list(zip(tensors(here), tensors(there), strict=True))
    assert len(seen) > 20
    assert all(torch.equal(a, b) for a, b in seen)
    assert [s.last_epoch for s in there.schedules.values()] == [4, 4]


def test_a_part_at_a_time_and_undone():
    """Two parameters of 64 bytes of state in parts of 64: each step is of one alone, and afterwards of both."""
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters, foreach=False)
    seen = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].numel() > 1:
                seen.append([len(group["params"]) for group in optimizer.param_groups])
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        for p in parameters:
            p.grad = torch.ones(8)
        before = state_streaming.PART
        state_streaming.PART = 64
        try:
            with Watched(), streamed(optimizer, torch.device("cpu")):
                optimizer.step()
        finally:
            state_streaming.PART = before
    assert seen == [[1]] * 4
    assert "step" not in vars(optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_step_that_fails_leaves_the_host_as_it_was():
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    for fails in (False, True):
        parameter.grad = torch.ones(8)
        with streamed(optimizer, torch.device("cpu")), pytest.raises(MemoryError) if fails else nullcontext():
            if fails:
                optimizer.param_groups[0]["lr"] = _Breaks()
            optimizer.step()
        if not fails:
            home = optimizer.state[parameter]["momentum_buffer"]
            before = home.clone()
    assert optimizer.state[parameter]["momentum_buffer"] is home
    assert torch.equal(home, before)


class _Breaks(float):
    """A rate that memory fails to multiply with."""

    def __neg__(self):
        raise MemoryError


def test_optimizers_that_see_all_parameters_are_left_by_name():
    parameter = nn.Parameter(torch.ones(8))
    optimizers = {"a": torch.optim.LBFGS([parameter]), "b": torch.optim.AdamW([parameter])}
    assert left_on_the_device(optimizers) == ["'a' (LBFGS)"]
    assert streams(optimizers["b"])


@pytest.mark.parametrize(
    ("kind", "place", "visits"),
    [
        (torch.optim.AdamW, "host", True), (torch.optim.AdamW, "device", False),
        (torch.optim.LBFGS, "host", False), (torch.optim.LBFGS, "device", False),
    ],
)  # fmt: skip
def test_state_visits_the_device_only_where_it_waits_on_the_host_and_can_be_streamed(kind, place, visits):
    train_state = SimpleNamespace(optimizer_state=place, device=torch.device("cpu"))
    around = stepping(train_state, kind(nn.Linear(2, 2).parameters()))
    assert isinstance(around, nullcontext) is not visits
