"""Memory that an operator allocates and frees within one call, which no tensor shows: workspaces and scratch.

On CUDA its size follows from the code of the libraries (``memfit.device.virtual.workspace``). On a CPU the call is
described, and measured later (``memfit.trace.operator_scratch``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from memfit.device.virtual import cudnn_benchmark, workspace
from memfit.device.virtual.card_rules import CardRules, plain
from memfit.device.virtual.card_scratch import EITHER_BACKWARD, EITHER_FORWARD, card_scratch
from memfit.events import ALLOCATE, EMPTY_CACHE
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensor
from memfit.trace import operator_scratch
from memfit.trace.event_record import EventRecord
from memfit.trace.operators import Operator

_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
ConvolutionPass = tuple[Any, int]
"""(plan that cuDNN searches, or None; bytes of its workspace) for one output of a convolution."""


@dataclass(frozen=True, kw_only=True)
class CardCall:
    """A call whose scratch depends on the card."""

    description: str
    """As of ``memfit.device.virtual.card_scratch``."""
    places: list[int] = field(default_factory=list)
    """For each moment at which it takes its scratch, how many events of its operator come before it, scratch aside."""

    def __str__(self) -> str:
        return " @".join((self.description, *map(str, self.places)))


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
        self.workspace_bytes: int | None = None
        """Bytes of a cuBLAS workspace, which the first one decides, as in PyTorch; None before it."""
        self.is_workspace_configured = False
        """As ``Trace.is_workspace_configured``."""
        self.card_calls: dict[int, CardCall] = {}
        """By operator, the calls whose scratch depends on the card."""

    def passes(self, func: Any, args: Any) -> list[ConvolutionPass]:
        """The passes of a convolution, one for each of its outputs."""
        if self._rules is None or not _is_on_card(args, {}):
            return []
        searched = cudnn_benchmark.plans(func, args) if torch.backends.cudnn.benchmark else (None, None)
        workspaces = iter(self._scratch(func, args, len(self._record.op_rows)))
        asked = args[10][:2] if func is cudnn_benchmark.BACKWARD else (True,)
        return [(plan, next(workspaces, 0) if wanted else 0) for plan, wanted in zip(searched, asked, strict=False)]

    def run_pass(self, plan: Any, nbytes: int, row: int) -> None:
        """One pass of a convolution, after its output is allocated: a search the first time, then its workspace."""
        if plan is not None and plan not in self.plans:
            self.plans.add(plan)
            self._record.event(EMPTY_CACHE, -1, row)
        self._note_moment(row)
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
        if not kind.takes or not _is_on_card(args, kwargs):
            return
        row = record.last_row
        if func in workspace.CUBLAS_OPERATORS and (thread := node is not None) not in self.cublas_threads:
            self.cublas_threads |= {thread}
            if self.workspace_bytes is None:
                self.workspace_bytes = workspace.cublas_workspace(self._rules)
                self.is_workspace_configured = workspace.configured_workspace() is not None
            record.event(ALLOCATE, record.new_storage(self.workspace_bytes, "workspace", row))
        if not kind.searches:
            workspaces = self._scratch(func, args, row)
            self._note_moment(row)
            for nbytes in workspaces:
                self._take(row, nbytes)

    def _scratch(self, func: Any, args: Any, row: int) -> tuple[int, ...]:
        """Bytes that a card's call takes, one moment after another.

        What is asked of the card for them is no fact of the trace, unless a script may ask how much is allocated.
        """
        assert self._rules is not None
        description = self._backward_of_either(func, args) or workspace.card_call(func, args)
        if not description:
            return workspace.scratch(self._rules, func, args)
        self.card_calls[row] = CardCall(description=description)
        rules = self._rules if self._record.live is not None else plain(self._rules)
        nbytes = card_scratch(rules, description)
        return (nbytes,) * workspace.moments(func, args) if nbytes else ()

    def _backward_of_either(self, func: Any, args: Any) -> str:
        """Describes the backward of a call that is flash's or cuDNN's; empty for all others."""
        if func is not _FLASH_BACKWARD:
            return ""
        number = self._record.number_of(args[5])
        forward = self.card_calls.get(self._record.made_by[number]) if number is not None else None
        if forward is None or not forward.description.startswith(EITHER_FORWARD):
            return ""
        return f"{EITHER_BACKWARD} {workspace.flash_backward_scratch(args[1], args[2])}"

    def _note_moment(self, row: int) -> None:
        """Notes behind which of its operator's events a described call takes its scratch."""
        call = self.card_calls.get(row)
        if call is not None:
            own = takewhile(lambda operator: operator == row, reversed(self._record.operator))
            call.places.append(sum(1 for _ in own))

    def _take(self, row: int, nbytes: int) -> None:
        self.calls.append((len(self._record.kind), row, nbytes))
        if self._record.live is not None:
            self._record.live.malloc(-1, nbytes)
            self._record.live.free(-1)


def _is_on_card(args: Any, kwargs: Any) -> bool:
    """Whether a call runs on the card: a script may also run operators on the host."""
    is_on_host = False
    for tensor in tensors_in((args, kwargs)):
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
        if device.type != "cpu":
            return True
        is_on_host = True
    return not is_on_host and torch.device((kwargs or {}).get("device") or "cpu").type != "cpu"
