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
from memfit.torch_compat.attributes import local_tensor
from memfit.train.recovery.exactly_once import ExactlyOnce, TornStepError
from memfit.train.recovery.recovery import Recovery
from memfit.train.recovery.step_attributes import StepAttributes, state_values


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


def as_it_is(tensor):
    return tensor


def stepped(make, steps, once=None, fail_at=0, fail_in=0, failing=FailsAt, part=as_it_is, given=gradients):
    """(parameters and state after the steps, whether it failed).

    Args:
        part: what a tensor is made to, such as a DTensor.
        given: gradients of a step.
    """
    learned = [nn.Parameter(part(parameter.detach())) for parameter in parameters()]
    optimizer, failed = make(learned), False
    for step in range(steps):
        for parameter, gradient in zip(learned, given(step), strict=True):
            parameter.grad = part(gradient)
        if step == fail_in and fail_at:
            with failing(fail_at) as mode:
                once(optimizer.step, optimizer)
            failed = mode.left <= 0
        elif once:
            once(optimizer.step, optimizer)
        else:
            optimizer.step()
    state = [t for p in learned for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [local_tensor(t).detach() for t in learned + state], failed


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
    applied_once_or_given_up(make, fail_in, failing)


def applied_once_or_given_up(make, fail_in, failing, part=as_it_is, given=gradients):
    wanted, _ = stepped(make, 3, part=part)
    undisturbed, given_up, at = 0, 0, 0
    while True:
        at += 1
        try:
            answer, failed = stepped(make, 3, ExactlyOnce(lambda error: None), at, fail_in, failing, part, given)
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


@pytest.mark.parametrize("before", [0, 1, 5])
def test_what_an_optimizer_counts_in_its_attributes_is_put_back_with_the_numbers_of_its_groups(before):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Counting([weight], lr=0.1)
    for _ in range(before):
        optimizer.step()
    attributes = StepAttributes(optimizer, state_values(optimizer))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    assert attributes.put_back()
    assert optimizer.steps == before
    assert optimizer.param_groups[0]["lr"] == 0.1


class Looking(torch.optim.SGD):
    """Slow weights in a list, a tensor and a count that the first step puts into a group, a history."""

    def __init__(self, learned):
        super().__init__(learned, lr=0.1, momentum=0.9)
        self.slow, self.history = [p.detach().clone() for p in learned], []

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        if "size" not in group:
            group["size"] = torch.zeros(())
        size = sum(p.grad.norm() for p in group["params"])
        group["size"].mul_(0.5).add_(size)
        self.history.append(size)
        super().step()
        for slow, p in zip(self.slow, group["params"], strict=True):
            slow.add_(p - slow, alpha=0.5 / group["count"])
            p.copy_(slow * (1 + 0.01 * group["size"] + 0.01 * len(self.history)))


KEPT = {}
"""What hooks change, by the ids of their optimizers."""


class Shadow:
    """An average of weights in an object, as diffusers' ``EMAModel`` keeps it."""

    def __init__(self, learned):
        self.learned, self.tensors, self.steps = learned, [p.detach().clone() for p in learned], 0

    def update(self, *_):
        self.steps += 1
        for mine, theirs in zip(self.tensors, self.learned, strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5 / self.steps)


def with_shadow(learned):
    optimizer = torch.optim.AdamW(learned, lr=0.1)
    shadow = Shadow(learned)
    optimizer.register_step_post_hook(shadow.update)
    KEPT[id(optimizer)] = shadow.tensors
    return optimizer


def with_closure(learned):
    """An average in a dict, a net and a count that a function closes over."""
    average, calls = {i: p.detach().clone() for i, p in enumerate(learned)}, 0
    net = nn.BatchNorm1d(3)

    def update(*_):
        nonlocal calls
        calls += 1
        net.num_batches_tracked.add_(1)
        with torch.no_grad():
            for i, p in enumerate(learned):
                average[i].lerp_(p, 0.5 / calls)
                net.running_mean.add_(p.mean())

    optimizer = torch.optim.NAdam(learned, lr=0.1)
    optimizer.register_step_post_hook(update)
    KEPT[id(optimizer)] = [*average.values(), net.running_mean, net.num_batches_tracked]
    return optimizer


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (Looking, lambda optimizer: [*optimizer.slow, optimizer.param_groups[0]["size"], *optimizer.history]),
        (with_shadow, lambda optimizer: KEPT[id(optimizer)]),
        (with_closure, lambda optimizer: KEPT[id(optimizer)]),
    ],
    ids=["attributes", "a method's object", "closure"],
)
@pytest.mark.parametrize("fail_in", [0, 2])
def test_what_a_step_changes_outside_of_the_state_is_changed_once(make, kept, fail_in):
    made = []

    def making(learned):
        made.append(make(learned))
        return made[-1]

    wanted, _ = stepped(making, 4)
    at, failed = 0, True
    while failed:
        at += 1
        answer, failed = stepped(making, 4, ExactlyOnce(lambda error: None), at, fail_in)
        given = [*answer, *kept(made[-1])]
        expected = [*wanted, *kept(made[0])]
        assert len(given) == len(expected)
        assert all(map(torch.equal, given, expected)), f"operator {at}"
    assert at > 10


class Replacing(torch.optim.SGD):
    """Puts a new tensor into its state in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = self.state[p].get("mean", torch.zeros_like(p)) * 0.9 + p.grad
            p.add_(self.state[p]["mean"], alpha=-0.1)


def test_a_step_that_has_replaced_a_tensor_of_its_state_is_given_up():
    wanted, _ = stepped(lambda learned: Replacing(learned, lr=0.1), 3)
    given_up = at = 0
    failed = True
    while failed:
        at += 1
        try:
            answer, failed = stepped(
                lambda learned: Replacing(learned, lr=0.1), 3, ExactlyOnce(lambda error: None), at, 2
            )
        except TornStepError:
            given_up += 1
            continue
        assert all(map(torch.equal, answer, wanted)), f"operator {at}"
    assert 0 < given_up < at
