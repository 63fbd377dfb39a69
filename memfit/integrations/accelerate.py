"""Accelerate: ``prepare`` that also gives a guard.

model, optimizer, loader, guard = memfit.accelerate.prepare(accelerator, model, optimizer, loader)
for batches in memfit.accelerate.windows(loader, 4):
    for part in guard.window(batches):
        with part as batch: guard.backward(mean_loss(model, batch), units)
    optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.accumulation.guard import WindowGuard, protect_step
from memfit.accumulation.wrapped_optimizer import unwrapped
from memfit.errors import InputError


def prepare(accelerator: Any, *objects: Any, repeat: bool = True) -> tuple[Any, ...]:
    """``accelerator.prepare(*objects)``, and a guard of its models and optimizers as the last value.

    Raises:
        InputError: the accelerator accumulates by itself, DeepSpeed or Megatron step, or the guard refuses the models.
    """
    seen = "memfit.accelerate.prepare"
    if accelerator.gradient_accumulation_steps != 1:
        why = f"the accelerator accumulates {accelerator.gradient_accumulation_steps} micro-batches by itself"
        raise InputError(seen, why, "write Accelerator() without gradient_accumulation_steps: the guard accumulates")
    if accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM"):
        why = f"{accelerator.distributed_type.value} runs backward and step by itself"
        raise InputError(seen, why, "write accelerator.prepare, and memfit.watch for the memory")
    for each in objects:
        if isinstance(each, Optimizer) and repeat:
            protect_step(each)
    prepared = accelerator.prepare(*objects)
    values = list(prepared) if isinstance(prepared, tuple) else [prepared]
    models = [value for value in values if isinstance(value, nn.Module)]
    optimizers = [unwrapped(value) for value in values if isinstance(value, Optimizer)]
    if not models or not optimizers:
        raise InputError(
            seen, "a model or an optimizer is missing", "write prepare(accelerator, model, optimizer, ...)"
        )
    accelerator.sync_gradients = True  # an Accelerator that accumulated in this process before may have left it False
    guard = WindowGuard(optimizers, models, scaler=accelerator.scaler, repeat=repeat)
    return (*values, guard)


def windows(loader: Iterable[Any], micro_batches: int) -> Iterator[list[Any]]:
    """The loader's batches in windows of this many; the last window may have fewer, and counts by its units."""
    if micro_batches < 1:
        raise InputError(f"windows(loader, {micro_batches})", "less than one micro-batch", "write 1 or more")
    source = iter(loader)
    while batches := list(islice(source, micro_batches)):
        yield batches
