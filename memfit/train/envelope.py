"""Before the first step, a run proves that it fits: each phase once, largest first, and nothing of it stays.

Training's largest micro-batch, the same with its gradients resident, the optimizers' steps, validation, saving. What
does not fit is found in seconds and not after hours: micro-batches become smaller, validation too.

A step is tried whole, except that writes to what was there before are left out; the state that it makes is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.apply.losses import MicroBatch
from memfit.apply.moving import CannotRepeatError, Moving
from memfit.apply.random_state import random_state, set_random_state
from memfit.apply.rig import Rig, tensors_in
from memfit.apply.window import Attempt, Guard, TurnGradients, run_window
from memfit.engine.protocol import Engine
from memfit.engine.ranks import reported
from memfit.train.once import numbers_of, put_numbers_back
from memfit.train.recovery import Recovery, give_back


def prove_training(rig: Rig, parts: Sequence[MicroBatch], recovery: Recovery, mark: Callable[[str], None]) -> None:
    """A window of these micro-batches, and its steps, without leaving anything behind.

    Raises:
        SampleTooLargeError: one of its samples does not fit alone.
        CannotRepeatError: its forward changes tensors other than buffers, which cannot be undone. Every rank raises it.
    """
    moving, random = Moving(rig.nets), random_state(rig.device)
    moving.keep()
    scaler = dict(rig.scaler.state_dict()) if rig.scaler is not None else {}
    stale = {p: p.grad for net in rig.nets.values() for p in net.parameters()}
    trial = replace(rig, schedules={})
    changed: list[str] = []

    def gradients(attempt: Attempt, parts: Sequence[MicroBatch]) -> TurnGradients:
        made = recovery.guard.gradients(attempt, parts)
        changed.extend(moving.changed())
        moving.watch()
        return made

    def once(act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor]) -> None:
        _tried(rig.engine, act, optimizer, further)
        moving.watch()

    guard = Guard(gradients=gradients, once=once, norms=recovery.guard.norms)
    recovery.begin()
    try:
        run_window(trial, parts, mark, guard=guard)
    finally:
        recovery.begin()
        moving.restore(checked=False)
        for parameter, gradient in stale.items():
            parameter.grad = gradient
        if rig.scaler is not None:
            rig.scaler.load_state_dict(scaler)
        set_random_state(random, rig.device)
        give_back(rig.device)
    told = reported(rig.engine, changed[0] if changed else None)
    if told is not None:
        raise CannotRepeatError(f"the forward changed {told}, and there is no copy from before")


def _tried(engine: Engine, act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor]) -> None:
    """Runs a step without its effect."""
    if optimizer is None:
        with _LeavesAlone(list(further)):
            act()
        return
    parameters = engine.stepped(optimizer)
    had, numbers = set(optimizer.state), numbers_of(optimizer)
    kept = {p: dict(optimizer.state[p]) for p in had}
    try:
        with _LeavesAlone([*parameters, *tensors_in(list(optimizer.state.values()))]):
            act()
    finally:
        for parameter in set(optimizer.state) - had:
            del optimizer.state[parameter]
        for parameter, state in kept.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(state)
        put_numbers_back(numbers)


class _LeavesAlone(TorchDispatchMode):
    """Operators run as ever, but do not write to these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(tensor.untyped_storage()._cdata in self._kept for tensor in tensors_in(written)):
            return written[0] if func._schema.returns else None
        return func(*args, **kwargs)


def largest(windows: Sequence[Sequence[tuple[int, ...]]], cost: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
    """The micro-batch of these windows that costs most."""
    return max((ids for window in windows for ids in window), key=cost)
