"""Before the first step, a run proves that it fits: each phase once, largest first, and nothing of it stays.

Training's largest micro-batch, the same with its gradients resident, the optimizers' steps; then, beside the state that
these make, validation and saving. What does not fit is found in seconds and not after hours: micro-batches become
smaller, validation too.

A step is tried whole, except that writes to what was there before are left out; the state that it makes is dropped in
the end. One that memory fails is tried twice more, as in a window.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memfit.apply.buffer_snapshot import BufferSnapshot, CannotRepeatError
from memfit.apply.losses import MicroBatch
from memfit.apply.random_state import random_state, set_random_state
from memfit.apply.train_state import TrainState
from memfit.apply.window import Attempt, Guard, TurnGradients, run_window
from memfit.batch.windows import Windows
from memfit.engine.collectives import gather
from memfit.engine.protocol import Engine
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import TorchDispatchMode
from memfit.torch_compat.attributes import local_storage_id, schema_of
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from memfit.train.launch.memory_limit import is_memory_failure, lifted
from memfit.train.loop.run_context import RunContext, make_micro_batch, padded_units
from memfit.train.recovery.exactly_once import ATTEMPTS
from memfit.train.recovery.failure import clear_frames, give_back
from memfit.train.recovery.recovery import Recovery
from memfit.train.recovery.step_attributes import StepAttributes, state_values

PROVEN_FROM = 64
"""Windows among which the largest micro-batch is looked for."""


@contextmanager
def preflight_training(
    train_state: TrainState, parts: Sequence[MicroBatch], recovery: Recovery, mark: Callable[[str], None]
) -> Iterator[None]:
    """A window of these micro-batches, and its steps. Inside, the optimizers' state and what gradients a window leaves
    behind are there, as they will be later; afterwards nothing of it.

    Raises:
        SampleTooLargeError: one of its samples does not fit alone.
        CannotRepeatError: its forward changes tensors other than buffers, which cannot be undone. Every rank raises it.
    """
    moving, random = BufferSnapshot(train_state.nets, train_state.job), random_state(train_state.device)
    moving.keep()
    scaler = dict(train_state.scaler.state_dict()) if train_state.scaler is not None else {}
    stale = {p: p.grad for net in train_state.nets.values() for p in net.parameters()}
    trial = replace(train_state, schedules={})
    changed: list[str] = []
    made: list[tuple[Optimizer, Any]] = []

    def gradients(attempt: Attempt, parts: Sequence[MicroBatch]) -> TurnGradients:
        result = recovery.guard.gradients(attempt, parts)
        changed.extend(moving.changed())
        moving.watch()
        return result

    def once(act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor]) -> None:
        def tried() -> None:
            if optimizer is None:
                with _LeavesAlone(list(further)):
                    act()
            else:
                made.extend((optimizer, key) for key in _tried(train_state.engine, act, optimizer))

        if train_state.engine.syncs_in_step:  # all ranks start again where it fails
            recovery.guard.once(tried, optimizer, further)
        else:
            _again(tried, train_state.device)
        moving.watch()

    guard = Guard(gradients=gradients, once=once, norms=recovery.guard.norms)
    recovery.begin()
    try:
        run_window(trial, parts, mark, guard=guard)
        names = sorted({name for rank in gather(train_state.engine, changed) for name in rank})
        if names:
            raise CannotRepeatError(names)
        yield
    finally:
        for optimizer, key in made:
            optimizer.state.pop(key, None)
        recovery.begin()
        moving.restore(checked=False)
        for parameter, gradient in stale.items():
            parameter.grad = gradient
        if train_state.scaler is not None:
            train_state.scaler.load_state_dict(scaler)
        set_random_state(random, train_state.device)
        give_back(train_state.device)


def _again(act: Callable[[], None], device: torch.device) -> None:
    """Runs what leaves nothing behind where it fails; after a memory failure again, once there was made room."""
    for _ in range(ATTEMPTS - 1):
        try:
            return act()
        except Exception as error:
            if not is_memory_failure(error):
                raise
            with lifted():
                clear_frames(error)
                give_back(device)
    return act()


def _tried(engine: Engine, act: Callable[[], None], optimizer: Optimizer) -> set[Any]:
    """Runs a step without its effect, but for the state that it makes; gives the keys of that state."""
    parameters = engine.stepped(optimizer)
    had, attributes = set(optimizer.state), StepAttributes(optimizer, state_values(optimizer))
    others = [*attributes.group_tensors, *attributes.further]
    kept = {p: dict(optimizer.state[p]) for p in had}
    made: set[Any] = set()
    try:
        with _LeavesAlone([*parameters, *tensors_in(list(optimizer.state.values())), *others]):
            act()
        made = set(optimizer.state) - had
        return made
    finally:
        for parameter in set(optimizer.state) - had - made:
            del optimizer.state[parameter]
        for parameter, state in kept.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(state)
        attributes.put_back()


def try_saving(saver: Saver | ShardedSaver, train_state: TrainState, window: int) -> None:
    """Saves beside the checkpoints, and takes it away again. Every rank that has a saver calls it."""
    place, written = saver.checkpoints, saver.written
    saver.checkpoints = Checkpoints(place.path / ".trial", 1)
    try:
        saver.save(train_state, window)
        saver.finish()
    finally:
        shutil.rmtree(saver.checkpoints.path, ignore_errors=True)
        saver.checkpoints, saver.written = place, written


class _LeavesAlone(TorchDispatchMode):
    """Operators run as ever, but do not write to these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = {local_storage_id(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(schema_of(func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(local_storage_id(tensor) in self._kept for tensor in tensors_in(written)):
            return written[0] if schema_of(func).returns else None
        return func(*args, **kwargs)


def try_lone_sample(
    train_state: TrainState, context: RunContext, recovery: Recovery, mark: Callable[[str], None]
) -> None:
    """Tries a window of one sample where an epoch of larger micro-batches ends with one. A job may refuse it, as one
    that normalises over the batch does, and would do so after hours. Every rank calls it.

    Raises:
        Exception: see ``preflight_training``, and what the job raises.
    """
    if not isinstance(context.windows, Windows):
        return
    last = context.windows.last_of_epoch(context.first)
    first, ending = (context.windows.window(number).micro_batches for number in (context.first, last))
    lone = min(ending, key=len)
    if last >= context.last or len(lone) > 1 or min(map(len, first)) == 1:
        return
    make = partial(make_micro_batch, train_state, context, context.first)
    parts = recovery.micro_batches([lone], lambda ids, keeps: make(ids, keeps=keeps))
    with preflight_training(train_state, parts, recovery, mark):
        pass


def largest_micro_batches(train_state: TrainState, context: RunContext, recovery: Recovery) -> list[MicroBatch]:
    """Of the first windows, the micro-batch of any rank that costs most, as often as a trial needs it. Every rank tries
    the same."""
    some = range(context.first, min(context.first + PROVEN_FROM, context.last))
    shares = [share for number in some for share in context.windows.window(number).ranks]
    windows = [recovery.sizes.parts_of(share) for share in shares]
    ids = max((ids for window in windows for ids in window), key=lambda ids: padded_units(context, ids))
    most = max(map(len, windows))
    count = most if train_state.engine.stages > 1 else min(most, 2)
    make = partial(make_micro_batch, train_state, context, context.first)
    return recovery.micro_batches([ids] * count, lambda ids, keeps: make(ids, keeps=keeps))
