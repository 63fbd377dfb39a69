"""Lightning: callbacks that watch, and that make ``accumulate_grad_batches`` exact.

    Trainer(accumulate_grad_batches=4, callbacks=[memfit.lightning.ExactAccumulation(units=count_tokens)])

Lightning divides each loss by ``accumulate_grad_batches``: a micro-batch counts alike whatever its valid units are, and
a last window of fewer micro-batches learns too little. The callback weighs each backward with the micro-batch's units,
and divides the gradients by the units of the window, over all ranks, before they are clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from memfit.accumulation.batch_split import sample_count
from memfit.accumulation.ranks import local
from memfit.errors import InputError
from memfit.monitoring.step_monitor import StepMonitor


class WatchCallback(Callback):
    """``memfit.watch`` on the module's first optimizer; takes its options."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.monitor: StepMonitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch."""
        self.monitor = StepMonitor(trainer.optimizers[0], models=[pl_module], **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the watch."""
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the watch."""
        self.on_train_end(trainer, pl_module)


class ExactAccumulation(Callback):
    """Makes a window's gradients those of one batch with all of its valid units.

    Args:
        units: how many valid units the loss of a batch is the mean of. Default: its samples.
    """

    def __init__(self, units: Callable[[Any], float] = sample_count) -> None:
        self._units = units
        self._window = self._current = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses what has no one window: manual optimization and several optimizers, and DeepSpeed's own scaling."""
        if not pl_module.automatic_optimization:
            write = "write memfit.guard in training_step"
            raise InputError("memfit.lightning.ExactAccumulation", "the module optimizes manually", write)
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            write = "leave it out: DeepSpeed scales gradients by itself"
            raise InputError("memfit.lightning.ExactAccumulation", "the strategy is DeepSpeed's", write)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch."""
        self._current = float(self._units(batch))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Weighs the backward: its gradient begins with the units in the place of 1 / accumulate_grad_batches."""
        factor = self._current * trainer.accumulate_grad_batches
        self._window += self._current
        loss.register_hook(lambda gradient: gradient * factor)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Divides by the window's units, before the gradients are clipped."""
        units, world = self._window, 1
        self._window = 0.0
        if dist.is_available() and dist.is_initialized():
            total = torch.tensor(units, dtype=torch.float64, device=pl_module.device)
            dist.all_reduce(total)
            units, world = float(total), dist.get_world_size()
        if units:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(world / units)
