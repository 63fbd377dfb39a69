"""A guarded training that ends after its first epoch and resumes from the framework's checkpoint ends as if it had not.

The first epoch has a memory failure, so that the checkpoint is one of a run that was cut. DeepSpeed's is in
test_deepspeed.py, since an engine needs processes of its own.

pytest tests/integrations/test_resume.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import memfit
from tests.accumulation.nets import Failures, Net, mean_loss, windows
from tests.integrations.test_lightning import data, difference, fitted, reference
from tests.integrations.test_transformers import model, trained

EXACT = 1e-13


def guarded(net: Net, optimizer: Any, guard: Any, epoch: list) -> None:
    for batches in epoch:
        for part in guard.window(batches):
            with part as batch:
                guard.backward(mean_loss(net, batch), len(batch[0]))
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def test_a_plain_loop_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    whole, optimizer = made()
    guarded(whole, optimizer, memfit.guard(optimizer, whole), windows(4))
    first, optimizer = made()
    Failures(first, {1})
    guarded(first, optimizer, memfit.guard(optimizer, first), windows(4)[:2])
    torch.save({"net": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    second, optimizer = made()
    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    guard = memfit.guard(optimizer, second)
    second.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    guarded(second, optimizer, guard, windows(4)[2:])
    assert difference(second, whole) < EXACT
    assert difference(second, first) > 1e-3


def test_accelerate_resumes_from_save_state(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def epoch(fail_at: set[int], load: bool, save: bool) -> Net:
        torch.manual_seed(0)
        net = Net()
        Failures(net, fail_at)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data(), batch_size=2)
        model, optimizer, loader, guard = memfit.accelerate.prepare(accelerator, net, optimizer, loader)
        if load:
            accelerator.load_state(str(tmp_path / "state"))
        guarded(model, optimizer, guard, list(memfit.accelerate.windows(loader, 3)))
        if save:
            accelerator.save_state(str(tmp_path / "state"))
        return net

    epoch({1}, load=False, save=True)
    assert difference(epoch(set(), load=True, save=False), reference()) < EXACT


def test_lightning_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class SaveAfterAnEpoch(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    whole = fitted(tmp_path, memfit.lightning.ExactAccumulation(), SaveAfterAnEpoch())
    resumed = fitted(tmp_path, memfit.lightning.ExactAccumulation(), checkpoint=tmp_path / "first.ckpt")
    assert difference(whole.net, reference()) < EXACT
    assert difference(resumed.net, reference()) < EXACT


def test_the_trainer_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    whole, first, second = model(), model(), model()
    trained(whole, tmp_path / "whole", set())
    trained(first, tmp_path / "run", {1}, arguments={"save_strategy": "steps", "save_steps": 1, "max_steps": 2})
    trained(second, tmp_path / "run", {0}, resume=str(tmp_path / "run" / "checkpoint-2"))
    assert difference(second, whole) < EXACT
    assert difference(second, first) > 1e-4
