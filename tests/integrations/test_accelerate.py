"""memfit beside Accelerate: windows are exact, also the last one, and survive a failure.

pytest tests/integrations/test_accelerate.py
"""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

import memfit  # noqa: E402
from memfit.errors import InputError  # noqa: E402
from tests.accumulation.nets import Failures, Net, mean_loss  # noqa: E402
from tests.integrations.test_lightning import data, difference, reference  # noqa: E402


def trained(fail_at: set[int], clip: float | None = None) -> Any:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    Failures(net, fail_at)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=2)
    model, optimizer, loader, guard = memfit.accelerate.prepare(accelerator, net, optimizer, loader)
    for _ in range(2):
        for batches in memfit.accelerate.windows(loader, 3):
            for part in guard.window(batches):
                with part as batch:
                    guard.backward(mean_loss(model, batch), len(batch[0]))
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    assert guard.failures == len(fail_at)
    return net


@pytest.mark.parametrize("fail_at", [set(), {1}, {0, 9}])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_windows_are_exact(fail_at: set[int], clip: float | None) -> None:
    assert difference(trained(fail_at, clip), reference(clip)) < 1e-13


def test_an_accelerator_that_accumulates_by_itself_is_refused() -> None:
    net = Net()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(InputError, match="accumulates 4 micro-batches by itself"):
        memfit.accelerate.prepare(accelerator, net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(InputError, match="less than one"):
        next(memfit.accelerate.windows([], 0))


def test_accelerates_own_last_window_is_wrong() -> None:
    """``accelerator.accumulate`` divides by its constant: the last window, of one micro-batch, learns a third."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(), batch_size=2))
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert difference(net, reference()) > 1e-3


def test_windows_are_exact_after_another_accelerator_ended_in_the_middle_of_a_window() -> None:
    """Accelerate shares that state over a process: its optimizers then neither step nor clear gradients."""
    other = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    with other.accumulate(other.prepare(Net())):
        assert not other.sync_gradients
    assert difference(trained(set()), reference()) < 1e-13


def test_a_watch_beside_accelerate_sees_each_step() -> None:
    accelerator, net = accelerate.Accelerator(cpu=True), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    with memfit.watch(optimizer, out=None) as watch:
        for batch in DataLoader(data(), batch_size=4):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
    assert watch.steps == 4
