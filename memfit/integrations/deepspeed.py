"""DeepSpeed: a guard of an engine that ``deepspeed.initialize`` made.

    guard = memfit.deepspeed.guard(engine)
    for batches in windows:
        for part in guard.window(batches):
            with part as batch: guard.backward(mean_loss(engine, batch), units)
        engine.step()

The engine's own ``coalesce_grad_reduction`` (ZeRO) and ``no_sync`` (stage 0) keep the gradients of a window whole on
each rank until all of its backwards are done. Then they are normalised by the units of all ranks, and the engine
reduces them once. Until then a rank meets no other, and repeats what ran out of memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.accumulation.batch_split import halves
from memfit.accumulation.guard import GuardedMicroBatch, Split, WindowGuard, protect_step
from memfit.accumulation.ranks import RankGroup, local
from memfit.errors import InputError

_SEEN = "memfit.deepspeed.guard"


class EngineRanks(RankGroup):
    """The data-parallel ranks of an engine, which reduces gradients to their mean."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__([engine.module])
        self.group, self.world = engine.data_parallel_group, engine.dp_world_size

    def finish(self, parameters: Any, factor: float) -> None:
        """Multiplies this rank's gradients by the factor, times the ranks over which the engine averages."""
        if self.world > 1:
            self._complete(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor * self.world)


class EngineGuard(WindowGuard):
    """A ``WindowGuard`` whose backwards and reduction are those of a DeepSpeed engine."""

    def __init__(self, engine: DeepSpeedEngine, *, split: Split, repeat: bool) -> None:
        super().__init__([], [engine.module], split=split, repeat=repeat, ranks=EngineRanks(engine))
        self._engine, self._zero = engine, engine.zero_optimization_stage() > 0
        if repeat and isinstance(engine.basic_optimizer, Optimizer):
            protect_step(engine.basic_optimizer)

    def window(self, batches: Iterable[Any]) -> Iterator[GuardedMicroBatch]:
        """The micro-batches of a window; after the last one, the engine has reduced the gradients for ``engine.step``.

        Raises:
            InputError: gradients are left from before, a part was not entered, or no backward ran.
            OtherRankOutOfMemoryError: another rank could not finish.
        """
        with self._unreduced():
            try:
                yield from super().window(batches)
            except BaseException:
                self._restore()
                raise
        if not self._zero:
            self._engine.allreduce_gradients()

    def _unreduced(self) -> AbstractContextManager[None]:
        """Inside, backwards add to whole gradients on this rank; ZeRO reduces them where it ends."""
        unreduced: AbstractContextManager[None] = (
            self._engine.coalesce_grad_reduction() if self._zero else self._engine.no_sync()
        )
        return unreduced

    def _run_backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def _restore(self) -> None:
        super()._restore()
        optimizer = self._engine.optimizer
        while self._zero and optimizer._backward_active_depth:
            optimizer.exit_backward()


def guard(engine: DeepSpeedEngine, *, split: Split = halves, repeat: bool = True) -> EngineGuard:
    """Exact accumulation, and repeating of what ran out of memory, with an engine of DeepSpeed.

    Args:
        engine: as ``deepspeed.initialize`` gives it, with ``gradient_accumulation_steps`` 1: the guard accumulates.
        split: cuts a batch into smaller ones; None where it cannot. Default: halves along the samples.
        repeat: False only accumulates: a memory failure passes through.

    Raises:
        InputError: something that could not be accumulated exactly or be undone.
    """
    if not isinstance(engine, DeepSpeedEngine) or isinstance(engine, PipelineEngine):
        why = f"{type(engine).__name__} is no engine that runs a whole micro-batch at a time"
        raise InputError(_SEEN, why, "write engine, *_ = deepspeed.initialize(...), and memfit.deepspeed.guard(engine)")
    steps = engine.gradient_accumulation_steps()
    if steps != 1:
        why = f"the engine accumulates {steps} micro-batches by itself"
        raise InputError(_SEEN, why, 'write "gradient_accumulation_steps": 1: the guard accumulates')
    if not engine.managed_gradient_accumulation():
        why = "the engine leaves the end of a window to its caller"
        raise InputError(_SEEN, why, 'leave "managed_gradient_accumulation" out')
    if not _holds_plain_gradients(engine):
        why = f"{type(engine.optimizer).__name__} adds gradients up in buffers of its own"
        raise InputError(_SEEN, why, 'write "torch_autocast" and fp32 weights instead of "bf16" or "fp16"')
    if engine.zero_optimization_stage() == 3:
        why = "stage 3 gathers weights in every forward: a rank cannot repeat alone, and its gradients are parts"
        raise InputError(_SEEN, why, 'write "stage": 2, or memfit run with --engine zero3')
    if engine.has_moe_layers or engine.mp_world_size > 1:
        raise InputError(_SEEN, "ranks meet inside of the forward", "leave the guard out")
    return EngineGuard(engine, split=split, repeat=repeat)


def _holds_plain_gradients(engine: DeepSpeedEngine) -> bool:
    """Whether gradients are ``parameter.grad`` until they are reduced."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() > 0:
        return isinstance(optimizer, ZeROOptimizer) and not getattr(optimizer, "use_grad_accum_attribute", False)
    return isinstance(optimizer, Optimizer) and isinstance(engine.module, nn.Module)
