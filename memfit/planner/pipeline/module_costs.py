"""Seconds and bytes of the modules of a pipeline, from one micro-batch that is traced on one device, or on one of those
that hold parts of its layers and sequences.

Operators count for the module that ran last: what lies between two modules is done by the stage that ends there, and
the loss and its backward by the last one. What comes before the first module, such as batches, masks and frozen nets,
is done by every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from memfit.apply.train_state import TrainState
from memfit.blocks import find_module
from memfit.engine.expert_parallel import sending_experts
from memfit.events import CATEGORIES, Trace
from memfit.job import Shape
from memfit.planner.search.traced_job import TracedJob
from memfit.torch_compat.attributes import local_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleCosts:
    """What each of M modules takes for one micro-batch, and what it holds."""

    units: int
    """Of the micro-batch."""
    common_seconds: float
    """Of what every stage does before its modules."""
    forward_seconds: np.ndarray
    """float (M,)."""
    backward_seconds: np.ndarray
    """float (M,): of its backward, and of what it computes again there."""
    kept_bytes: np.ndarray
    """float (M,): what the forward leaves for the backward."""
    state: StateBytes

    def at(self, units: int, other: ModuleCosts) -> ModuleCosts:
        """Of micro-batches of so many units, by the line through these and ``other``; in proportion to the units where
        both are of as many."""
        same = other.units == self.units
        part = (units - self.units) / (self.units if same else other.units - self.units)

        def line(first: np.ndarray, second: np.ndarray) -> np.ndarray:
            return np.maximum(first + part * (first if same else second - first), 0.0)

        common = line(np.array(self.common_seconds), np.array(other.common_seconds))
        return ModuleCosts(
            units=units,
            common_seconds=float(common),
            forward_seconds=line(self.forward_seconds, other.forward_seconds),
            backward_seconds=line(self.backward_seconds, other.backward_seconds),
            kept_bytes=line(self.kept_bytes, other.kept_bytes),
            state=self.state,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StateBytes:
    """What each of M modules holds between micro-batches."""

    parameters: np.ndarray
    """float (M,)."""
    gradients: np.ndarray
    """float (M,)."""
    others: np.ndarray
    """float (M,): state of the optimizers, and averages of the weights."""

    def held(self, shards: int) -> np.ndarray:
        """float (M,): bytes of a stage's rank during a schedule. Of ``shards`` ranks each holds a part of all, and
        beside it parameters and gradients whole."""
        if shards == 1:
            return self.parameters + self.gradients + self.others
        return self.parameters + self.gradients + (self.parameters + self.others) / shards


def trace_module_costs(
    traced_job: TracedJob, paths: Sequence[str], shape: Shape, modes: Mapping[str, str], shards: int = 1, *,
    timed: bool = True,
) -> ModuleCosts:  # fmt: skip
    """Traces a micro-batch of this shape.

    Args:
        traced_job: on a device that holds the nets whole, or on one of the ranks over which they are sharded.
        paths: of the modules, in their order.
        modes: of recomputing.
        shards: how many those are.
        timed: whether operators of a CPU are timed on this machine; else they follow its rates. Of a card whose rates
            are not known, seconds are the work that stands for them.
    """
    traced = traced_job.trace(shape, modes, accumulated=True)
    seconds = traced_job.seconds(traced, timed=timed)
    if seconds is None:
        seconds = traced_job.work(traced)
    owner, count = _owners(traced.trace, paths), len(paths)
    parts = np.array(traced.trace.parts)[traced.trace.operator_part]

    def of_modules(which: np.ndarray) -> np.ndarray:
        return np.bincount(owner[which], weights=seconds[which], minlength=count)

    return ModuleCosts(
        units=shape.units,
        common_seconds=float(seconds[owner < 0].sum()),
        forward_seconds=of_modules((owner >= 0) & (parts != "backward")),
        backward_seconds=of_modules((owner >= 0) & (parts == "backward")),
        kept_bytes=_kept(traced.trace, owner, count),
        state=_state(traced_job.session.train_state, paths, shards),
    )


def _owners(trace: Trace, paths: Sequence[str]) -> np.ndarray:
    """int (operators,): number of the module that ran last; -1 before the first."""
    number = {path: index for index, path in enumerate(paths)}
    of_path = np.array([_number_of(path, number) for path in trace.modules] or [-1], int)
    own = of_path[trace.operator_module]
    last = np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), -1))
    return np.where(last >= 0, own[last], -1)


def _number_of(path: str, number: Mapping[str, int]) -> int:
    while path:
        if path in number:
            return number[path]
        path = path.rpartition(".")[0]
    return -1


def _kept(trace: Trace, owner: np.ndarray, count: int) -> np.ndarray:
    made = np.flatnonzero((trace.category == CATEGORIES.index("activations")) & (trace.made_by >= 0))
    owners = owner[trace.made_by[made]]
    inside = owners >= 0
    return np.bincount(owners[inside], weights=trace.nbytes[made[inside]], minlength=count)


def _state(train_state: TrainState, paths: Sequence[str], shards: int) -> StateBytes:
    """Of all shards together, which are taken to be equal; experts whose ranks send each other tokens are no shards."""
    parameters, gradients, others = [], [], []
    alone = {p for net in train_state.nets.values() for each in sending_experts(net) for p in each.parameters()}

    def whole(parameter: Tensor, value: Tensor) -> int:
        return local_tensor(value).nbytes * (1 if parameter in alone else shards)

    states = [optimizer.state for optimizer in train_state.optimizers.values()]
    on_device = train_state.optimizer_state == "device"
    for path in paths:
        own = list(find_module(train_state.nets, path).parameters())
        learned = [p for p in own if p.requires_grad]
        held = [(p, value) for p in learned for state in states for value in state.get(p, {}).values()]
        averaged = path.partition(".")[0] in train_state.ema and train_state.average == "device"
        parameters.append(sum(whole(p, p) for p in own))
        gradients.append(sum(whole(p, p) for p in learned))
        nbytes = sum(whole(p, value) for p, value in held if hasattr(value, "nbytes"))
        state_bytes = nbytes if on_device else 0
        others.append(state_bytes + (parameters[-1] if averaged else 0))
    held_bytes = (np.array(each, float) for each in (parameters, gradients, others))
    return StateBytes(**dict(zip(("parameters", "gradients", "others"), held_bytes, strict=True)))
