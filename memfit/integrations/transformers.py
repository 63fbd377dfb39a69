"""Transformers' Trainer: a callback that watches, and a mixin that splits a micro-batch that does not fit.

    class MyTrainer(memfit.transformers.SplitStep, Trainer): ...
    MyTrainer(..., callbacks=[memfit.transformers.WatchCallback()])

The Trainer gives a window's micro-batches one by one. The mixin remembers those of the window. After a memory failure
it puts gradients, buffers and random numbers back to the window's beginning, cuts the micro-batch in halves and makes
the window again. The loss of a part keeps the weight that it had: where the model divides by ``num_items_in_batch``, by
itself, else by its share of the micro-batch's samples.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import TrainerCallback

from memfit.accumulation.batch_split import halves, sample_count
from memfit.accumulation.guard import protect_step
from memfit.accumulation.wrapped_optimizer import unwrapped
from memfit.apply.buffer_snapshot import BufferSnapshot
from memfit.apply.random_state import RandomState, random_state, set_random_state
from memfit.engine.collectives import is_memory_failure
from memfit.errors import InputError
from memfit.monitoring.step_monitor import StepMonitor
from memfit.train.recovery.failure import clear_frames, give_back

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class WatchCallback(TrainerCallback):
    """``memfit.watch`` on the Trainer's optimizer; takes its options."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.monitor: StepMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch."""
        models = [kwargs["model"]] if kwargs.get("model") is not None else []
        self.monitor = StepMonitor(unwrapped(kwargs["optimizer"]), models=models, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the watch."""
        if self.monitor is not None:
            self.monitor.close()


@dataclass(kw_only=True)
class _Window:
    step: int
    random: RandomState
    micro_batches: list[list[Any]] = field(default_factory=list)
    """The parts of each micro-batch so far."""
    tried_alone: bool = False


class SplitStep(_Base):
    """Put it before ``Trainer`` among the bases of a class.

    Attributes:
        memory_failures: so far.
    """

    memory_failures = 0
    _memfit_window: _Window | None = None
    _memfit_buffers: BufferSnapshot | None = None
    _memfit_share = 1.0
    _memfit_part = 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The Trainer's, repeated in smaller parts where memory runs out."""
        window = self._memfit_begin(model)
        window.micro_batches.append([inputs])
        again = False
        while True:
            try:
                before = window.micro_batches[:-1] if again else []
                for parts in before:
                    self._memfit_run(model, parts, num_items_in_batch)
                return self._memfit_run(model, window.micro_batches[-1], num_items_in_batch)
            except Exception as error:
                if not is_memory_failure(error):
                    raise
                clear_frames(error)
                self._memfit_undo(model, window, error)
                again = True

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, times the share of the samples where the loss is their mean."""
        given = super().compute_loss(model, inputs, *args, **kwargs)
        if self._memfit_share == 1.0 or self._memfit_is_sum(kwargs.get("num_items_in_batch")):
            return given
        return (given[0] * self._memfit_share, given[1]) if isinstance(given, tuple) else given * self._memfit_share

    def _memfit_is_sum(self, items: Any) -> bool:
        """Whether the loss is divided by the items of the whole window already."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        return bool((self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None)

    def _memfit_begin(self, model: nn.Module) -> _Window:
        if self._memfit_buffers is None:
            if self.args.world_size > 1 or self.args.n_gpu > 1:
                write = "leave the mixin out, or train on one device"
                raise InputError("memfit.transformers.SplitStep", "a rank cannot repeat its step alone", write)
            self._memfit_buffers = BufferSnapshot({"model": model})
            protect_step(unwrapped(self.optimizer))
        window = self._memfit_window
        if window is None or window.step != self.state.global_step:
            window = _Window(step=self.state.global_step, random=random_state(self.args.device))
            self._memfit_window = window
            self._memfit_buffers.keep()
        return window

    def _memfit_run(self, model: nn.Module, parts: list[Any], items: Any) -> Tensor:
        """Forward and backward of a micro-batch's parts; the sum of their losses."""
        total: Tensor | None = None
        samples = [sample_count(part) for part in parts]
        for number, part in enumerate(parts):
            self._memfit_part, self._memfit_share = number, samples[number] / sum(samples)
            try:
                loss = super().training_step(model, dict(part), items)
            except Exception as error:
                if is_memory_failure(error):
                    self._memfit_failed = parts
                raise
            finally:
                self._memfit_share = 1.0
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _memfit_undo(self, model: nn.Module, window: _Window, error: Exception) -> None:
        """Cuts the part that failed and puts the window back to its beginning."""
        self.memory_failures += 1
        parts, at = self._memfit_failed, self._memfit_part
        cut = halves(parts[at])
        if cut is not None:
            parts[at : at + 1] = cut
        elif window.tried_alone:
            if sys.version_info >= (3, 11):
                error.add_note("memfit: one sample does not fit alone; memfit explain tells what would help")
            raise error
        else:
            window.tried_alone = True
        for parameter in model.parameters():
            parameter.grad = None
        assert self._memfit_buffers is not None
        self._memfit_buffers.restore()
        give_back(self.args.device)
        set_random_state(window.random, self.args.device)
