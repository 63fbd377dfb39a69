"""WindowGuard: a window's gradients, exact over micro-batches and ranks, made again where memory ran out.

    guard = memfit.guard(optimizer, model)
    for batches in windows:
        for part in guard.window(batches):
            with part as batch:
                loss, units = mean_loss(model, batch)
                guard.backward(loss, units)
        optimizer.step()
        optimizer.zero_grad()

A window's loss is the sum over its valid units divided by their number N, over all micro-batches and ranks. N is known
when the last backward is done: each backward runs on ``loss * units / P`` with a provisional P, and the gradients are
multiplied by P / N once, before clipping and the step. After a memory failure, gradients, random numbers and buffers
are as at the window's beginning, the micro-batch that failed is cut in halves, and the window is made again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from memfit.accumulation.batch_split import halves, is_nesting, sample_count
from memfit.accumulation.ranks import RankGroup
from memfit.accumulation.refusals import refuse_inexact, refuse_unnamed_wrapper
from memfit.accumulation.wrapped_optimizer import unwrapped
from memfit.apply.buffer_snapshot import BufferSnapshot
from memfit.apply.random_state import random_state, set_random_state
from memfit.engine.collectives import is_memory_failure
from memfit.errors import InputError
from memfit.replaced_methods import replaced_method
from memfit.train.recovery.exactly_once import ExactlyOnce
from memfit.train.recovery.failure import clear_frames, give_back

Split = Callable[[Any], Sequence[Any] | None]


class WindowGuard:
    """Guards the windows of one or several optimizers that step together.

    Attributes:
        failures: memory failures so far.
        most_samples: samples of a micro-batch at most, since one of more failed; None: no limit.
        units: valid units of the last window, over all ranks.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        modules: Sequence[nn.Module],
        *,
        split: Split = halves,
        scaler: GradScaler | None = None,
        repeat: bool = True,
        ranks: RankGroup | None = None,
    ) -> None:
        """``ranks``: of an engine that steps by itself, whose integration has checked it."""
        self._ranks = ranks or RankGroup([module for module in modules if isinstance(module, nn.Module)])
        if ranks is None:
            refuse_inexact(optimizers, modules, self._ranks, repeat=repeat)
        self._optimizers, self._split, self._scaler, self._repeats = list(optimizers), split, scaler, repeat
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        self._parameters = list({id(p): p for p in (*stepped, *trained)}.values())
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        self._buffers = BufferSnapshot({f"model{number}": module for number, module in enumerate(modules)})
        self._parts, self._provisional, self._own_units = 0, 0.0, 0.0
        self._current: GuardedMicroBatch | None = None
        self._tried_alone = self._checked = False
        self.failures, self.units = 0, 0.0
        self.most_samples: int | None = None
        if repeat:
            for optimizer in optimizers:
                protect_step(optimizer)

    def window(self, batches: Iterable[Any]) -> Iterator[GuardedMicroBatch]:
        """The micro-batches of a window, each as a context that gives its batch.

        After the last one the gradients are normalised and ready to be clipped and stepped.

        Raises:
            InputError: gradients are left from before, a part was not entered, no backward ran, or FSDP2's ranks have
                different numbers of micro-batches.
            OtherRankOutOfMemoryError: another rank could not finish.
        """
        todo = self._within_limit(list(batches))
        self._check_no_gradients()
        if not self._checked:
            refuse_unnamed_wrapper(self._parameters, self._ranks)
            self._checked = True
        if self._ranks.sharded:
            self._check_same_number(len(todo))
        self._buffers.keep()
        random = random_state(self._device)
        self._tried_alone = False
        while True:
            self._parts, self._provisional, self._own_units = len(todo), 0.0, 0.0
            failed: GuardedMicroBatch | None = None
            for index, batch in enumerate(todo):
                part = self._current = GuardedMicroBatch(self, batch, index)
                yield part
                self._current = None
                if part.failure is not None:
                    failed = part
                    break
                if not part.ran_backward:
                    raise InputError(
                        f"part {index} of guard.window", "it ended without guard.backward",
                        "write with part as batch: ... guard.backward(loss, units)",
                    )  # fmt: skip
            if failed is None:
                break
            todo = self._smaller(todo, failed)
            self._restore()
            set_random_state(random, self._device)
        self._buffers.learn()
        self._finish()

    def backward(self, loss: Tensor, units: float | Tensor) -> None:
        """The backward of one micro-batch.

        Args:
            loss: the mean over the micro-batch's valid units.
            units: how many valid units (samples, tokens, frames) it is the mean of; 0: nothing is learnt from it.
        """
        part = self._current
        if part is None or not part.entered:
            write = "write it inside of: with part as batch:"
            raise InputError("guard.backward", "it stands outside of a part", write)
        if part.ran_backward:
            write = "add the losses of a micro-batch, or make a guard for each optimizer"
            raise InputError("guard.backward", "it runs twice for one part", write)
        count = float(units)
        if not count >= 0 or count == float("inf"):
            write = "give the number of samples, frames or tokens in the mean"
            raise InputError(f"guard.backward(loss, {count})", "no number of units", write)
        if not self._provisional:
            first = max(count, 1.0) * self._parts
            self._provisional = self._ranks.most(first) if self._ranks.sharded else first
        if count:
            self._run_backward(loss * (count / self._provisional))
        else:
            self._pass_over(loss)
        self._own_units += count
        part.ran_backward = True

    def _run_backward(self, loss: Tensor) -> None:
        (self._scaler.scale(loss) if self._scaler is not None else loss).backward()

    def _pass_over(self, loss: Tensor) -> None:
        """Learns nothing: a mean over no unit is often 0 / 0, whose backward gives NaN whatever it is multiplied by."""
        if not self._ranks.sharded:
            return
        if not bool(torch.isfinite(loss)):
            write = "write loss.sum() / max(units, 1)"
            raise InputError("guard.backward(loss, 0)", "FSDP2 would spread a loss that is not finite", write)
        self._run_backward(loss * 0.0)

    def _within_limit(self, batches: list[Any]) -> list[Any]:
        """The batches, none of more samples than memory held so far."""
        cut: list[Any] = []
        for batch in batches:
            parts = None
            if self.most_samples is not None and sample_count(batch) > self.most_samples:
                parts = self._split(batch)
            cut += [batch] if parts is None else self._within_limit(list(parts))
        return cut

    def _check_no_gradients(self) -> None:
        left = [p.grad for p in self._parameters if p.grad is not None]
        if left and any(bool(gradient.count_nonzero()) for gradient in left):
            write = "call optimizer.zero_grad() before the window"
            raise InputError("guard.window", "gradients are left from before", write)

    def _check_same_number(self, parts: int) -> None:
        most, least = self._ranks.most(parts), -self._ranks.most(-parts)
        if most != least:
            why = f"a rank has {least:.0f} micro-batches in this window and another {most:.0f}"
            write = "give each rank the same number: FSDP2's ranks meet in every forward"
            raise InputError("guard.window", why, write)

    def _smaller(self, batches: list[Any], failed: GuardedMicroBatch) -> list[Any]:
        """The window with the failed micro-batch, and those after it of its size, in halves.

        A micro-batch that cannot be cut is tried once more with all free memory given back, as memfit run does.

        Raises:
            BaseException: the failure, where the micro-batch cannot be cut.
        """
        self.failures += 1
        assert failed.failure is not None
        if not self._repeats:
            raise failed.failure
        parts = self._split(failed.batch)
        if parts is None and not self._tried_alone:
            self._tried_alone = True
            return batches
        if parts is None:
            self._restore()
            self._ranks.total(0.0, failed=True)
            if sys.version_info >= (3, 11):  # exceptions of Python 3.10 have no notes
                failed.failure.add_note(_note_of(failed.batch))
            raise failed.failure
        samples = max(sample_count(part) for part in parts)
        if 0 < samples < sample_count(failed.batch):
            self.most_samples = min(self.most_samples or samples, samples)
        return [*batches[: failed.index], *parts, *self._within_limit(batches[failed.index + 1 :])]

    def _restore(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.restore()
        give_back(self._device)

    def _finish(self) -> None:
        self.units = self._ranks.total(self._own_units, failed=False)
        if not self.units:
            for parameter in self._parameters:
                parameter.grad = None
            return
        average = self._ranks.world if self._ranks.sharded else 1
        self._ranks.finish(self._parameters, (self._provisional or 1.0) * average / self.units)

    def _around(self) -> AbstractContextManager[None]:
        return self._ranks.alone() if self._ranks.wrapped else nullcontext()


class GuardedMicroBatch:
    """One micro-batch of a window: ``with part as batch``. A memory failure inside ends the block and is remembered."""

    def __init__(self, guard: WindowGuard, batch: Any, index: int) -> None:
        self.batch, self.index = batch, index
        self.entered = self.ran_backward = False
        self.failure: BaseException | None = None
        self._guard = guard
        self._around = guard._around()

    def __enter__(self) -> Any:
        self.entered = True
        self._around.__enter__()
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._around.__exit__(None, None, None)
        if error is None or not is_memory_failure(error):
            return False
        clear_frames(error)
        self.failure = error
        return True


def guard(
    optimizer: Optimizer | Sequence[Optimizer],
    *models: nn.Module,
    split: Split = halves,
    scaler: GradScaler | None = None,
    repeat: bool = True,
) -> WindowGuard:
    """Exact accumulation, and repeating of what ran out of memory, for a loop of your own.

    Args:
        optimizer: the optimizer, or several that step together after each window.
        models: the models of the forward, as they are called there (wrapped by DDP or FSDP2, where they are): their
            buffers are put back before a window is made again.
        split: cuts a batch into smaller ones; None where it cannot. Default: halves along the samples.
        scaler: the GradScaler that steps these optimizers.
        repeat: False only accumulates: a memory failure passes through.

    Raises:
        InputError: something that could not be undone, with the line of this call.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Sequence) else optimizer
    optimizers = [unwrapped(each) for each in given]
    return WindowGuard(optimizers, models, split=split, scaler=scaler, repeat=repeat)


def protect_step(optimizer: Optimizer) -> None:
    """Makes ``optimizer.step`` survive a memory failure in its middle, and be applied once all the same."""
    if getattr(optimizer, "_memfit_protected", False):
        return
    once, step = ExactlyOnce(_relieve), optimizer.step

    def step_once(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        given: list[Any] = []
        once(lambda: given.append(step(*args, **kwargs)), self)
        return given[-1] if given else None

    optimizer.step = replaced_method(optimizer, step, step_once)  # type: ignore[method-assign]
    optimizer._memfit_protected = True  # type: ignore[attr-defined]


def _note_of(batch: Any) -> str:
    """Why a batch was not cut."""
    if is_nesting(batch):
        return "memfit.guard: one sample does not fit alone; memfit explain tells what would help"
    return f"memfit.guard: a {type(batch).__name__} is not cut; write split=, a function that gives smaller batches"


def _relieve(error: BaseException) -> None:
    clear_frames(error)
    give_back(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
