"""Memory that an operator allocates and frees within one call, which no tensor shows: workspaces and scratch.

On CUDA its size follows from the code of the libraries (``memfit.device.virtual.workspace``). On a CPU the call is
described, and measured later (``memfit.trace.operator_scratch``).
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.device.virtual import cudnn_benchmark, workspace
from memfit.device.virtual.card_rules import CardRules
from memfit.events import ALLOCATE, EMPTY_CACHE
from memfit.trace import operator_scratch
from memfit.trace.event_record import EventRecord
from memfit.trace.operators import Operator

ConvolutionPass = tuple[Any, int]
"""(plan that cuDNN searches, or None; bytes of its workspace) for one output of a convolution."""


class CallMemory:
    """Records the memory within calls.

    Args:
        record: receives the events.
        rules: those of the card; None on a CPU.
    """

    def __init__(self, record: EventRecord, rules: CardRules | None) -> None:
        self._record, self._rules = record, rules
        self.calls: list[operator_scratch.Call] = []
        """Calls that take memory within themselves."""
        self.plans: set[tuple[Any, ...]] = set()
        """Passes of convolutions for which cuDNN has searched its plans."""
        self.cublas_threads: frozenset[bool] = frozenset()
        """The threads that have a cuBLAS workspace: the forward's (False), the backward's (True)."""

    def passes(self, func: Any, args: Any) -> list[ConvolutionPass]:
        """The passes of a convolution, one for each of its outputs."""
        if self._rules is None:
            return []
        searched = cudnn_benchmark.plans(func, args) if torch.backends.cudnn.benchmark else (None, None)
        workspaces = iter(workspace.scratch(self._rules, func, args))
        asked = args[10][:2] if func is cudnn_benchmark.BACKWARD else (True,)
        return [(plan, next(workspaces, 0) if wanted else 0) for plan, wanted in zip(searched, asked, strict=False)]

    def run_pass(self, plan: Any, nbytes: int, row: int) -> None:
        """One pass of a convolution, after its output is allocated: a search the first time, then its workspace."""
        if plan is not None and plan not in self.plans:
            self.plans.add(plan)
            self._record.event(EMPTY_CACHE, -1, row)
        if nbytes:
            self._take(row, nbytes)

    def note(self, kind: Operator, func: Any, args: Any, kwargs: Any, node: Any) -> None:
        """Notes what a call took within itself.

        Args:
            node: autograd's node in a backward, which has a thread and so a cuBLAS handle of its own; else None.
        """
        record = self._record
        if self._rules is None:
            if operator_scratch.may_have(func, args):
                key = operator_scratch.call_key(func, args, kwargs)
                if key is not None:
                    self.calls.append((len(record.kind), record.last_row, key))
            return
        if not kind.takes:
            return
        row = record.last_row
        if func in workspace.CUBLAS_OPERATORS and (thread := node is not None) not in self.cublas_threads:
            self.cublas_threads |= {thread}
            nbytes = workspace.cublas_workspace(self._rules)
            record.event(ALLOCATE, record.new_storage(nbytes, "workspace", row))
        if not kind.searches:
            for nbytes in workspace.scratch(self._rules, func, args):
                self._take(row, nbytes)

    def _take(self, row: int, nbytes: int) -> None:
        self.calls.append((len(self._record.kind), row, nbytes))
        if self._record.live is not None:
            self._record.live.malloc(-1, nbytes)
            self._record.live.free(-1)
