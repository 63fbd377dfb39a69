"""An optimizer step that fails at any operator is applied once, bit for bit.

python -m pytest tests/train/test_exactly_once.py
"""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.apply.losses import MicroBatch
from memfit.apply.state_streaming import PER_PARAMETER
from memfit.apply.train_state import build
from memfit.apply.window import Guard, run_window
from memfit.job import Job
from memfit.torch_compat import current_dispatch_mode
from memfit.train.recovery.exactly_once import ExactlyOnce, TornStepError, numbers_of, put_numbers_back
from memfit.train.recovery.recovery import Recovery


class FailsAt(TorchDispatchMode):
    """The real allocator fails, once, at the n-th operator."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            torch.empty(1 << 60, dtype=torch.uint8)
        return func(*args, **(kwargs or {}))


class FunctionFailsAt(TorchFunctionMode):
    """The same at the n-th function of torch that writes. No dispatch mode is there, and versions count."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= func.__name__.endswith("_") and not func.__name__.endswith("__")
        if self.left == 0:
            self.left = -1
            torch.empty(1 << 60, dtype=torch.uint8)
        return func(*args, **(kwargs or {}))


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (3,), (2, 5))]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in parameters()]


def stepped(make, steps, once=None, fail_at=0, fail_in=0, failing=FailsAt):
    """(parameters and state after the steps, whether it failed)."""
    learned = parameters()
    optimizer, failed = make(learned), False
    for step in range(steps):
        for parameter, gradient in zip(learned, gradients(step), strict=True):
            parameter.grad = gradient.clone()
        if step == fail_in and fail_at:
            with failing(fail_at) as mode:
                once(optimizer.step, optimizer)
            failed = mode.left <= 0
        elif once:
            once(optimizer.step, optimizer)
        else:
            optimizer.step()
    state = [t for p in learned for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [p.detach() for p in learned] + state, failed


def as_plain(kind):
    options = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {"weight_decay": 0.1}
    return lambda learned: kind(learned, lr=0.1, **({} if kind is torch.optim.Rprop else options))


CASES = {kind.__name__: as_plain(kind) for kind in sorted(PER_PARAMETER, key=lambda kind: kind.__name__)} | {
    "AdamW foreach": lambda learned: torch.optim.AdamW(learned, lr=0.1, foreach=True),
    "Adam fused": lambda learned: torch.optim.Adam(learned, lr=0.1, fused=True),
    "SGD foreach": lambda learned: torch.optim.SGD(learned, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "two groups": lambda learned: torch.optim.Adam(
        [{"params": learned[:1], "lr": 0.3}, {"params": learned[1:]}], lr=0.1
    ),
    "two groups fused": lambda learned: torch.optim.Adam(
        [{"params": learned[:1], "lr": 0.3}, {"params": learned[1:]}], lr=0.1, fused=True
    ),
    "past the counter": lambda learned: Past(learned, lr=0.1),
    "hooked": lambda learned: hooked(torch.optim.AdamW(learned, lr=0.1)),
}


READ_BEFORE_WRITE = [CASES[name] for name in ("Adadelta", "Adafactor", "ASGD", "Rprop")]
"""They read a number or a tensor that the same step overwrites; what cannot be told apart is given up."""


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("fail_in", "failing"),
    [(0, FailsAt), (1, FailsAt), (1, FunctionFailsAt)],
    ids=["first step", "later step, every write counted", "later step"],
)
def test_a_failure_at_every_operator_of_a_step(make, fail_in, failing):
    wanted, _ = stepped(make, 3)
    undisturbed, given_up, at = 0, 0, 0
    while True:
        at += 1
        try:
            answer, failed = stepped(make, 3, ExactlyOnce(lambda error: None), at, fail_in, failing)
        except TornStepError:
            given_up += 1
            continue
        if not failed:
            break
        undisturbed += 1
        assert len(answer) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(answer, wanted, strict=True)), f"operator {at}"
    assert undisturbed >= 1
    if make not in READ_BEFORE_WRITE:
        assert given_up == 0


@pytest.mark.parametrize("make", [CASES["AdamW"], CASES["AdamW foreach"], CASES["SGD foreach"]])
def test_no_dispatch_mode_slows_a_step_whose_writes_the_version_counter_sees(make):
    learned, modes = parameters(), []
    optimizer, once = make(learned), ExactlyOnce(lambda error: None)
    for step in range(3):
        for parameter, gradient in zip(learned, gradients(step), strict=True):
            parameter.grad = gradient
        once(lambda: (optimizer.step(), modes.append(current_dispatch_mode())), optimizer)
    assert modes[-2:] == [None, None]


class Past(torch.optim.SGD):
    """Writes past the version counter."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            buffer = self.state[p].setdefault("m", torch.zeros_like(p.data))
            buffer.data.mul_(0.9).add_(p.grad)
            p.data.add_(buffer * 2, alpha=-0.1)


def test_a_step_that_never_gets_its_memory_is_given_up():
    learned = parameters()
    optimizer = torch.optim.Adam(learned, lr=0.1)
    optimizer.step = lambda: torch.empty(1 << 60, dtype=torch.uint8)
    for p in learned:
        p.grad = torch.zeros_like(p)
    with pytest.raises(TornStepError):
        ExactlyOnce(lambda error: None)(optimizer.step, optimizer)


class Scaled(Job):
    precision: str = "fp16"

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 8)

    def loss(self, nets, batch):
        return nets["net"](batch).float().square().sum(), len(batch)


def scaled_windows(guarded):
    """(weights and scale after forty windows, whether a scaler left the first step out)."""
    train_state = build(Scaled(), "cpu")
    train_state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    recovery = Recovery(train_state, remake=lambda ids: None, cost=len, largest=4)
    torch.manual_seed(1)
    begin = [p.detach().clone() for p in train_state.nets["net"].parameters()]
    left_out = None
    for _ in range(40):
        batch = torch.randn(4, 8)
        part = MicroBatch(fetch=lambda batch=batch: batch, padded_units=4)
        run_window(train_state, [part], guard=recovery.guard if guarded else Guard())
        if left_out is None:
            left_out = all(map(torch.equal, begin, train_state.nets["net"].parameters()))
    return [p.detach() for p in train_state.nets["net"].parameters()], train_state.scaler.get_scale(), left_out


def test_a_step_that_a_scaler_leaves_out_and_the_first_that_it_takes_are_those_of_a_plain_loop():
    plain, scale, left_out = scaled_windows(guarded=False)
    guarded, same_scale, _ = scaled_windows(guarded=True)
    assert left_out
    assert scale == same_scale < 2.0**40
    assert not torch.equal(plain[0], Scaled().nets()["net"][0].weight)
    assert all(map(torch.equal, plain, guarded))


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, as Lookahead does."""

    steps = 0

    def step(self, closure=None):
        self.steps = self.steps + 1
        return super().step(closure)


@pytest.mark.parametrize("before", [1, 5])
def test_what_an_optimizer_counts_in_its_attributes_is_put_back_with_the_numbers_of_its_groups(before):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Counting([weight], lr=0.1)
    for _ in range(before):
        optimizer.step()
    numbers = numbers_of(optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    put_numbers_back(numbers)
    assert optimizer.steps == before
    assert optimizer.param_groups[0]["lr"] == 0.1
