"""Validation under other policies than a plan's: what each would come to, traced behind the same windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.errors import describe
from memfit.forked_process import NoResultError
from memfit.job import Job, Shape
from memfit.plan import PhasePolicy
from memfit.planner.live_bytes import LiveBytes, live_bytes_of
from memfit.planner.options import validation_policies
from memfit.planner.search.second_core import forked_with_room
from memfit.planner.timing.roofline import operator_seconds
from memfit.trace.session_state import random_numbers
from memfit.trace.validation_traces import ValidationTrace

Asked = PhasePolicy | tuple[PhasePolicy, Shape]
"""A policy for validation, and the micro-batch that it looks at where that is another."""
TRACED = 45_000
"""Operators that may be traced for options of validation which the plan leaves: 5 to 10 s. Where that is not enough for
all of them, the job's first one comes first, then precision."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What one policy for validation comes to."""

    policy: PhasePolicy
    peak: int | None
    """Peak bytes of tensors; None where there is no such phase."""
    seconds: float | None
    """Seconds of one validation; None where that is not known."""


def validation_of(trace: ValidationTrace, live_bytes: LiveBytes, device: Device, precision: str) -> Validation:
    """What a traced policy comes to."""
    peak = live_bytes.peaks().get("validate")
    return Validation(policy=trace.policy, peak=peak, seconds=seconds_of(trace, device, precision))


def seconds_of(trace: ValidationTrace, device: Device, precision: str) -> float | None:
    """Seconds of one validation on a card; None on a CPU, where its operators are not timed."""
    phase = next((phase for phase in trace.trace.phases if phase[0] == "validate"), None)
    if phase is None or trace.turns is None or not device.is_cuda:
        return None
    each = operator_seconds(trace.trace, device, precision)
    if each is None:
        return None
    return float(np.dot(each, trace.turns))


class OtherPolicies:
    """The policies that a plan leaves, each traced behind the same windows.

    Args:
        pending: what ``traced`` takes its next policy from.
        device: of the plan.
    """

    def __init__(self, job: Job, pending: deque[Asked], traced: Iterator[ValidationTrace], device: Device) -> None:
        self._job, self._pending, self._traced, self._device = job, pending, traced, device

    def outcomes(
        self, others: Mapping[str, Asked], operators: int, *, second_core: bool
    ) -> dict[str, Validation | str]:
        """What each comes to, or why that is not known; after one that fails, none is.

        Args:
            operators: of a validation.
            second_core: whether a copy of this process may trace half of them.
        """
        self._pending.clear()
        worth = sorted(others, key=lambda name: name == validation_policies.PRECISION)
        worth = list(
            dict.fromkeys([*worth[:1], *(name for name in others if name == validation_policies.PRECISION), *worth])
        )
        affordable = worth[: TRACED // max(operators, 1)]
        asked = [(name, others[name]) for name in others if name in affordable]
        dear = f"bytes and time: no trace was made of this validation's {operators} operators once more"
        traced = self._by_two(asked) if second_core and len(asked) > 1 else self._until_one_fails(asked)
        outcomes: dict[str, Validation | str] = dict.fromkeys(others, dear)
        failed = ""
        for name, _ in asked:
            outcomes[name] = outcome = failed or traced[name]
            failed = outcome if isinstance(outcome, str) else ""
        return outcomes

    def traced_alike(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation]:
        """What each comes to, in a copy of the process that traces the others.

        Raises:
            NoResultError: random numbers were drawn: the other process would have drawn others.
            Exception: what validation raised. It may work in the process itself: a backward does not run in a copy.
        """
        numbers = random_numbers()
        outcomes = {name: self._next(policy) for name, policy in asked}
        if random_numbers() != numbers:
            raise NoResultError
        return outcomes

    def _by_two(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation | str]:
        """Every second policy is traced by a copy; where that fails, here."""
        process = forked_with_room(self)
        if process is None:
            return self._until_one_fails(asked)
        here, there = asked[::2], asked[1::2]
        with closing(process):
            call = process.call("traced_alike", there)
            outcomes = self._until_one_fails(here)
            with suppress(NoResultError):
                return outcomes | call.result()
        if len(outcomes) < len(here) or any(isinstance(outcome, str) for outcome in outcomes.values()):
            raise NoResultError  # nothing can be traced behind a validation that failed
        return outcomes | self._until_one_fails(there)

    def _until_one_fails(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation | str]:
        outcomes: dict[str, Validation | str] = {}
        for name, policy in asked:
            try:
                outcomes[name] = self._next(policy)
            except Exception as error:  # the job's own code, under settings that nobody may have tried
                outcomes[name] = f"validation so raises {describe(error)}"
                break
        return outcomes

    def _next(self, policy: Asked) -> Validation:
        self._pending.append(policy)
        trace = next(self._traced)
        precision = str(trace.policy.settings.get("precision", self._job.precision))
        return validation_of(trace, live_bytes_of(trace.trace, self._device), self._device, precision)
