"""memfit.guard: windows are exact in float64, with and without memory failures.

pytest tests/accumulation/test_guard.py
"""

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import memfit
from memfit.errors import InputError
from tests.accumulation.nets import Failures, Net, failing_step, mean_loss, mean_over_nothing, windows

EXACT = 1e-14


def reference(net: nn.Module, optimizer: Any, data: list, clip: float | None = None) -> None:
    """Each window as one batch."""
    for batches in data:
        rows = [torch.cat(part) for part in zip(*batches, strict=True)]
        mean_loss(net, (rows[0], rows[1])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def guarded(guard: Any, net: nn.Module, optimizer: Any, data: list, clip: float | None = None) -> None:
    for batches in data:
        for part in guard.window(batches):
            with part as batch:
                guard.backward(mean_loss(net, batch), len(batch[0]))
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("failures", [set(), {1}, {2, 7, 15}, {0, 1, 2}])
def test_ragged_windows_learn_what_one_batch_learns(name: str, clip: float | None, failures: set[int]) -> None:
    torch.manual_seed(0)
    net = Net()
    other, data = copy.deepcopy(net), windows()
    optimizer, plain = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](other.parameters())
    Failures(net, failures)
    guard = memfit.guard(optimizer, net)
    guarded(guard, net, optimizer, data, clip)
    reference(other, plain, data, clip)
    assert difference(net, other) < EXACT
    assert guard.failures == len(failures)
    assert guard.units == 12


def test_a_naive_loop_differs() -> None:
    torch.manual_seed(0)
    net = Net()
    other, data = copy.deepcopy(net), windows()
    optimizer, plain = OPTIMIZERS["sgd"](net.parameters()), OPTIMIZERS["sgd"](other.parameters())
    for batches in data:
        for batch in batches:
            (mean_loss(net, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference(other, plain, data)
    assert difference(net, other) > 1e-4


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def test_random_numbers_and_buffers_are_as_at_the_windows_beginning() -> None:
    """With the same split, a window that failed and one that did not are the same bit for bit."""
    seed()
    net = Net(noise=True)
    other = copy.deepcopy(net)
    for each, failures in ((net, {1}), (other, set())):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        Failures(each, failures)
        guard = memfit.guard(optimizer, each, split=lambda batch: [batch])
        seed()
        guarded(guard, each, optimizer, windows(2))
        assert guard.failures == len(failures)
        assert float(each.seen) == 6, "a forward of the attempt that failed is not counted"
    assert difference(net, other) == 0


def test_a_split_that_failed_is_remembered() -> None:
    net = Net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    Failures(net, {2})
    guard = memfit.guard(optimizer, net)
    guarded(guard, net, optimizer, windows(1))
    assert guard.most_samples == 3
    assert [len(part.batch[0]) for part in parts_of(guard, windows(1)[0], net)] == [2, 2, 3, 3, 2]


def parts_of(guard: Any, batches: list, net: nn.Module) -> list[Any]:
    parts = []
    for part in guard.window(batches):
        with part as batch:
            guard.backward(mean_loss(net, batch), len(batch[0]))
        parts.append(part)
    return parts


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_inside_a_step_is_applied_once(name: str, first: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    other, data = copy.deepcopy(net), windows()
    optimizer, plain = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](other.parameters())
    guard = memfit.guard(optimizer, net)
    guarded(guard, net, optimizer, data[: 0 if first else 2])
    for part in guard.window(data[2]):
        with part as batch:
            guard.backward(mean_loss(net, batch), len(batch[0]))
    with failing_step(net.last.weight, 1):
        optimizer.step()
    reference(other, plain, [*data[: 0 if first else 2], data[2]])
    assert difference(net, other) < EXACT


def test_a_grad_scaler_and_a_schedule() -> None:
    torch.manual_seed(0)
    net = Net()
    other, data = copy.deepcopy(net), windows()
    optimizer, plain = OPTIMIZERS["sgd"](net.parameters()), OPTIMIZERS["sgd"](other.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    guard = memfit.guard(optimizer, net, scaler=scaler)
    schedules = [LambdaLR(each, lambda step: 0.5**step) for each in (optimizer, plain)]
    Failures(net, {1, 5})
    for batches in data:
        for part in guard.window(batches):
            with part as batch:
                guard.backward(mean_loss(net, batch), len(batch[0]))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedules[0].step()
        reference(other, plain, [batches], 0.05)
        schedules[1].step()
    assert guard.failures == 2
    assert difference(net, other) < EXACT


def test_several_optimizers() -> None:
    torch.manual_seed(0)
    net = Net()
    other, data = copy.deepcopy(net), windows()
    own = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.first, net.last)]
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    Failures(net, {4})
    guard = memfit.guard(own, net)
    for batches in data:
        parts_of(guard, batches, net)
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
    reference(other, plain, data)
    assert difference(net, other) < EXACT


def test_a_part_without_units_and_a_window_without() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard, before = memfit.guard(optimizer, net), copy.deepcopy(net)
    for part in guard.window(windows(1)[0]):
        with part as batch:
            guard.backward(mean_over_nothing(net, batch[0]), 0)
    optimizer.step()
    assert difference(net, before) == 0
    data = windows(1)[0]
    for part in guard.window([data[0], data[0][0], data[1]]):
        with part as batch:
            if isinstance(batch, torch.Tensor):
                guard.backward(mean_over_nothing(net, batch), 0)
            else:
                guard.backward(mean_loss(net, batch), len(batch[0]))
    optimizer.step()
    reference(before, torch.optim.SGD(before.parameters(), lr=0.1), [data[:2]])
    assert difference(net, before) < EXACT
    optimizer.zero_grad()
    for part in guard.window([]):
        raise AssertionError(part)


def test_one_sample_that_does_not_fit_is_the_failure_itself() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Failures(net, set(range(100)))
    guard = memfit.guard(optimizer, net)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        parts_of(guard, windows(1)[0], net)
    assert "one sample does not fit alone" in caught.value.__notes__[0]
    assert all(p.grad is None for p in net.parameters())


def test_a_batch_that_is_not_cut_says_so() -> None:
    net = Net()
    guard = memfit.guard(torch.optim.SGD(net.parameters(), lr=0.1), net)
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    window = guard.window([packed])
    with next(window):
        raise MemoryError
    with next(window):
        raise MemoryError
    with pytest.raises(MemoryError) as caught:
        next(window)
    assert "a PackedSequence is not cut; write split=" in caught.value.__notes__[0]


def test_another_error_passes_through() -> None:
    net = Net()
    guard = memfit.guard(torch.optim.SGD(net.parameters(), lr=0.1), net)
    part = next(guard.window([1]))
    with pytest.raises(KeyError), part:
        raise KeyError("x")


def test_what_cannot_be_undone_is_refused_with_its_line() -> None:
    net = Net()
    with pytest.raises(InputError, match=r"test_guard\.py:\d+: memfit\.guard: LBFGS"):
        memfit.guard(torch.optim.LBFGS(net.parameters()), net)
    with pytest.raises(InputError, match="DataParallel splits"):
        memfit.guard(torch.optim.SGD(net.parameters(), lr=1), nn.DataParallel(net))
    with pytest.raises(InputError, match="no parameter of the model"):
        memfit.guard(torch.optim.SGD(net.parameters(), lr=1), Net())
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    with pytest.raises(InputError, match="DeepSpeed engine reduces gradients by itself"):
        memfit.guard(torch.optim.SGD(net.parameters(), lr=1), engine)
    with pytest.raises(InputError, match=r"no torch\.optim\.Optimizer"):
        memfit.guard(net)  # type: ignore[arg-type]


def test_wrong_use_is_one_line() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard, (batches,) = memfit.guard(optimizer, net), windows(1)
    with pytest.raises(InputError, match="outside of a part"):
        guard.backward(mean_loss(net, batches[0]), 4)
    window = guard.window(batches)
    with next(window):
        pass
    with pytest.raises(InputError, match=r"without guard\.backward"):
        next(window)
    window = guard.window(batches)
    with next(window) as batch:
        guard.backward(mean_loss(net, batch), 4)
        with pytest.raises(InputError, match="twice"):
            guard.backward(mean_loss(net, batch), 4)
    with pytest.raises(InputError, match="left from before"):
        next(guard.window(batches))


def lightning_optimizer(optimizer: Any) -> Any:
    return pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)


def fabric_optimizer(optimizer: Any) -> Any:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup(Net(), optimizer)[1]


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "accelerate": lambda optimizer: pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer),
    "lightning": lambda optimizer: pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(
        optimizer
    ),
    "fabric": fabric_optimizer,
}


@pytest.mark.parametrize("framework", WRAPPED)
def test_an_optimizer_that_a_framework_wraps_is_guarded_and_watched(framework: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = WRAPPED[framework](optimizer)
    memfit.guard(wrapped, net)
    with memfit.watch(wrapped, out=None) as watch:
        mean_loss(net, windows(1)[0][0]).backward()
        optimizer.step()
    assert watch.steps == 1


def test_a_guarded_step_shows_the_arguments_of_the_optimizer() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = inspect.signature(optimizer.step)
    memfit.guard(optimizer, net)
    assert inspect.signature(optimizer.step) == before
