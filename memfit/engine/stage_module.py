"""What torch's schedules call for each stage of a pipeline: a module that holds the stage's modules and runs its part.

It is the outermost module that FSDP2 shards, so that a schedule scatters the gradients of a stage once, after its last
backward, as ``torch.distributed.pipelining`` does with modules under ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from memfit.engine.stage_forward import Compute, StageForward, StageShapes
from memfit.torch_compat.pipelining import ScheduledStage


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """One micro-batch of a schedule.

    Attributes:
        key: what the shapes that stages pass on follow from.
        probe: the forward, for the shapes alone.
        compute: the forward.
        batch: what both are given, once for each stage of the rank; the last of its items is a forward's, which takes
            it out.
    """

    key: Hashable
    probe: Compute
    compute: Compute
    batch: list[Any]


class StageModule(nn.Module):
    """A stage: called with what was received, it gives the hidden state that is sent, or the loss.

    Args:
        stage: its number.
        modules: those of the nets that it holds.
    """

    def __init__(self, forward: StageForward, stage: int, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stage, self.held = stage, nn.ModuleList(modules)
        self._forward_of_stage = forward
        self._shapes: dict[Hashable, StageShapes] = {}
        self._computes: Iterator[tuple[Compute, StageShapes]] = iter(())
        self._after: Callable[[], None] | None = None

    def forward(self, *received: Tensor) -> Any:
        """Runs the next micro-batch; gives a zero where a validation gives something else than a tensor."""
        compute, shapes = next(self._computes)
        given = self._forward_of_stage.run(self.stage, compute, shapes, received[0] if received else None)
        if self._after is not None:
            self._after()
        return given if isinstance(given, Tensor) else torch.zeros(())

    def scheduled(self, key: Hashable) -> ScheduledStage:
        """How a schedule runs it with micro-batches of a key that was probed."""
        shapes = self._shapes[key]
        return ScheduledStage(module=self, number=self.stage, received=shapes.received, sent=shapes.sent)

    def probe(self, micro_batches: Sequence[StageInput]) -> None:
        """Learns the shapes of micro-batches; communicates nothing."""
        for micro_batch in micro_batches:
            if micro_batch.key not in self._shapes:
                self._shapes[micro_batch.key] = self._forward_of_stage.shapes(self.stage, micro_batch.probe)

    @contextmanager
    def running(self, micro_batches: Sequence[StageInput], after: Callable[[], None] | None) -> Iterator[None]:
        """Inside, calls are for these micro-batches.

        Args:
            after: called after each forward, whose backward then runs; None: there is none.
        """
        self._computes = iter([(micro.compute, self._shapes[micro.key]) for micro in micro_batches])
        self._after = after
        try:
            yield
        finally:
            self._computes, self._after = iter(()), None


def shape_changes(inputs: Sequence[StageInput]) -> tuple[int, ...]:
    """Where micro-batches begin whose shapes are others than those of the one before."""
    return tuple(i for i in range(1, len(inputs)) if inputs[i].key != inputs[i - 1].key)


def divided(
    inputs: Sequence[StageInput], begins: set[int], counts: Callable[[int], Sequence[int]]
) -> Iterator[list[StageInput]]:
    """The micro-batches of each schedule: groups that begin at these, each divided by ``counts`` of its number."""
    for begin, end in pairwise([0, *sorted(begins), len(inputs)]):
        for count in counts(end - begin):
            yield list(inputs[begin : begin + count])
            begin += count


@contextmanager
def without_wrapping() -> Iterator[None]:
    """Raises what a schedule has wrapped in errors of its own, whose messages are of many lines.

    It is raised after they are gone: an error that came of itself would be a circle.
    """
    cause: BaseException | None = None
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        cause = error
        while type(cause) is RuntimeError and cause.__cause__ is not None:
            cause = cause.__cause__
    if cause is not None:
        raise cause
