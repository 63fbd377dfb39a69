"""Traces of timm nets in which each pass of a convolution takes the workspace that a rule gives it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.device.virtual import cudnn_benchmark, layout_copies, workspace
from memfit.device.virtual.card_scratch import card_scratch
from memfit.events import Trace
from memfit.trace.call_memory import CallMemory

SMALL, LARGE = 8, 12
"""Batches that are traced; a storage's bytes at another batch follow from them."""
_MARK = 1 << 50
"""Bytes from which a storage stands for a pass: its number is what is above."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a convolution that cuDNN runs."""

    kind: str
    """``forward``, ``input`` or ``weight`` (the gradient that it makes)."""
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    copies: bool
    """Whether memfit takes a workspace for it."""

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the output."""
        sizes = zip(self.x[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        spatial = [(size + 2 * pad - gap * (k - 1) - 1) // step + 1 for size, k, step, pad, gap in sizes]
        return (self.x[0], self.weight[0], *spatial)

    @property
    def tensors(self) -> tuple[int, int, int]:
        """Bytes of input, weight and output in float32."""
        return 4 * math.prod(self.x), 4 * math.prod(self.weight), 4 * math.prod(self.out)


Rule = Callable[[Pass], float]
"""Bytes of the workspace of a pass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassTraces:
    """A net's traces at two batches, and its passes at the smaller one."""

    small: Trace
    large: Trace
    passes: tuple[Pass, ...]

    def at(self, batch: int, rule: Rule) -> Trace:
        """The trace at a batch, with these workspaces."""
        slope = (self.large.nbytes - self.small.nbytes) // (LARGE - SMALL)
        nbytes = self.small.nbytes + slope * (batch - SMALL)
        marked = np.flatnonzero(self.small.nbytes >= _MARK)
        for storage in marked:
            own = self.passes[int(self.small.nbytes[storage]) - _MARK]
            scaled = dataclasses.replace(own, x=(own.x[0] * batch // SMALL, *own.x[1:]))
            nbytes[storage] = int(rule(scaled))
        return _without(dataclasses.replace(self.small, nbytes=nbytes), marked[nbytes[marked] <= 0])


def trace_passes(model: str) -> PassTraces:
    """Traces a net of timm as ``train.py`` trains it."""
    from bench.accuracy_parts.timm_job import Timm
    from memfit.device.hardware.catalogue import find_device
    from memfit.job import Shape
    from memfit.trace.step import Tracing, trace_job

    how = Tracing(device=find_device("a100-40gb"))
    traces = []
    for batch in (SMALL, LARGE):
        with _marked() as passes:
            traces.append(trace_job(Timm(model=model), Shape(items=batch), how))
        if batch == SMALL:
            own = tuple(passes)
    assert all(np.array_equal(getattr(traces[0], name), getattr(traces[1], name)) for name in ("kind", "storage"))
    return PassTraces(small=traces[0], large=traces[1], passes=own)


@contextlib.contextmanager
def _marked() -> Iterator[list[Pass]]:
    """While it lasts, a trace takes a mark for the workspace of each pass, and the passes are listed."""
    passes: list[Pass] = []

    def mark(self: CallMemory, func: Any, args: Any) -> list[tuple[Any, int]]:
        backward = func is cudnn_benchmark.BACKWARD
        x, weight, convolution = (args[1], args[2], args[4:10]) if backward else (args[0], args[1], args[3:9])
        assert self._rules is not None
        call = workspace.convolution_backward_call(args) if backward else ""
        copies = bool(call) and card_scratch(self._rules, call) > layout_copies.copies(func, args)
        answer = []
        for plan, kind in zip(
            cudnn_benchmark.plans(func, args), ("input", "weight") if backward else ("forward",), strict=True
        ):
            if plan is None:
                answer.append((None, 0))
                continue
            answer.append((plan, _MARK + len(passes)))
            passes.append(
                Pass(
                    kind=kind, x=tuple(x.shape), weight=tuple(weight.shape), stride=tuple(convolution[0]),
                    padding=tuple(convolution[1]), dilation=tuple(convolution[2]), groups=convolution[5], copies=copies,
                )
            )  # fmt: skip
        return answer

    before = CallMemory.passes
    CallMemory.passes = mark  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        CallMemory.passes = before  # type: ignore[method-assign]


def _without(trace: Trace, storages: np.ndarray) -> Trace:
    gone = np.isin(trace.storage, storages)
    before = np.concatenate([[0], np.cumsum(~gone)])
    return dataclasses.replace(
        trace, kind=trace.kind[~gone], storage=trace.storage[~gone], operator=trace.operator[~gone],
        phases=tuple((name, int(before[start]), int(before[end])) for name, start, end in trace.phases),
    )  # fmt: skip
