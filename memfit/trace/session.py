"""Session: a job built once on the virtual device, and micro-batches of it traced under many choices of recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from memfit.apply.checkpointing import recompute
from memfit.apply.optimizer_implementation import supports, with_implementation
from memfit.apply.phase_memory import with_settings
from memfit.apply.state_streaming import copy_to_host, large, streams
from memfit.apply.train_state import TrainState
from memfit.apply.window import run_window, stepping
from memfit.events import ALLOCATE, FREE, Trace
from memfit.job import Job, Shape
from memfit.torch_compat import DisableTorchFunction
from memfit.trace.categories import categorise_state, mark
from memfit.trace.columns import OF_ONE_CARD, of_operators, of_storages
from memfit.trace.operator_scratch import Key, with_scratch
from memfit.trace.session_state import SessionState, TraceNotes, add_notes, notes_of, notes_since, state_of
from memfit.trace.step import Tracing, virtual_job
from memfit.trace.step_phases import check_stepped, synthetic_micro_batch
from memfit.trace.tracer import Tracer


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroTrace:
    """Forward and backward of one micro-batch, with everything that is resident then, as a trace of one phase."""

    trace: Trace
    calls: tuple[Key | None, ...]
    """For each operator, the call as ``memfit.trace.operator_scratch`` describes it; empty for a card."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CopiedTrace:
    """A micro-batch that a copy of a session has traced, and the state in which it did: that was the same after it."""

    micro_trace: MicroTrace
    state: SessionState
    notes: TraceNotes


class Session:
    """Made by ``open_session``."""

    def __init__(self, train_state: TrainState, tracer: Tracer) -> None:
        self.train_state, self._tracer = train_state, tracer
        self._alive: set[int] = set()
        self._followed = 0
        """Events after which these storages are alive."""

    @property
    def overwritten(self) -> set[str]:
        """Paths of modules whose costly outputs were written to afterwards: ``selective`` cannot keep those."""
        paths = list(self._tracer.modules)
        return {paths[index] for index in self._tracer.overwritten}

    @property
    def net_kind(self) -> str:
        """The kind of net, as in ``Trace.net_kind``, from what was traced so far."""
        return self._tracer.kind_of_net()

    @property
    def tracer(self) -> Tracer:
        """What records it."""
        return self._tracer

    def micro_batch(
        self, shape: Shape, modes: Mapping[str, str], *, accumulated: bool, precision: str | None = None
    ) -> MicroTrace:
        """One micro-batch under these modes; weights stay as they are.

        Args:
            accumulated: whether gradients of an earlier micro-batch are resident, and are added to.
            precision: another than the job's, of a job that builds the same nets in both.
        """
        tracer, train_state = self._tracer, self.train_state
        if precision is not None:
            train_state = replace(
                train_state, job=with_settings(train_state.job, {"precision": precision}), scaler=None
            )
        if accumulated and train_state.job.zero_grad == "after_forward":
            train_state = replace(train_state, job=with_settings(train_state.job, {"zero_grad": "after_step"}))
        tracer.mark("setup")
        held = self._accumulated_in() if accumulated or train_state.job.zero_grad == "after_forward" else []
        before = _make_gradients(held)
        first, row, calls = len(tracer.kind), len(tracer.op_rows), len(tracer.call_memory.calls)
        if tracer.device_type == "cpu":
            tracer.descriptions = []
        try:
            with recompute(train_state.nets, modes):
                micro = synthetic_micro_batch(train_state.job, shape, train_state.device, tracer)
                run_window(train_state, [micro], lambda part: mark(tracer, train_state, part), step=False)
            return MicroTrace(trace=self._slice(first, row, calls), calls=tuple(tracer.descriptions or ()))
        finally:
            tracer.descriptions = None
            _put_gradients(held, before)

    def copied_trace(
        self, shape: Shape, modes: Mapping[str, str], accumulated: bool, precision: str | None
    ) -> CopiedTrace | None:
        """``micro_batch`` for another copy of this session; None where it leaves another state behind."""
        state, notes = self.state(), notes_of(self._tracer)
        micro_trace = self.micro_batch(shape, modes, accumulated=accumulated, precision=precision)
        if self.state() != state:
            return None
        return CopiedTrace(micro_trace=micro_trace, state=state, notes=notes_since(self._tracer, notes))

    def accept(self, copied: CopiedTrace) -> bool:
        """Takes a trace for one of its own; False where ``micro_batch`` might give another one now."""
        if copied.state != self.state():
            return False
        add_notes(self._tracer, copied.notes)
        return True

    def state(self) -> SessionState:
        """What the next trace depends on."""
        self._follow(len(self._tracer.kind))
        return state_of(self._tracer, sorted(self._alive))

    def optimizer_step(self, implementation: str = "job", *, by_parts: bool = False) -> MicroTrace | None:
        """Clipping and the optimizers' steps alone, on gradients that are there; None where they cannot run so.

        Args:
            implementation: another than that of the session; ``job``: the same.
            by_parts: with state that waits on the host and visits part by part, which is then on the device again.
        """
        if by_parts:
            with self._state_on_the_host() as train_state:
                return self._optimizer_step(train_state, implementation)
        return self._optimizer_step(self.train_state, implementation)

    def _optimizer_step(self, train_state: TrainState, implementation: str) -> MicroTrace | None:
        tracer = self._tracer
        if implementation != "job" and not all(
            supports(stepped, implementation) for stepped in train_state.optimizers.values()
        ):
            return None
        optimizers = with_implementation(train_state.optimizers, implementation)
        for name, optimizer in optimizers.items():
            optimizer.state = train_state.optimizers[name].state
        stepped = {name: train_state.engine.stepped(optimizer) for name, optimizer in train_state.optimizers.items()}
        before = _make_gradients([parameter for parameters in stepped.values() for parameter in parameters])
        first, row, calls = len(tracer.kind), len(tracer.op_rows), len(tracer.call_memory.calls)
        if tracer.device_type == "cpu":
            tracer.descriptions = []
        for name, optimizer in optimizers.items():
            mark(tracer, train_state, "optimizer")
            _step(train_state, name, optimizer)
            _put_gradients(stepped[name], before)
        micro_trace = MicroTrace(trace=self._slice(first, row, calls), calls=tuple(tracer.descriptions or ()))
        tracer.descriptions = None
        return micro_trace

    def streamed_bytes(self, grain: int = 1) -> int:
        """Bytes of the optimizer state that would wait on the host between steps; each tensor's is rounded up to
        ``grain``."""
        return sum(-(-state[key].nbytes // grain) * grain for state, key in self._streamed())

    def _streamed(self) -> list[tuple[Any, str]]:
        able = [optimizer for optimizer in self.train_state.optimizers.values() if streams(optimizer)]
        return [(state, key) for streamed in able for state in streamed.state.values() for key, _ in large(state)]

    @contextmanager
    def _state_on_the_host(self) -> Iterator[TrainState]:
        for state, key in self._streamed():
            state[key] = copy_to_host(state[key])
        try:
            yield replace(self.train_state, optimizer_state="host")
        finally:
            for state, key in self._streamed():
                state[key] = state[key].to(self.train_state.device)
            categorise_state(self._tracer, self.train_state)

    def _accumulated_in(self) -> list[Tensor]:
        """What holds the gradients of an earlier micro-batch."""
        parameters = [parameter for some in self.train_state.stepped.values() for parameter in some]
        return self.train_state.engine.accumulated(parameters)

    def _slice(self, first: int, row: int, calls: int) -> Trace:
        """The events from ``first`` on; what was there before is allocated at their beginning."""
        tracer = self._tracer
        self._follow(first)
        events = slice(first, len(tracer.kind))  # what Python frees from here on comes after them
        kind = np.array(tracer.kind[events], np.int8)
        storages = np.array(tracer.storage[events], np.int32)
        used = np.concatenate([np.array(sorted(self._alive), np.int64), storages[kind == ALLOCATE]])
        before = len(self._alive)
        local = np.full(len(tracer.nbytes), -1, np.int32)
        local[used] = np.arange(len(used), dtype=np.int32)
        tail = of_storages(tracer, used.tolist()) | of_operators(tracer, row) | dict(OF_ONE_CARD)
        trace = Trace(
            **tail | {"made_by": np.maximum(tail["made_by"] - row, -1)},
            kind=np.concatenate([np.full(before, ALLOCATE, np.int8), kind]),
            storage=np.concatenate([np.arange(before, dtype=np.int32), np.where(storages >= 0, local[storages], -1)]),
            operator=np.concatenate(
                [np.zeros(before, np.int32), np.maximum(np.array(tracer.operator[events], np.int32) - row, 0)]
            ),
            modules=tuple(tracer.modules),
            phases=(("train", 0, before + len(storages)),),
            is_workspace_configured=tracer.call_memory.is_workspace_configured,
        )
        shifted = [
            (position - first + before, max(owner - row, 0), key)
            for position, owner, key in tracer.call_memory.calls[calls:]
        ]
        return with_scratch(trace, shifted)

    def _follow(self, position: int) -> None:
        """What is alive before an event."""
        tracer = self._tracer
        events = slice(self._followed, position)
        for kind, storage in zip(tracer.kind[events], tracer.storage[events], strict=True):
            if kind == ALLOCATE:
                self._alive.add(storage)
            elif kind == FREE:
                self._alive.discard(storage)
        self._followed = position


def _make_gradients(parameters: Sequence[Tensor]) -> dict[int, Tensor | None]:
    """Gives each a gradient.

    Returns:
        Those they had, by the parameter's id. DeepSpeed keeps gradients on the host between windows.
    """
    with DisableTorchFunction():
        before = {id(parameter): parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
    return before


def _put_gradients(parameters: Sequence[Tensor], gradients: Mapping[int, Tensor | None]) -> None:
    with DisableTorchFunction():
        for parameter in parameters:
            parameter.grad = gradients[id(parameter)]


def _step(train_state: TrainState, name: str, optimizer: Optimizer) -> None:
    """Clips and steps by the gradients that were made, without collectives."""
    engine = train_state.engine
    with engine.local_step(optimizer) as step:
        if train_state.job.clip is not None:
            engine.clip(train_state.parameters_of((name,)), train_state.job.clip)
        with stepping(train_state, optimizer):
            step()


@contextmanager
def open_session(job: Job, how: Tracing, shape: Shape) -> Iterator[Session]:
    """The job on the virtual device, after one window of this shape, which makes the optimizers' state."""
    with virtual_job(job, how) as (virtual, tracer, train_state):
        with recompute(train_state.nets, how.checkpointing):
            micro = synthetic_micro_batch(job, shape, virtual.device, tracer)
            check_stepped(run_window(train_state, [micro], lambda part: mark(tracer, train_state, part)))
            categorise_state(tracer, train_state)
            tracer.collect_cycles()
        for optimizer in train_state.optimizers.values():
            train_state.engine.zero_grad(optimizer)
        yield Session(train_state, tracer)
