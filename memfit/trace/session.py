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

from memfit.apply.implementation import supports, with_implementation
from memfit.apply.recompute import recompute
from memfit.apply.rig import Rig, build
from memfit.apply.room import with_settings
from memfit.apply.streaming import large, on_the_host, streams
from memfit.apply.window import run_window, stepping
from memfit.device.libraries import as_in_a_real_run
from memfit.engine.start import start
from memfit.engine.zero import Zero
from memfit.engine.zero_parts import step_parts
from memfit.events import ALLOCATE, FREE, Trace
from memfit.job import Job, Shape
from memfit.trace.scratch import Key, with_scratch
from memfit.trace.step import (
    Tracing,
    categorise_state,
    mark,
    of_operators,
    of_storages,
    on_virtual_device,
    ranks_of,
    synthetic_micro_batch,
)
from memfit.trace.tracer import Tracer


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroTrace:
    """Forward and backward of one micro-batch, with everything that is resident then, as a trace of one phase."""

    trace: Trace
    calls: tuple[Key | None, ...]
    """For each operator, the call as ``memfit.trace.scratch`` describes it; empty for a card."""


class Session:
    """Made by ``open_session``."""

    def __init__(self, rig: Rig, tracer: Tracer) -> None:
        self.rig, self._tracer = rig, tracer
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
        """As ``Trace.net_kind``, of what was traced so far."""
        return str(self._tracer.net_kind)

    def micro_batch(
        self, shape: Shape, modes: Mapping[str, str], *, accumulated: bool, precision: str | None = None
    ) -> MicroTrace:
        """One micro-batch under these modes; weights stay as they are.

        Args:
            accumulated: whether gradients of an earlier micro-batch are resident, and are added to.
            precision: another than the job's, of a job that builds the same nets in both.
        """
        tracer, rig = self._tracer, self.rig
        if precision is not None:
            rig = replace(rig, job=with_settings(rig.job, {"precision": precision}), scaler=None)
        if accumulated and rig.job.zero_grad == "after_forward":
            rig = replace(rig, job=with_settings(rig.job, {"zero_grad": "after_step"}))
        tracer.mark("setup")
        held = self._accumulated_in() if accumulated or rig.job.zero_grad == "after_forward" else []
        _make_gradients(held)
        first, row, calls = len(tracer.kind), len(tracer.op_rows), len(tracer.calls)
        if tracer.device_type == "cpu":
            tracer.descriptions = []
        with recompute(rig.nets, modes):
            micro = synthetic_micro_batch(rig.job, shape, rig.device, tracer)
            run_window(rig, [micro], lambda part: mark(tracer, rig, part), step=False)
        found = MicroTrace(trace=self._slice(first, row, calls), calls=tuple(tracer.descriptions or ()))
        tracer.descriptions = None
        _drop_gradients(held)
        return found

    def optimizer_step(self, implementation: str = "job", *, by_parts: bool = False) -> MicroTrace | None:
        """Clipping and the optimizers' steps alone, on gradients that are there; None where they cannot run so.

        Args:
            implementation: another than that of the session; ``job``: the same.
            by_parts: with state that waits on the host and visits part by part, which is then on the device again.
        """
        if by_parts:
            with self._state_on_the_host() as rig:
                return self._optimizer_step(rig, implementation)
        return self._optimizer_step(self.rig, implementation)

    def _optimizer_step(self, rig: Rig, implementation: str) -> MicroTrace | None:
        tracer = self._tracer
        if implementation != "job" and not all(supports(one, implementation) for one in rig.optimizers.values()):
            return None
        optimizers = with_implementation(rig.optimizers, implementation)
        for name, optimizer in optimizers.items():
            optimizer.state = rig.optimizers[name].state
        _make_gradients([one for optimizer in rig.optimizers.values() for one in rig.engine.stepped(optimizer)])
        first, row, calls = len(tracer.kind), len(tracer.op_rows), len(tracer.calls)
        if tracer.device_type == "cpu":
            tracer.descriptions = []
        for name, optimizer in optimizers.items():
            mark(tracer, rig, "optimizer")
            _step(rig, name, optimizer)
        found = MicroTrace(trace=self._slice(first, row, calls), calls=tuple(tracer.descriptions or ()))
        tracer.descriptions = None
        return found

    def streamed_bytes(self, grain: int = 1) -> int:
        """Of state that would wait on the host between steps, if state did; each tensor's rounded up to ``grain``."""
        return sum(-(-state[key].nbytes // grain) * grain for state, key in self._streamed())

    def _streamed(self) -> list[tuple[Any, str]]:
        able = [optimizer for optimizer in self.rig.optimizers.values() if streams(optimizer)]
        return [(state, key) for one in able for state in one.state.values() for key, _ in large(state)]

    @contextmanager
    def _state_on_the_host(self) -> Iterator[Rig]:
        for state, key in self._streamed():
            state[key] = on_the_host(state[key])
        try:
            yield replace(self.rig, optimizer_state="host")
        finally:
            for state, key in self._streamed():
                state[key] = state[key].to(self.rig.device)
            categorise_state(self._tracer, self.rig)

    def _accumulated_in(self) -> list[Tensor]:
        """What holds the gradients of an earlier micro-batch; under ZeRO's stage 3 a buffer that is always there."""
        engine = self.rig.engine
        if isinstance(engine, Zero) and engine.stage > 1:
            return engine.stepped(engine.divided.zero.optimizer) if engine.stage == 2 else []
        return [parameter for some in self.rig.stepped.values() for parameter in some]

    def _slice(self, first: int, row: int, calls: int) -> Trace:
        """The events from ``first`` on; what was there before is allocated at their beginning."""
        tracer = self._tracer
        self._follow(first)
        kind = np.array(tracer.kind[first:], np.int8)
        found = np.array(tracer.storage[first:], np.int32)
        used = np.concatenate([np.array(sorted(self._alive), np.int64), found[kind == ALLOCATE]])
        before = len(self._alive)
        local = np.full(len(tracer.nbytes), -1, np.int32)
        local[used] = np.arange(len(used), dtype=np.int32)
        tail = of_storages(tracer, used.tolist()) | of_operators(tracer, row)
        trace = Trace(
            **tail | {"made_by": np.maximum(tail["made_by"] - row, -1)},
            kind=np.concatenate([np.full(before, ALLOCATE, np.int8), kind]),
            storage=np.concatenate([np.arange(before, dtype=np.int32), np.where(found >= 0, local[found], -1)]),
            operator=np.concatenate(
                [np.zeros(before, np.int32), np.maximum(np.array(tracer.operator[first:], np.int32) - row, 0)]
            ),
            modules=tuple(tracer.modules),
            phases=(("train", 0, before + len(found)),),
        )
        shifted = [
            (position - first + before, max(owner - row, 0), key) for position, owner, key in tracer.calls[calls:]
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


def _make_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)


def _drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _step(rig: Rig, name: str, optimizer: Optimizer) -> None:
    """Clips and steps by the gradients that were made; under ZeRO nothing is gathered."""
    engine = rig.engine
    if isinstance(engine, Zero):
        zero = engine.divided.zero
        zero.averaged_gradients = {0: [part.grad for part in engine.stepped(optimizer)]}
    if rig.job.clip is not None:
        engine.clip(rig.parameters_of((name,)), rig.job.clip)
    if isinstance(engine, Zero):
        step_parts(zero, engine.stage, optimizer)
        zero.averaged_gradients = {}
    else:
        with stepping(rig, optimizer):
            optimizer.step()
    _drop_gradients(engine.stepped(optimizer))


@contextmanager
def open_session(job: Job, how: Tracing, shape: Shape) -> Iterator[Session]:
    """The job on the virtual device, after one window of this shape, which makes the optimizers' state."""
    with (
        on_virtual_device(how.device) as virtual,
        as_in_a_real_run(),
        ranks_of(how, tracer := Tracer(virtual)),
        tracer.recording(),
    ):
        engine = start(how.engine, virtual.device, **how.engine_choices)
        with tracer.phase("setup"):
            rig = build(
                job, virtual.device, engine, how.implementation, optimizer_state=how.optimizer_state,
                average=how.average,
            )  # fmt: skip
            tracer.name_modules(rig.nets)
            categorise_state(tracer, rig)
        with recompute(rig.nets, how.checkpointing):
            micro = synthetic_micro_batch(job, shape, virtual.device, tracer)
            run_window(rig, [micro], lambda part: mark(tracer, rig, part))
            categorise_state(tracer, rig)
        for optimizer in rig.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        yield Session(rig, tracer)
